"""Real engines, one for each configuration, shared by the tests that use it.

An engine starts when the first test asks for it. Modules run in the order of `ORDER`: the one that ends an
engine is the last to use it, so that mostly one runs at a time. Other modules come before all these.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import anthropic
import openai
import pytest

from tests.support.gateway import Gateway
from tests.support.tiny_model import tiny_model, tiny_pooling_model

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

ORDER = (
    "test_arguments_fresh",
    # `gateway`: text
    "test_start",
    "test_openai",
    "test_streams",
    "test_anthropic",
    "test_node",
    "test_tenants",
    "test_prefix_cache",
    "test_hostile_inputs",
    "test_disconnects",
    "test_admission",
    "test_drain",
    # `pooling`: vectors
    "test_pooling",
    "test_gateway_killed",
    # engines of their own
    "test_replicas",
    "test_engine_killed",
    "test_failed_starts",
)

TEXT = {
    # So small that prompts are split over steps, and that some requests wait.
    "ENGINE__MAX_NUM_BATCHED_TOKENS": "256",
    "ENGINE__MAX_NUM_SEQS": "16",
    "ENGINE__MAX_MODEL_LEN": "4096",
    "ENGINE__ENABLE_AUTO_TOOL_CHOICE": "1",
    "ENGINE__TOOL_CALL_PARSER": "hermes",
    # The whole stack, as in production
    "SERVER__CORS_ALLOW_ORIGINS": "https://page.example",
    "LOG__LEVEL": "debug",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what talks to an engine, bound it (a first test waits for the start), and put it in order."""
    here = Path(__file__).parent
    places = [i for i, item in enumerate(items) if here in item.path.parents]
    for item in (real := [items[i] for i in places]):
        item.add_marker(pytest.mark.real)
        item.add_marker(pytest.mark.timeout(300))
    place_of = {module: number for number, module in enumerate(ORDER)}
    real.sort(key=lambda item: place_of.get(item.path.stem, -1))
    for place, item in zip(places, real, strict=True):
        items[place] = item


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure comes the end of the gateway's log."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Gateway):
                report.sections.append((f"log of {name}", value.tail()))
    return report


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A language model behind the whole stack."""
    yield from _started(Gateway(tmp_path_factory.mktemp("gateway"), tiny_model(), TEXT))


@pytest.fixture(scope="session")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """An embedding model."""
    # vLLM would take a Llama for a model that writes.
    settings = {"ENGINE__MAX_MODEL_LEN": "1024", "ENGINE__EXTRA": '{"runner": "pooling"}'}
    yield from _started(Gateway(tmp_path_factory.mktemp("pooling"), tiny_pooling_model(), settings))


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Gateway]:
    """A language model for one test, which may do with it what it likes."""
    yield from _started(Gateway(tmp_path, tiny_model(), TEXT))


def _started(gateway: Gateway) -> Iterator[Gateway]:
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.end()


@pytest.fixture
def acme(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """OpenAI's client with acme's key."""
    with openai_client(gateway, "acme") as client:
        yield client


@pytest.fixture
def umbrella(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """OpenAI's client with umbrella's key."""
    with openai_client(gateway, "umbrella") as client:
        yield client


@pytest.fixture
def claude(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client with acme's key."""
    key = gateway.keys["acme"]
    with anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


def openai_client(gateway: Gateway, tenant: str) -> openai.OpenAI:
    """OpenAI's client with a tenant's key; without retries, which would hide an error."""
    key = gateway.keys[tenant]
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=60)
