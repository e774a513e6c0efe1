"""`Turns`: whose turn it is, and what the engine has room for. Decides about waiting; waits for nothing.

Owns the fair queue, the windows, the forecasts and the Slots that are out. Called by ``admission.py``.
Arrival, release, departure, an engine step and a change of tenants all end in the same `_dispatch`, which
moves waiters. Nothing here awaits: between reading state and changing it nothing else runs.

What always holds:

* A newcomer never overtakes a waiter of its tenant; between tenants the fair queue decides.
* Nobody who may go waits while a window and its cache have room.
* A Slot's release gives back all that its grant took, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import refusals
from .bounds import Bounds, bounds_of
from .costs import OUTPUT_COST, cost, ticks_of
from .fairness import FairQueue
from .forecast import FirstToken, KvForecast, Lengths
from .ledger import Snapshot
from .slot import Slot, Waiter
from .tickets import weight_milli
from .virtual_time import UNIT
from .window import Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..core.errors import Rejected
    from ..core.facts import EngineFacts, EngineSignals
    from ..core.record import PriorityClass, Tenant
    from .policy import Policy
    from .tickets import Ticket

OVERRUN_S = 0.05
"""Seconds between charges for what requests make beyond their forecast."""


class Turns:
    """The line and the room.

    Args:
        facts: The engine's sizes.
        policy: For all tenants.
        clock: Monotonic seconds.
        on_release: Told of each Slot that has been given back, before the next waiter moves.
    """

    def __init__(
        self,
        facts: EngineFacts,
        *,
        policy: Policy,
        clock: Callable[[], float],
        on_release: Callable[[Slot], None],
    ) -> None:
        self._clock = clock
        self._on_release = on_release
        # All mutable state
        self._queue: FairQueue[Waiter] = FairQueue()
        self._windows = Windows(facts.ranks, facts.slots, steps_behind=facts.steps_behind)
        self._caches = [KvForecast(facts.kv_tokens) for _ in range(facts.ranks)]
        self._lengths = Lengths()
        self._first_token = FirstToken(ranks=facts.ranks)
        self._bounds = Bounds(policy)
        self._slots: set[Slot] = set()
        self._waiting: set[Waiter] = set()
        self._closed: Callable[[], Rejected] | None = None
        self._overruns_s = 0.0
        self._ledger, self._keys = self._bounds.ledger, self._bounds.keys

    def __repr__(self) -> str:
        return f"{self._windows.in_flight} running, {len(self._queue)} waiting, {len(self._ledger)} tenants"

    # -- in and out ----------------------------------------------------------------------------

    def check(self, tenant: Tenant) -> None:
        """Refuse who would have to wait, where the tenant's queue is full or none is allowed.

        Raises:
            Rejected: That, or nobody is let in any more.
        """
        if self._closed is not None:
            raise self._closed()
        is_blocked = self._queue.is_blocked(tenant.id)
        self._bounds.check(tenant, engine_full=self._windows.best() is None, is_blocked=is_blocked)

    def enter(self, waiter: Waiter) -> None:
        """Stand in line. The turn may come at once.

        Raises:
            Rejected: It could only wait in vain.
        """
        tenant = waiter.tenant
        self.check(tenant)
        self._bounds.check_key(waiter, engine_full=self._windows.best() is None)
        ahead = self._ahead(tenant, waiter.priority_class)
        waiter.predicted_s = self._first_token.predict_s(ahead, waiter.demand.prompt_tokens)
        # With nothing ahead it is within its share: never refused for what others have queued.
        if waiter.deadline_s is not None and ahead and (waiter.predicted_s or 0.0) > waiter.deadline_s:
            raise refusals.overloaded(waiter.deadline_s, waiter.predicted_s or 0.0)
        self._line_up(waiter)
        if not self._keys.may_pass(waiter):
            self._keys.park(waiter)
            return
        self._push(waiter)
        self._dispatch()
        queued = self._ledger.of(tenant.id).queued
        if queued > self._bounds.most_queued(tenant) and waiter in self._waiting:
            is_blocked = self._queue.is_blocked(tenant.id)
            refusal = self._bounds.queue_full(tenant, queued - 1, is_blocked=is_blocked)
            self.leave(waiter)
            raise refusal

    def extend(self, waiter: Waiter) -> Slot:
        """More work of an admitted request (beams, tool turns) goes straight through: its turn has been.

        Raises:
            Rejected: Nobody is let in any more.
        """
        if self._closed is not None:
            raise self._closed()
        self._line_up(waiter)
        self._queue.overtake(self._push(waiter))
        self._grant(waiter, self._windows.least())
        return waiter.turn.result()

    def leave(self, waiter: Waiter) -> None:
        """A waiter goes, before its turn or with the Slot just handed to it. Idempotent."""
        if waiter in self._waiting:
            self._forget(waiter)
            self._dispatch()
        elif waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
            waiter.turn.result().release()

    def expire(self, waiter: Waiter, deadline_s: float) -> None:
        """Its time is over: for its own limit 429, for the engine's load 503."""
        is_blocked = self._queue.is_blocked(waiter.tenant.id)
        refusal = self._bounds.waited_for_own(waiter, deadline_s, is_blocked=is_blocked)
        if refusal is None:
            expected_s = deadline_s + self._ledger.next_release_s(waiter.tenant.id)
            refusal = refusals.overloaded(deadline_s, expected_s)
        self._refuse(waiter, refusal)

    def expected_tokens(self, tenant_id: str, priority_class: PriorityClass, max_new_tokens: int) -> int:
        """Output that one sequence will probably have."""
        return self._lengths.expected(tenant_id, priority_class, max_new_tokens)

    # -- what moves the line from outside ------------------------------------------------------

    def on_signals(self, signals: EngineSignals) -> None:
        """One engine step has ended: the windows move, the forecasts grow, waiters may go."""
        self._windows.on_signals(signals, backlog=self._queue.peek() is not None)
        self._caches[signals.rank].on_step()
        self._first_token.on_step(signals)
        if signals.at_s - self._overruns_s >= OVERRUN_S:
            self._overruns_s = signals.at_s
            self._charge_overruns()
        self._dispatch()

    def on_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        """The tenants are these from now on."""
        for waiter in [waiter for waiter in self._waiting if waiter.tenant.id not in tenants]:
            self._refuse(waiter, refusals.removed())
        self._bounds.tenants = tenants
        for tenant in tenants.values():
            self._queue.set_weight(tenant.id, weight_milli(tenant.weight))
            self._block_or_not(tenant)
        self._dispatch()

    def close(self, refusal: Callable[[], Rejected]) -> None:
        """Refuse whoever waits, and whoever comes."""
        self._closed = refusal
        for waiter in list(self._waiting):
            self._refuse(waiter, refusal())

    # -- what is seen --------------------------------------------------------------------------

    def usage(self, tenant: Tenant) -> dict[str, Any]:
        """A tenant's place: running, queued, the first one's position, expected wait in seconds."""
        activity = self._ledger.of(tenant.id)
        first = self._queue.front_of(tenant.id)
        ahead = self._ahead(tenant, tenant.priority_class)
        return {
            "tenant": tenant.id,
            "running": activity.running,
            "queued": activity.queued,
            "position": None if first is None else self._queue.position(first),
            "estimated_wait_s": self._first_token.predict_s(ahead, 0),
            "limits": bounds_of(tenant.limits),
        }

    def position(self, waiter: Waiter) -> int:
        """About how many requests go before this one; 0 once it is its turn."""
        if waiter.ticket is None or waiter not in self._waiting:
            return self._keys.queued(waiter) if self._keys.is_parked(waiter) else 0
        return self._queue.position(waiter.ticket)

    def queue_depths(self) -> tuple[int, ...]:
        """Requests that wait, by rank: its part of ours, and the engine's own list."""
        return self._windows.depths(len(self._waiting))

    def running(self, tenant_id: str) -> int:
        """Sequences of the tenant's in the engine."""
        return self._ledger.of(tenant_id).running

    def snapshot(self, *, settling: int) -> Snapshot:
        """The whole as it stands, frozen."""
        reserved = sum(slot.waiter.reservation is not None for slot in self._slots)
        return Snapshot(self._ledger.running(), len(self._waiting), reserved, settling)

    def check_integrity(self) -> None:
        """Compare every sum with what it is the sum of.

        Raises:
            RuntimeError: Two numbers that must agree do not; the message has them.
        """
        self._queue.check_integrity()
        taken = sum(slot.waiter.demand.sequences for slot in self._slots)
        for name, have, want in (
            ("sequences running by tenant", sum(self._ledger.running().values()), taken),
            ("sequences in the windows", self._windows.in_flight, taken),
            ("requests in the queue or parked", len(self._queue) + len(self._keys), len(self._waiting)),
            ("requests in the caches", sum(len(cache) for cache in self._caches), len(self._slots)),
        ):
            if have != want:
                raise RuntimeError(f"{have} {name}, but {want} are held")

    # -- private -------------------------------------------------------------------------------

    def _push(self, waiter: Waiter) -> Ticket[Waiter]:
        tenant, demand = self._bounds.current(waiter.tenant), waiter.demand
        units = cost(demand.prompt_tokens, demand.sequences * waiter.expected_tokens)
        ticket = self._queue.push(
            tenant.id, waiter.priority_class, weight_milli(tenant.weight), waiter, max(1, units * UNIT)
        )
        waiter.ticket = ticket
        self._keys.passed(waiter)
        self._block_or_not(tenant)
        return ticket

    def _line_up(self, waiter: Waiter) -> None:
        """It waits from here on, in its key's line or in its tenant's."""
        self._waiting.add(waiter)
        self._ledger.add(waiter.tenant.id, queued=1)

    def _let_through(self, waiter: Waiter, *, ran: bool) -> None:
        """One of a key's has gone; the key's next ones join their tenant's line."""
        for freed in self._keys.ended(waiter, ran=ran):
            self._push(freed)

    def _dispatch(self) -> None:
        """Move every waiter that can go."""
        if self._closed is not None:
            return
        while (ticket := self._queue.peek()) is not None:
            if ticket.item.turn.cancelled():  # its task has been told, and has not run since
                self._forget(ticket.item)
                continue
            if not self._bounds.fits_concurrency(ticket.item):
                self._queue.block(ticket.tenant_id)  # until one of its ends, or it leaves
                continue
            rank = self._rank_for(ticket.item)
            if rank is None:
                return
            self._queue.pop()
            self._grant(ticket.item, rank)

    def _forget(self, waiter: Waiter) -> None:
        self._waiting.discard(waiter)
        self._ledger.add(waiter.tenant.id, queued=-1)
        if waiter.ticket is None:
            self._keys.unpark(waiter)
            return
        self._queue.remove(waiter.ticket)
        self._let_through(waiter, ran=False)
        self._block_or_not(waiter.tenant)

    def _rank_for(self, waiter: Waiter) -> int | None:
        """The rank with the least backlog whose window and cache have room."""
        demand = waiter.demand
        for rank in self._windows.with_room():
            if self._caches[rank].fits(
                demand.prompt_tokens, demand.sequences, waiter.expected_tokens, demand.max_new_tokens
            ):
                return rank
        return None

    def _grant(self, waiter: Waiter, rank: int) -> None:
        demand = waiter.demand
        growth = self._caches[rank].add(
            demand.prompt_tokens, demand.sequences, waiter.expected_tokens, demand.max_new_tokens
        )
        self._windows.take(rank, demand.sequences)
        self._waiting.discard(waiter)
        self._ledger.add(waiter.tenant.id, queued=-1, running=demand.sequences)
        self._keys.started(waiter)
        self._block_or_not(waiter.tenant)
        slot = Slot(waiter, rank, growth, started_s=self._clock(), on_release=self._release)
        self._slots.add(slot)
        waiter.turn.set_result(slot)

    def _release(self, slot: Slot) -> None:
        """The one way out of a Slot: everything it held, at once."""
        waiter = slot.waiter
        assert waiter.ticket is not None, "whoever has a Slot came through the queue"
        self._slots.discard(slot)
        self._caches[slot.rank].remove(slot.growth)
        self._windows.give(slot.rank, waiter.demand.sequences)
        self._ledger.add(waiter.tenant.id, running=-waiter.demand.sequences)
        self._ledger.served(self._clock() - slot.started_s)
        self._queue.settle(waiter.ticket, ticks_of(slot.used))
        self._learn(slot)
        self._on_release(slot)
        self._let_through(waiter, ran=True)
        self._block_or_not(waiter.tenant)
        self._dispatch()

    def _refuse(self, waiter: Waiter, refusal: Rejected) -> None:
        if not waiter.turn.done():
            waiter.turn.set_exception(refusal)
            self.leave(waiter)

    def _ahead(self, tenant: Tenant, priority_class: PriorityClass) -> int:
        """Cost units that go before a request which the tenant would push now."""
        return self._queue.work_ahead(tenant.id, priority_class, weight_milli(tenant.weight)) // UNIT

    def _block_or_not(self, tenant: Tenant) -> None:
        if self._bounds.is_at_concurrency(tenant):
            self._queue.block(tenant.id)
        else:
            self._queue.unblock(tenant.id)

    def _charge_overruns(self) -> None:
        """Charge what has been made beyond the forecast; a sequence makes a token a step."""
        for slot in self._slots:
            made = slot.growth.made(self._caches[slot.rank].step)
            beyond = made - slot.charged_tokens
            if beyond > 0 and slot.waiter.ticket is not None:
                slot.charged_tokens = made
                ticks = beyond * slot.waiter.demand.sequences * OUTPUT_COST * UNIT
                self._queue.charge(slot.waiter.ticket, ticks)

    def _learn(self, slot: Slot) -> None:
        waiter, record, used = slot.waiter, slot.waiter.record, slot.used
        if slot.is_whole and used.completion_tokens:
            length = used.completion_tokens // waiter.demand.sequences
            self._lengths.learn(waiter.tenant.id, waiter.priority_class, waiter.demand.max_new_tokens, length)
        if waiter.predicted_s is not None and record.first_token_s is not None:
            self._first_token.learn(waiter.predicted_s, record.first_token_s - waiter.arrived_s)
