"""Cases B02 and B30: clients that leave. The engine stops for them, and every one of them is counted."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.gateway import MODEL, chat, eventually, is_idle, value_in

if TYPE_CHECKING:
    from tests.support.gateway import Gateway

LONG = 2000
"""Tokens: some ten seconds."""

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("hello", max_tokens=LONG, ignore_eos=True),
    "/v1/completions": {"model": MODEL, "prompt": "hello", "max_tokens": LONG, "ignore_eos": True},
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": LONG},
    "/v1/messages": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": LONG,
    },
}


class Counts:
    """The metrics page, and what has changed on it since."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._before = gateway.metrics()

    def since(self, name: str, **labels: str) -> float:
        """By how much a counter has grown."""
        return self._gateway.value(name, **labels) - value_in(self._before, name, **labels)

    def endings(self, tenant: str, page: str | None = None) -> dict[str, float]:
        """The tenant's ended requests by outcome, without zeros; on a page read before, or on a new one."""
        page = page or self._gateway.metrics()
        outcomes = ("finished", "cancelled", "failed", "invalid", "overloaded")
        grown = {
            outcome: value_in(page, "fairgate_requests_total", tenant=tenant, outcome=outcome)
            - value_in(self._before, "fairgate_requests_total", tenant=tenant, outcome=outcome)
            for outcome in outcomes
        }
        return {outcome: count for outcome, count in grown.items() if count}


def in_flight(page: str) -> float:
    """Umbrella's requests in the engine, by the gateway's own count."""
    return value_in(page, "fairgate_in_flight", tenant="umbrella")


@pytest.fixture(autouse=True)
def _idle(gateway: Gateway) -> None:
    """Each test begins on an engine that does nothing."""
    gateway.wait_idle()


@pytest.mark.parametrize("path", BODIES)
def test_engine_stops_when_the_client_of_a_whole_answer_leaves(gateway: Gateway, path: str) -> None:
    """Idle within a second; one cancelled request, charged for exactly what was computed."""
    counts = Counts(gateway)
    with gateway.post_blind(gateway.keys["umbrella"], path, BODIES[path]):
        eventually(lambda: counts.since("vllm:generation_tokens_total") > 50, 10)
    eventually(lambda: is_idle(gateway.metrics()), 1)
    eventually(lambda: counts.endings("umbrella"), 1)
    assert counts.endings("umbrella") == {"cancelled": 1}
    computed = counts.since("vllm:generation_tokens_total")
    assert computed < LONG, "it was stopped"
    assert counts.since("fairgate_tokens_total", tenant="umbrella", kind="completion") == computed
    prompt_tokens = counts.since("vllm:prompt_tokens_total")
    assert counts.since("fairgate_tokens_total", tenant="umbrella", kind="prompt") == prompt_tokens > 0
    time.sleep(0.3)
    assert counts.since("vllm:generation_tokens_total") == computed, "nothing goes on"


def test_thirty_streams_that_vanish_at_once_leave_nothing(gateway: Gateway) -> None:
    """B30: half run, half wait. Within 2 s the gauges are true again, and the sums hold at every scrape."""
    counts = Counts(gateway)
    body = chat("a long story", max_tokens=LONG, ignore_eos=True, stream=True)
    with ExitStack() as clients:
        key = gateway.keys["umbrella"]
        for _ in range(30):
            clients.enter_context(gateway.post_blind(key, "/v1/chat/completions", body))
        eventually(lambda: gateway.value("fairgate_queue_depth") == 14, 10)
        assert gateway.value("vllm:num_requests_running") == 16
        assert gateway.value("vllm:kv_cache_usage_perc") > 0
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < 0.1, "all within 100 ms"
    deadline_s = time.monotonic() + 2
    while not is_idle(page := gateway.metrics()):
        assert time.monotonic() < deadline_s, page
        assert sum(counts.endings("umbrella", page).values()) + in_flight(page) <= 30
    assert in_flight(page) == 0
    assert value_in(page, "fairgate_queue_depth") == 0
    eventually(lambda: sum(counts.endings("umbrella").values()) == 30, 1)
    assert counts.endings("umbrella") == {"cancelled": 30}
    computed = counts.since("vllm:generation_tokens_total")
    assert counts.since("fairgate_tokens_total", tenant="umbrella", kind="completion") == computed > 0
    assert counts.since("fairgate_tokens_total", tenant="umbrella", kind="prompt") >= 16 * 20


def test_a_new_stream_has_the_engine_to_itself_afterwards(gateway: Gateway) -> None:
    """Every slot came back."""
    counts = Counts(gateway)
    with ThreadPoolExecutor(16) as pool:
        bodies = [chat(f"number {i}", max_tokens=8, ignore_eos=True) for i in range(16)]

        def ask(body: dict[str, Any]) -> int:
            with gateway.http(gateway.keys["acme"]) as client:
                return client.post("/v1/chat/completions", json=body).status_code

        assert set(pool.map(ask, bodies)) == {200}
    eventually(lambda: counts.endings("acme") == {"finished": 16}, 2)
    assert counts.since("fairgate_tokens_total", tenant="acme", kind="completion") == 16 * 8
