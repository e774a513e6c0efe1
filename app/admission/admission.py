"""Admission: who may use the engine now. The one place that waits.

Owns the way from a `Demand` to a `Share` of a Slot: can it ever be served, can the tenant pay, whose turn
is it. Called by ``engine/gate.py``: `check` before a prompt is rendered, `admit` when its size is known.
Decisions about turns are made in ``turns.py``, in plain functions; here they are waited for.

What always holds:

* What was reserved is settled once, whatever ends the request; a refused request costs nothing.
* A waiter that leaves is out of the queue at once; one that leaves with its Slot in hand gives it back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..core.errors import Rejected
from ..core.record import PriorityClass
from . import refusals
from .accounts import Accounts
from .joining import Joining
from .quota import Charge
from .slot import Waiter
from .turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..core.facts import EngineFacts, EngineSignals
    from ..core.record import Demand, Key, Limits, Record, Tenant
    from .ledger import Snapshot
    from .policy import Policy
    from .slot import Share, Slot
    from .store import Store


class Admission:
    """Hands out shares of Slots, in fair order. One event loop is the lock.

    Args:
        facts: The engine's sizes.
        store: Where rates are counted.
        policy: What the operator has set for all tenants.
        clock: Monotonic seconds.
    """

    def __init__(
        self, facts: EngineFacts, *, store: Store, policy: Policy, clock: Callable[[], float]
    ) -> None:
        self._facts = facts
        self._policy = policy
        self._clock = clock
        self._accounts = Accounts(store)
        self._turns = Turns(facts, policy=policy, clock=clock, on_release=self._pay)
        # All mutable state of its own
        self._joining: dict[Record, Joining] = {}
        self._admitted: WeakSet[Record] = WeakSet()

    def __repr__(self) -> str:
        return f"<Admission {self._turns!r}>"

    def check(self, record: Record, sequences: int) -> None:
        """Refuse early, by local facts alone, what is hopeless: it costs no tokenizing.

        Raises:
            Rejected: The tenant's queue is full, or a bucket of its is empty.
        """
        self._turns.check(tenant_of(record))
        self._accounts.check(record)

    async def admit(self, record: Record, demand: Demand, *, flex: bool = False) -> Share:
        """Wait for the tenant's turn.

        Demands that one request states in the same tick (a list of prompts) are one: the first call leads,
        the others follow. A request that has been admitted before extends its stay: charged, no new turn.

        Args:
            record: Its tenant pays.
            demand: What the engine may have to compute.
            flex: Ask for the batch class, if the tenant's own is above it.

        Raises:
            Rejected: Refused, at once or after a wait.
        """
        if 0 < self._facts.kv_tokens < demand.prompt_tokens + 1:
            raise refusals.over_cache(demand.prompt_tokens, self._facts.kv_tokens)
        joining = self._joining.get(record)
        if joining is not None:
            return await joining.follow(demand)
        joining = self._joining[record] = Joining(demand)
        try:
            try:
                await asyncio.sleep(0)
            finally:
                del self._joining[record]
            slot = await self._admit(record, joining.whole(), flex=flex)
        except BaseException as ended:
            joining.fail(ended)
            raise
        return joining.succeed(slot)

    async def _admit(self, record: Record, demand: Demand, *, flex: bool) -> Slot:
        # 1. May it ask for so much?
        tenant, key = tenant_of(record), key_of(record)
        _check_size(tenant.limits, demand)
        if key.limits is not None:
            _check_size(key.limits, demand)
        # 2. Can the tenant pay? Reserved now, settled when it ends.
        waiter = self._waiter(record, tenant, demand, flex=flex)
        output_tokens = demand.sequences * waiter.expected_tokens
        charge = Charge(waiter.requests, demand.prompt_tokens, output_tokens)
        waiter.reservation = await self._accounts.reserve(record, charge)
        # 3. Whose turn is it? Whatever ends the wait, nothing of the waiter stays.
        try:
            if record in self._admitted:
                return self._turns.extend(waiter)
            self._turns.enter(waiter)
            self._begin_wait(waiter)
            slot = await waiter.turn
        except BaseException as ended:
            self._turns.leave(waiter)
            self._accounts.settle(waiter.reservation, Charge())
            if isinstance(ended, Rejected):
                self._accounts.show(record)  # as it stands without this request
            raise
        finally:
            waiter.stop_timer()
        if record.tells_queue:
            record.headers[b"x-fairgate-wait"] = b"%.3f" % (self._clock() - waiter.arrived_s)
        self._admitted.add(record)
        return slot

    def _begin_wait(self, waiter: Waiter) -> None:
        record = waiter.record
        if not waiter.turn.done():
            self._start_timer(waiter)
            if self._policy.fixes_status:
                record.decide(self._clock())
        if record.tells_queue:
            record.headers[b"x-fairgate-position"] = b"%d" % self._turns.position(waiter)

    def on_signals(self, signals: EngineSignals) -> None:
        """One engine step has ended."""
        self._turns.on_signals(signals)

    def on_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        """The tenants are these from now on. Who is gone is refused; weights and limits hold at once."""
        self._turns.on_tenants(tenants)

    def close(self, refusal: Callable[[], Rejected]) -> None:
        """Refuse whoever waits, and whoever comes: the server drains, or the engine is gone."""
        self._turns.close(refusal)

    async def settled(self) -> None:
        """Wait until the store has been told of everything that has ended."""
        await self._accounts.settled()

    def usage(self, record: Record) -> dict[str, Any]:
        """What a tenant may know of itself: limits, use, place in the queue, expected wait in seconds."""
        return self._turns.usage(tenant_of(record)) | self._accounts.standing(record)

    def show_limits(self, record: Record) -> None:
        """Put on its answer how a request's accounts stand, before anything is known of the request."""
        self._accounts.show(record)

    def queue_depths(self) -> tuple[int, ...]:
        """Requests that wait, by rank: its part of ours, and the engine's own list."""
        return self._turns.queue_depths()

    def running(self, tenant_id: str) -> int:
        """Sequences of the tenant's in the engine."""
        return self._turns.running(tenant_id)

    def snapshot(self) -> Snapshot:
        """The whole as it stands, frozen."""
        return self._turns.snapshot(settling=self._accounts.settling)

    def check_integrity(self) -> None:
        """Compare every sum with what it is the sum of.

        Raises:
            RuntimeError: Two numbers that must agree do not; the message has them.
        """
        self._turns.check_integrity()

    def _waiter(self, record: Record, tenant: Tenant, demand: Demand, *, flex: bool) -> Waiter:
        priority_class = PriorityClass.BATCH if flex else tenant.priority_class
        return Waiter(
            record=record,
            tenant=tenant,
            priority_class=priority_class,
            demand=demand,
            expected_tokens=self._turns.expected_tokens(tenant.id, priority_class, demand.max_new_tokens),
            arrived_s=self._clock(),
            deadline_s=_least(record.deadline_s, tenant.ttft_deadline_s),
            requests=0 if record in self._admitted else 1,
            turn=asyncio.get_running_loop().create_future(),
        )

    def _start_timer(self, waiter: Waiter) -> None:
        timeout_s = _least(waiter.deadline_s, self._policy.queue_timeout_s)
        if timeout_s is not None:
            left_s = max(0.0, timeout_s - (self._clock() - waiter.arrived_s))
            loop = asyncio.get_running_loop()
            waiter.timer = loop.call_later(left_s, self._turns.expire, waiter, timeout_s)

    def _pay(self, slot: Slot) -> None:
        """A Slot is given back: what was used is paid for; what used nothing costs nothing."""
        used = slot.used
        was_used = used.prompt_tokens or used.completion_tokens
        requests = slot.waiter.requests
        charge = Charge(requests, used.prompt_tokens, used.completion_tokens) if was_used else Charge()
        self._accounts.settle(slot.waiter.reservation, charge)


def tenant_of(record: Record) -> Tenant:
    """The tenant that pays for a request."""
    assert record.tenant is not None, "auth lets only tenants through to the model's routes"
    return record.tenant


def key_of(record: Record) -> Key:
    """The key that a request came with."""
    assert record.principal is not None, "auth stands before admission"
    return record.principal.key


def _check_size(limits: Limits, demand: Demand) -> None:
    prompt, output, n = limits.max_prompt_tokens, limits.max_output_tokens, limits.max_n
    if prompt is not None and demand.prompt_tokens > prompt:
        raise refusals.over_cap("prompt tokens", demand.prompt_tokens, prompt, "messages")
    if output is not None and demand.max_new_tokens > output:
        raise refusals.over_cap("output tokens", demand.max_new_tokens, output, "max_tokens")
    if n is not None and demand.sequences // demand.prompts > n:
        raise refusals.over_cap("answers to a prompt", demand.sequences // demand.prompts, n, "n")


def _least(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
