"""What admission knows of each tenant that has something queued or running.

Owns an `Activity` a tenant (sequences in the engine, requests that wait), and how long requests hold
their slots. Called by ``admission.py``. A tenant with nothing under way is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SMOOTHING = 0.2
"""Weight of the newest duration in a tenant's mean."""
_PRIOR_S = 2.0
"""Seconds that a request takes, before one has."""


@dataclass(slots=True)
class Activity:
    """One tenant's requests under way."""

    running: int = 0
    """Sequences in the engine."""
    queued: int = 0
    """Requests that wait."""


class Ledger:
    """All tenants' activity. One event loop; plain sums."""

    def __init__(self) -> None:
        # All mutable state
        self._tenants: dict[str, Activity] = {}
        self._service_s = _PRIOR_S

    def __len__(self) -> int:
        return len(self._tenants)

    def of(self, tenant_id: str) -> Activity:
        """Its activity, as it stands. Not kept unless it is changed."""
        return self._tenants.get(tenant_id) or Activity()

    def add(self, tenant_id: str, *, running: int = 0, queued: int = 0) -> Activity:
        """Change the sums (by negative numbers too)."""
        activity = self._tenants.setdefault(tenant_id, Activity())
        activity.running += running
        activity.queued += queued
        if not activity.running and not activity.queued:
            del self._tenants[tenant_id]
        return activity

    def running(self) -> dict[str, int]:
        """Sequences in the engine by tenant."""
        return {tenant_id: a.running for tenant_id, a in self._tenants.items() if a.running}

    def served(self, seconds: float) -> None:
        """A request has held its slot for so long."""
        self._service_s += _SMOOTHING * (seconds - self._service_s)

    def next_release_s(self, tenant_id: str | None = None) -> float:
        """Seconds until one of the tenant's requests (or any) will probably end."""
        running = (
            sum(a.running for a in self._tenants.values())
            if tenant_id is None
            else self.of(tenant_id).running
        )
        return self._service_s / max(1, running)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Admission as it stands."""

    running: Mapping[str, int]
    """Sequences in the engine by tenant; a tenant with none is not in it."""
    queued: int
    reserved: int
    """Slots that hold a reservation in the store."""
    settling: int
    """Settlements that the store has not yet confirmed."""
