"""`Waiter` and `Slot`: a request before its turn, and the one owner of all that it holds after it.

Made and ended by ``admission.py``. A request may ask for several generations at once (a list of
prompts): they share one Slot, each with a `Share`, and the Slot is given back when the last has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.record import Usage

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from ..core.record import Demand, PriorityClass, Record, Tenant
    from .forecast import Growth
    from .quota import Reservation
    from .tickets import Ticket


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for its turn."""

    record: Record
    tenant: Tenant
    priority_class: PriorityClass
    demand: Demand
    expected_tokens: int
    """Output per sequence, as forecast."""
    arrived_s: float
    deadline_s: float | None
    """Seconds from arrival to the first token: the client's word or the tenant's, whichever is sooner."""
    turn: asyncio.Future[Slot]
    """Resolved by the dispatch, or with the refusal that ended the wait."""
    requests: int = 1
    """What it counts under a limit of requests: nothing, where it is more work of an admitted one."""
    reservation: Reservation | None = None
    """What the store holds for it; ``None`` where no limit applies."""
    ticket: Ticket[Waiter] | None = None
    timer: asyncio.TimerHandle | None = None
    predicted_s: float | None = None
    """Seconds from arrival to the first token, as forecast."""

    def stop_timer(self) -> None:
        """Its deadline no longer matters."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Slot:
    """Everything that a request holds: room in a rank's window and cache, its account, its reservation."""

    __slots__ = (
        "_on_release",
        "_shares",
        "charged_tokens",
        "growth",
        "is_whole",
        "rank",
        "started_s",
        "used",
        "waiter",
    )

    def __init__(
        self,
        waiter: Waiter,
        rank: int,
        growth: Growth,
        *,
        started_s: float,
        on_release: Callable[[Slot], None],
    ) -> None:
        self.waiter = waiter
        self.rank = rank
        """The data-parallel rank that the request runs on."""
        self.growth = growth
        self.started_s = started_s
        self.charged_tokens = waiter.expected_tokens
        """Output per sequence that has been charged so far."""
        self.used = Usage()
        self.is_whole = True
        """Whether every generation came to its own end, so that its length says something."""
        self._shares = 0
        self._on_release: Callable[[Slot], None] | None = on_release

    def __repr__(self) -> str:
        return f"<Slot {self.waiter.tenant.id}, rank {self.rank}, {self._shares} shares>"

    @property
    def priority(self) -> int:
        """Place in fair order, for vLLM's own waiting list: lower goes first."""
        return 0 if self.waiter.ticket is None else self.waiter.ticket.tag

    def share(self) -> Share:
        """A part of it, for one generation."""
        self._shares += 1
        return Share(self)

    def settle(self, usage: Usage, *, finished: bool) -> None:
        """One generation has ended."""
        self.used.add(usage)
        self.is_whole = self.is_whole and finished
        self._shares -= 1
        if self._shares == 0:
            self.release()

    def release(self) -> None:
        """Give everything back. Idempotent."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release(self)


class Share:
    """What one generation holds of a Slot. Ended once, by `settle` or by `release`."""

    __slots__ = ("_slot",)

    def __init__(self, slot: Slot) -> None:
        self._slot: Slot | None = slot

    @property
    def priority(self) -> int:
        """As the Slot's; 0 when it is given back."""
        return 0 if self._slot is None else self._slot.priority

    @property
    def rank(self) -> int:
        """The data-parallel rank to run on."""
        return 0 if self._slot is None else self._slot.rank

    def settle(self, usage: Usage, *, finished: bool) -> None:
        """The generation has ended, having used so much. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.settle(usage, finished=finished)

    def release(self) -> None:
        """It never began: nothing was used."""
        self.settle(Usage(), finished=False)
