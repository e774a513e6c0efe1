"""Limits and turns on a real engine: B01, B03, B14 (f), B19 and B21 where they say C."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.gateway import MODEL, Stream, chat, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.gateway import Gateway

COMPLETIONS = "/v1/completions"
LIMITS: dict[str, dict[str, Any]] = {
    "sharing-one": {"limits": {"max_concurrency": 1, "max_queued": 0}},
    "narrow": {"limits": {"tokens_per_day": 1000, "tokens_per_minute": 100_000}, "models": [MODEL]},
    "sharing-two": {"class": "interactive"},
}
"""What the tenants get while this module runs."""


@pytest.fixture(scope="module", autouse=True)
def _limits(gateway: Gateway) -> Iterator[None]:
    """The running gateway takes the limits by a reload, and loses them again."""
    before = (gateway.home / "config" / "tenants.yaml").read_text()
    document = yaml.safe_load(before)
    for tenant in document["tenants"]:
        tenant.update(LIMITS.get(tenant["id"], {}))
    _take(gateway, yaml.safe_dump(document))
    yield
    _take(gateway, before)


def _take(gateway: Gateway, tenants: str) -> None:
    reloads = gateway.value("fairgate_config_reloads_total", result="ok")
    (gateway.home / "config" / "tenants.yaml").write_text(tenants)
    eventually(lambda: gateway.value("fairgate_config_reloads_total", result="ok") > reloads, 15)


@pytest.fixture(autouse=True)
def _idle(gateway: Gateway) -> None:
    """Each test begins on an engine that does nothing."""
    gateway.wait_idle()


def completion(prompt: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a completion that makes all its tokens."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


def charged(gateway: Gateway, tenant: str) -> float:
    """Tokens that the tenant has been charged, prompts and answers."""
    kinds = ("prompt", "completion")
    return sum(gateway.value("fairgate_tokens_total", tenant=tenant, kind=kind) for kind in kinds)


def test_stream_holds_its_slot_to_its_last_byte(gateway: Gateway) -> None:
    """B03: the second is refused by concurrency while the first streams, and served when it is gone."""
    key = gateway.keys["sharing-one"]
    with gateway.http(key) as client:
        with Stream(gateway, key, COMPLETIONS, completion("a", 2000)) as stream:
            stream.next_event()
            refused = client.post(COMPLETIONS, json=completion("b", 4))
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
        eventually(lambda: client.post(COMPLETIONS, json=completion("b", 4)).status_code == 200, 2)


def test_twenty_that_hang_up_leave_every_slot(gateway: Gateway) -> None:
    """B01: after each the next is served at once; nothing is left in flight."""
    key = gateway.keys["sharing-one"]
    with gateway.http(key) as client:
        for _ in range(20):
            with Stream(gateway, key, COMPLETIONS, completion("a", 500)) as stream:
                assert stream.response.status_code == 200
                stream.next_event()
            eventually(lambda: gateway.value("fairgate_in_flight", tenant="sharing-one") == 0, 2)
        assert client.post(COMPLETIONS, json=completion("b", 4)).status_code == 200


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8, 9]], ["one two", "three"], "one"])
def test_stream_pays_for_exactly_what_it_used(gateway: Gateway, prompt: Any) -> None:
    """B03, B14 (f): token ids and lists counted as the engine counts them, usage asked for or not."""
    key = gateway.keys["acme"]
    before = charged(gateway, "acme")
    with gateway.http(key) as client:
        usage = client.post(COMPLETIONS, json=completion(prompt, 10)).json()["usage"]
    eventually(lambda: charged(gateway, "acme") == before + usage["total_tokens"], 2)
    with Stream(gateway, key, COMPLETIONS, completion(prompt, 10)) as stream:
        list(stream.events())
    eventually(lambda: charged(gateway, "acme") == before + 2 * usage["total_tokens"], 2)


def test_token_limit_is_counted_for_streams_too(gateway: Gateway) -> None:
    """B03: after a stream that used most of the day, a prompt larger than what is left is refused."""
    key = gateway.keys["narrow"]
    with Stream(gateway, key, COMPLETIONS, completion("a", 900)) as stream:
        list(stream.events())
    with gateway.http(key) as client:
        refused = client.post(COMPLETIONS, json=completion([5] * 200, 1))
        assert refused.status_code == 429, refused.text
        assert refused.json()["error"]["code"] == "tokens_per_day_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 86_400
        assert int(refused.headers["x-ratelimit-limit-tokens"]) == 100_000
        assert client.post(COMPLETIONS, json=completion([5] * 20, 1)).status_code == 200


def test_two_backlogs_share_by_work_and_not_by_requests(gateway: Gateway) -> None:
    """B19: long requests of one, short ones of the other, both always waiting: tokens 1:1 within 15 %."""
    stop = threading.Event()
    shapes = {"acme": ("word " * 250, 60), "umbrella": ("word " * 10, 20)}

    def keep_asking(tenant: str) -> None:
        prompt, max_tokens = shapes[tenant]
        with gateway.http(gateway.keys[tenant], timeout=120) as client:
            # Own words for each, or the prefix cache makes the long ones cheap
            while not stop.is_set():
                body = completion(f"{time.monotonic_ns()} {prompt}", max_tokens)
                assert client.post(COMPLETIONS, json=body).status_code == 200

    def cost(tenant: str) -> float:
        kinds = {"prompt": 1.0, "cached": -0.9, "completion": 2.0}
        return sum(
            weight * gateway.value("fairgate_tokens_total", tenant=tenant, kind=kind)
            for kind, weight in kinds.items()
        )

    with ThreadPoolExecutor(64) as pool:
        asking = [pool.submit(keep_asking, tenant) for tenant in shapes for _ in range(32)]
        time.sleep(3)  # both have a backlog, and lengths are learned
        before = {tenant: cost(tenant) for tenant in shapes}
        time.sleep(15)
        served = {tenant: cost(tenant) - before[tenant] for tenant in shapes}
        stop.set()
        for one in asking:
            one.result()
    ratio = served["acme"] / served["umbrella"]
    assert 0.85 <= ratio <= 1.15, served


def test_higher_class_is_next_though_a_backlog_waits(gateway: Gateway) -> None:
    """B21: what waits in the engine's own list is bounded, so it starts within a completion or a few."""
    with ThreadPoolExecutor(64) as pool:

        def ask(tenant: str, max_tokens: int) -> float:
            with gateway.http(gateway.keys[tenant], timeout=120) as client:
                begun_s = time.monotonic()
                assert client.post(COMPLETIONS, json=completion("x", max_tokens)).status_code == 200
                return time.monotonic() - begun_s

        backlog = [pool.submit(ask, "acme", 200) for _ in range(60)]
        eventually(lambda: gateway.value("fairgate_queue_depth") > 40, 10)
        took_s = ask("sharing-two", 1)
        waited_s = [one.result() for one in backlog]
    assert took_s < sorted(waited_s)[len(waited_s) // 2], "it did not wait for the backlog"


def test_chat_body_may_only_lower_its_class(gateway: Gateway) -> None:
    """B21: a number of the client's counts for nothing; ``flex`` is taken."""
    with gateway.http(gateway.keys["acme"]) as client:
        for more in ({"priority": -100}, {"service_tier": "flex"}, {"service_tier": "priority"}):
            answer = client.post("/v1/chat/completions", json=chat("hi", max_tokens=2, **more))
            assert answer.status_code == 200, answer.text
