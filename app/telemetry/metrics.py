"""Prometheus series of the gateway, in the same registry as vLLM's own.

Owns every ``fairgate_*`` series. Told of each ended request by the edge, of reloads by ``tenants``;
read by ``/metrics`` and by the port for scrapers. Labels are closed sets: configured tenants,
outcomes, kinds. Nothing that a client chose ever stands in one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from prometheus_client import Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..core.errors import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry

    from ..core.record import Record

NO_TENANT = "none"
"""Label of requests that came without a valid key."""
OTHER_TENANT = "other"
"""Label of tenants that are not configured (any more)."""
KINDS = ("prompt", "cached", "completion")


class Watched(Protocol):
    """What is asked of admission at each scrape."""

    def queue_depths(self) -> tuple[int, ...]:
        """Requests that wait, by rank."""

    def running(self, tenant_id: str) -> int:
        """Sequences of the tenant's in the engine."""


class Metrics:
    """An `Observer`. Series exist before their first event, so that a rate starts at zero.

    Args:
        registry: Where the series live; one per process.
        tenants: Ids of the configured tenants.
        quiet_routes: Probes, which are not counted as requests.
    """

    def __init__(
        self, registry: CollectorRegistry, *, tenants: Iterable[str], quiet_routes: frozenset[str]
    ) -> None:
        self._registry = registry
        self._quiet_routes = quiet_routes
        self._tenants: frozenset[str] = frozenset()
        self._watched: Watched | None = None
        self._requests = Counter(
            "fairgate_requests", "Requests ended.", ("tenant", "outcome"), registry=registry
        )
        self._tokens = Counter("fairgate_tokens", "Tokens computed.", ("tenant", "kind"), registry=registry)
        self._reloads = Counter(
            "fairgate_config_reloads", "Reloads of the tenants file.", ("result",), registry=registry
        )
        self._engine_up = Gauge("fairgate_engine_up", "1 while the engine serves.", registry=registry)
        self._store_up = Gauge(
            "fairgate_store_up", "1 while limits are counted where they should be.", registry=registry
        )
        self._queued = Gauge(
            "fairgate_queue_depth",
            "Requests that wait for a rank: its part of ours and the engine's own list.",
            ("rank",),
            registry=registry,
        )
        self._in_flight = Gauge(
            "fairgate_in_flight", "Sequences in the engine, by tenant.", ("tenant",), registry=registry
        )
        for result in ("ok", "failed"):
            self._reloads.labels(result)
        self.set_tenants(tenants)

    def set_tenants(self, tenants: Iterable[str]) -> None:
        """The configured tenants are these from now on; series of removed ones end."""
        known = frozenset(tenants)
        for gone in self._tenants - known:
            for outcome in Outcome:
                self._requests.remove(gone, outcome.value)
            for kind in KINDS:
                self._tokens.remove(gone, kind)
            if self._watched is not None:
                self._in_flight.remove(gone)
        if self._watched is not None:
            for tenant in known - self._tenants:
                self._watch_tenant(tenant, self._watched)
        self._tenants = known
        for tenant in (*known, NO_TENANT, OTHER_TENANT):
            for outcome in Outcome:
                self._requests.labels(tenant, outcome.value)
            for kind in KINDS:
                self._tokens.labels(tenant, kind)

    def closed(self, record: Record) -> None:
        """Count one ended request and the tokens that it used."""
        if record.route in self._quiet_routes:
            return
        assert record.outcome is not None, "the edge settles the outcome before it tells"
        tenant = self._label(record)
        self._requests.labels(tenant, record.outcome.value).inc()
        usage = record.usage
        if usage.prompt_tokens:
            self._tokens.labels(tenant, "prompt").inc(usage.prompt_tokens)
            self._tokens.labels(tenant, "cached").inc(usage.cached_tokens)
            self._tokens.labels(tenant, "completion").inc(usage.completion_tokens)

    def reloaded(self, ok: bool) -> None:
        """Count one reload of the tenants file."""
        self._reloads.labels("ok" if ok else "failed").inc()

    def engine_is_up(self, up: bool) -> None:
        """The engine serves, or has ended."""
        self._engine_up.set(1 if up else 0)

    def store_is_up(self, up: bool) -> None:
        """The shared store answers, or limits are counted (or refused) without it."""
        self._store_up.set(1 if up else 0)

    def watch(self, admission: Watched) -> None:
        """Ask admission at each scrape from now on."""
        for rank in range(len(admission.queue_depths())):
            self._queued.labels(str(rank)).set_function(partial(_depth, admission, rank))
        for tenant in (*self._tenants, OTHER_TENANT):
            self._watch_tenant(tenant, admission)
        self._watched = admission

    def _watch_tenant(self, tenant: str, admission: Watched) -> None:
        self._in_flight.labels(tenant).set_function(partial(_running, admission, tenant))

    def scrape(self) -> tuple[bytes, str]:
        """The page and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _label(self, record: Record) -> str:
        if record.tenant is None:
            return NO_TENANT
        return record.tenant.id if record.tenant.id in self._tenants else OTHER_TENANT


def _depth(admission: Watched, rank: int) -> float:
    return admission.queue_depths()[rank]


def _running(admission: Watched, tenant: str) -> float:
    return admission.running(tenant)
