"""Admission: who may use the engine now. The one place that waits.

Called by ``engine/gate.py``: `check` before a prompt is rendered, `admit` when its size is known.
At present every demand is admitted at once; what is held is counted, and given back exactly once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.record import Demand, Record, Tenant


class Admission:
    """Hands out Slots. One event loop is the lock: no await between reading state and changing it."""

    def __init__(self) -> None:
        # All mutable state
        self._running: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Admission {self._running.total()} running, {len(self._running)} tenants>"

    def check(self, record: Record, sequences: int) -> None:
        """Refuse early what is hopeless, before the prompt is rendered.

        Raises:
            Rejected: Never, at present.
        """

    async def admit(self, record: Record, demand: Demand) -> Slot:
        """Wait for the tenant's turn.

        Raises:
            Rejected: Never, at present.
        """
        assert record.tenant is not None, "auth lets only tenants through to the model's routes"
        self._running[record.tenant.id] += demand.sequences
        return Slot(self, record.tenant, demand)

    def snapshot(self) -> dict[str, int]:
        """Sequences in the engine by tenant id; a tenant with none is not in it."""
        return dict(self._running)

    def _release(self, tenant: Tenant, demand: Demand) -> None:
        self._running[tenant.id] -= demand.sequences
        if not self._running[tenant.id]:
            del self._running[tenant.id]


class Slot:
    """One owner of everything that a request holds. Released by whoever ends first."""

    def __init__(self, admission: Admission, tenant: Tenant, demand: Demand) -> None:
        self._admission: Admission | None = admission
        self._tenant = tenant
        self._demand = demand

    def release(self) -> None:
        """Give everything back. Idempotent."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._release(self._tenant, self._demand)
