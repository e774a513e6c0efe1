"""Case B32: from the first accepted connection to the first answer. The fixture has watched it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.support.gateway import MODEL, Gateway, value_in

if TYPE_CHECKING:
    import openai


def test_first_request_is_nearly_as_fast_as_the_second(gateway: Gateway, umbrella: openai.OpenAI) -> None:
    """Ready means warm."""
    took_s = []
    for _ in range(2):
        begun_s = time.monotonic()
        umbrella.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=16
        )
        took_s.append(time.monotonic() - begun_s)
    first_s, second_s = took_s
    assert first_s < 5 * second_s + 0.5


def test_liveness_holds_while_loading(gateway: Gateway) -> None:
    """An orchestrator must not kill a slow start."""
    assert {sighting.status for sighting in gateway.sightings if sighting.route == "/livez"} == {200}


def test_nothing_is_ready_while_loading(gateway: Gateway) -> None:
    """Readiness and API: 503 with Retry-After until the model has answered, then 200 and never back."""
    for route in ("/readyz", "/v1/models", "/v1/chat/completions"):
        seen = [sighting for sighting in gateway.sightings if sighting.route == route]
        loading = [sighting for sighting in seen if sighting.status != 200]
        assert {sighting.status for sighting in loading} == {503}, route
        assert all(int(sighting.retry_after or 0) >= 1 for sighting in loading)
        assert len(loading) > 5, "the load was watched"
        assert [sighting.status for sighting in seen] == sorted(
            (sighting.status for sighting in seen), reverse=True
        )


def test_answers_come_at_once_while_loading(gateway: Gateway) -> None:
    """No hang: the load runs beside the event loop."""
    loading = [sighting for sighting in gateway.sightings if sighting.status == 503]
    took_s = sorted(sighting.took_s for sighting in loading)
    assert took_s[len(took_s) // 2] < 0.5
    assert took_s[-1] < 5


def test_ready_means_that_the_model_has_answered(gateway: Gateway) -> None:
    """The log's line comes after a first token, and says what the engine is."""
    assert '"event": "ready"' in gateway.log
    page = gateway.metrics()
    assert value_in(page, "fairgate_engine_up") == 1
    # One more than was asked for: the one before ready.
    seen = sum(s.status == 200 for s in gateway.sightings if s.route == "/v1/chat/completions")
    asked = seen + value_in(page, "fairgate_requests_total", outcome="finished", tenant="umbrella")
    assert value_in(page, "vllm:request_success_total") == asked + 1
