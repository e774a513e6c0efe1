"""The gateway's own series: there from the start, closed labels, counted once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from app.core.errors import Outcome
from app.core.record import Key, Principal, Record, Tenant, Usage
from app.telemetry.metrics import Metrics


class Rig:
    """Metrics of two tenants, and what they say."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry, tenants=["acme", "globex"], quiet_routes=frozenset({"/livez"}))

    def requests(self, tenant: str, outcome: str) -> float | None:
        """Of a tenant, ended so; ``None`` where there is no series."""
        return self.registry.get_sample_value(
            "fairgate_requests_total", {"tenant": tenant, "outcome": outcome}
        )

    def tokens(self, tenant: str, kind: str) -> float | None:
        """Of a tenant and kind."""
        return self.registry.get_sample_value("fairgate_tokens_total", {"tenant": tenant, "kind": kind})

    def close(self, tenant: str | None, outcome: Outcome, usage: Usage, route: str = "/v1/models") -> None:
        """A request ends."""
        who = Principal(Key("k"), Tenant(tenant)) if tenant else None
        record = Record("r", "GET", "/", 0.0, who, route=route, usage=usage)
        record.outcome = outcome
        self.metrics.closed(record)


def test_every_series_is_there_before_its_first_event() -> None:
    """A rate starts at zero, and an alert on a missing series cannot fire."""
    rig = Rig()
    for tenant in ("acme", "globex", "none", "other"):
        for outcome in Outcome:
            assert rig.requests(tenant, outcome) == 0
        for kind in ("prompt", "cached", "completion"):
            assert rig.tokens(tenant, kind) == 0
    for result in ("ok", "failed"):
        assert rig.registry.get_sample_value("fairgate_config_reloads_total", {"result": result}) == 0


def test_request_and_its_tokens_are_counted() -> None:
    """Also of one that was cancelled: what was computed was computed."""
    rig = Rig()
    rig.close("acme", Outcome.CANCELLED, Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3))
    rig.close("acme", Outcome.FINISHED, Usage(prompt_tokens=1))
    assert rig.requests("acme", "cancelled") == rig.requests("acme", "finished") == 1
    assert [rig.tokens("acme", kind) for kind in ("prompt", "cached", "completion")] == [11, 4, 3]
    assert rig.tokens("globex", "prompt") == 0


def test_labels_are_a_closed_set() -> None:
    """Who has no key is none; a tenant that is not configured is other."""
    rig = Rig()
    rig.close(None, Outcome.UNAUTHENTICATED, Usage())
    rig.close("stranger", Outcome.FINISHED, Usage())
    assert rig.requests("none", "unauthenticated") == rig.requests("other", "finished") == 1
    assert rig.requests("stranger", "finished") is None


def test_probe_is_not_counted() -> None:
    """It is no request."""
    rig = Rig()
    rig.close(None, Outcome.FINISHED, Usage(), route="/livez")
    assert rig.requests("none", "finished") == 0


def test_series_follow_the_tenants_file() -> None:
    """A removed tenant's end, a new one's begin, the others' numbers stay."""
    rig = Rig()
    rig.close("acme", Outcome.FINISHED, Usage())
    rig.metrics.set_tenants(["acme", "new"])
    assert rig.requests("globex", "finished") is rig.tokens("globex", "prompt") is None
    assert rig.requests("new", "finished") == 0
    assert rig.requests("acme", "finished") == 1
    rig.close("globex", Outcome.FINISHED, Usage())
    assert rig.requests("other", "finished") == 1


def test_reloads_and_the_engines_state_are_shown() -> None:
    """For alerts."""
    rig = Rig()
    rig.metrics.reloaded(True)
    rig.metrics.reloaded(False)
    rig.metrics.reloaded(False)
    assert rig.registry.get_sample_value("fairgate_config_reloads_total", {"result": "failed"}) == 2
    for up in (True, False):
        rig.metrics.engine_is_up(up)
        assert rig.registry.get_sample_value("fairgate_engine_up") == up
    page, content_type = rig.metrics.scrape()
    assert b"fairgate_engine_up 0.0" in page
    assert content_type.startswith("text/plain")
