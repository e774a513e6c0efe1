"""Our own routes in each phase, and what the API says meanwhile (B08, B32)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.core.errors import Outcome
from app.core.health import Health, Phase

from ..support.stack import ACME, OPERATOR, Stack, chat

if TYPE_CHECKING:
    from collections.abc import Callable

PROBES = ("/livez", "/readyz", "/health")


async def probed(stack: Stack) -> list[int]:
    """Statuses of the three probes, asked without a key."""
    return [(await stack.fetch("GET", path, None)).status for path in PROBES]


async def test_loading_gateway_lives_and_is_not_ready(loading: Stack) -> None:
    """From the first accepted connection on."""
    assert await probed(loading) == [200, 503, 503]
    for path in ("/readyz", "/health"):
        answer = await loading.fetch("GET", path, None)
        assert int(answer.headers["retry-after"]) >= 1


async def test_loading_gateway_refuses_the_api_with_a_time(loading: Stack) -> None:
    """503 and not a hang; auth comes first, so strangers learn nothing."""
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")):
        answer = await loading.fetch(method, path, ACME, json=chat())
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json_content["error"]["code"] == "loading"
    assert (await loading.fetch("POST", "/v1/chat/completions", None, json=chat())).status == 401
    outcomes = [record.outcome for record in loading.records]
    assert outcomes == [Outcome.LOADING] * 3 + [Outcome.UNAUTHENTICATED]


async def test_loading_gateway_shows_its_metrics(loading: Stack) -> None:
    """The engine is not up, and every series is there."""
    page = await loading.scrape()
    assert page["fairgate_engine_up",] == 0
    assert page["fairgate_requests_total", "finished", "acme"] == 0


async def test_loaded_gateway_is_ready(loading: Stack) -> None:
    """Only then, and the first request is answered."""
    await loading.load()
    assert await probed(loading) == [200, 200, 200]
    assert (await loading.fetch("POST", "/v1/chat/completions", json=chat())).status == 200
    assert (await loading.scrape())["fairgate_engine_up",] == 1


@pytest.mark.parametrize(
    ("move", "probes", "outcome"),
    [
        (Health.drain, [200, 503, 503], Outcome.DRAINING),
        (lambda health: health.down("the engine core has ended"), [503, 503, 503], Outcome.ENGINE_DOWN),
    ],
)
async def test_gateway_that_ends_refuses_and_closes_the_connection(
    stack: Stack, move: Callable[[Health], None], probes: list[int], outcome: Outcome
) -> None:
    """So that a client's next request finds another replica; metrics stay readable."""
    move(stack.gateway.health)
    assert await probed(stack) == probes
    answer = await stack.fetch("POST", "/v1/chat/completions", json=chat())
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["connection"] == "close"
    assert stack.records[-1].outcome is outcome
    assert (await stack.fetch("GET", "/metrics", OPERATOR)).status == 200
    assert stack.core.arrived == []


async def test_probes_are_no_requests(stack: Stack) -> None:
    """They would drown the counts, and the log."""
    await probed(stack)
    page = await stack.scrape()
    assert not any(value for name, value in page.items() if name[0] == "fairgate_requests_total")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_probes_take_only_reads(stack: Stack, method: str) -> None:
    """405 in our form, with what works."""
    answer = await stack.fetch(method, "/livez", None)
    assert answer.status == 405
    assert "GET" in answer.headers["allow"]
    assert answer.json_content["error"]["code"] == "method_not_allowed"


async def test_probe_answers_head(stack: Stack) -> None:
    """Load balancers ask so. (The server leaves the body out.)"""
    assert (await stack.fetch("HEAD", "/readyz", None)).status == 200


def test_phase_never_goes_back() -> None:
    """A process that drains or is down is not ready again."""
    health = Health()
    assert (health.is_live, health.is_ready) == (True, False)
    health.ready()
    assert health.is_ready
    health.drain()
    health.ready()
    assert health.phase is Phase.DRAINING
    health.down("gone")
    health.drain()
    assert (health.phase, health.is_live) == (Phase.DOWN, False)
    assert repr(health) == "<Health down: gone>"
