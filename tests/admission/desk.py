"""An `Admission` by hand: its clock, its store, its engine's steps and its tenants are the test's.

Used by ``test_admission.py`` and ``test_cancellation.py``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.admission.admission import Admission
from app.admission.policy import Policy
from app.admission.quota import Account
from app.admission.store import MemoryStore
from app.core.facts import EngineSignals
from app.core.record import Demand, Key, Limits, Principal, Record, Tenant, Usage

from ..support.asgi import settle
from ..support.clock import FakeClock
from ..support.facts import facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.admission.quota import Charge, Granted, Reservation, Shortage, Standing
    from app.admission.slot import Share

STEP_S = 0.01


def tenant(
    id: str = "acme", *, weight: float = 1.0, deadline_s: float | None = None, **limits: Any
) -> Tenant:
    """A tenant with these limits."""
    return Tenant(id, weight=weight, ttft_deadline_s=deadline_s, limits=Limits(**limits))


def record_of(
    asking: Tenant, key: str = "k", *, deadline_s: float | None = None, **key_limits: Any
) -> Record:
    """A request of a tenant's, opened."""
    credential = Key(f"{key}-{asking.id}", limits=Limits(**key_limits) if key_limits else None)
    record = Record("r", "POST", "/v1/chat/completions", 0.0, Principal(credential, asking))
    record.deadline_s = deadline_s
    return record


class SlowStore:
    """A `MemoryStore` whose answers take some turns of the loop, as a store over a socket does."""

    def __init__(self, store: MemoryStore, turns: int = 3) -> None:
        self._store = store
        self._turns = turns

    async def reserve(self, accounts: Sequence[Account], charge: Charge) -> Granted | Shortage:
        """Later; decided in the middle of the wait, as by another process."""
        await self._wait()
        answer = await self._store.reserve(accounts, charge)
        await self._wait()
        return answer

    async def settle(self, reservation: Reservation, used: Charge) -> None:
        """Later."""
        await self._wait()
        await self._store.settle(reservation, used)

    def peek(self, accounts: Sequence[Account], least: Charge) -> Shortage | None:
        """At once."""
        return self._store.peek(accounts, least)

    def standing(self, accounts: Sequence[Account]) -> Standing:
        """At once."""
        return self._store.standing(accounts)

    async def close(self) -> None:
        """Nothing is held."""

    async def _wait(self) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)


class Desk:
    """Admission, and all that it stands on."""

    def __init__(
        self,
        *tenants: Tenant,
        policy: Policy | None = None,
        slow: bool = False,
        replicas: int = 1,
        **sizes: Any,
    ) -> None:
        self.clock = FakeClock()
        self.tenants = {each.id: each for each in tenants or (tenant(),)}
        self.store = MemoryStore(self._now_us, self._now_us, replicas=replicas)
        self.admission = Admission(
            facts(**sizes),
            store=SlowStore(self.store) if slow else self.store,
            policy=policy or Policy(),
            clock=self.clock,
        )
        self.admission.on_tenants(self.tenants)

    def _now_us(self) -> int:
        return round(self.clock() * 1_000_000)

    # What a test does

    def ask(
        self,
        who: str = "acme",
        *,
        prompt: int = 10,
        new: int = 10,
        n: int = 1,
        flex: bool = False,
        record: Record | None = None,
        deadline_s: float | None = None,
    ) -> asyncio.Task[Share]:
        """One generation asks to be admitted."""
        record = record or record_of(self.tenants[who], deadline_s=deadline_s)
        return asyncio.create_task(self.admission.admit(record, Demand(prompt, new, n), flex=flex))

    async def admitted(self, who: str = "acme", **more: Any) -> Share:
        """The same, and it is admitted at once."""
        task = self.ask(who, **more)
        await settle()
        assert task.done(), self.admission
        return await task

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        self.clock.advance(seconds)
        await settle()

    def step(self, *, running: int = 1, waiting: int = 0, prefill: int = 0, decode: int = 0) -> None:
        """One step of the engine."""
        self.clock.advance(STEP_S)
        self.admission.on_signals(
            EngineSignals(0, self.clock(), running, waiting, 0.0, prefill, decode or running, 0)
        )

    def reload(self, *tenants: Tenant) -> None:
        """The tenants are these from now on."""
        self.tenants = {each.id: each for each in tenants}
        self.admission.on_tenants(self.tenants)

    # What a test looks at

    def levels(self, who: str = "acme") -> list[int]:
        """What the tenant's buckets hold, in whole units."""
        lines = Account(f"tenant:{who}", self.tenants[who].limits).lines
        levels = self.store._buckets.levels(lines, self.store._now())
        return [-(-level // line.unit) for line, level in zip(lines, levels, strict=True)]

    def is_empty(self) -> bool:
        """Whether nothing is held, queued or reserved, and all sums agree."""
        self.admission.check_integrity()
        now = self.admission.snapshot()
        return (dict(now.running), now.queued, now.reserved, now.settling) == ({}, 0, 0, 0)


def used(prompt: int = 10, completion: int = 10, cached: int = 0) -> Usage:
    """What a generation has used."""
    return Usage(prompt, cached, completion)


@dataclass
class Job:
    """One generation in a simulated engine."""

    tenant: str
    share: Share
    prompt: int
    output: int
    expected: int
    made: int = 0


@dataclass
class Engine:
    """So many slots and a FIFO behind them; each step makes a token for each job in a slot.

    Fed by `Desk.ask`; tells admission of each step as the real one does.
    """

    desk: Desk
    slots: int
    running: list[Job] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)
    """Cost really computed, by tenant: prompt tokens and twice the output."""
    starts: list[str] = field(default_factory=list)
    """Tenants in the order in which their jobs reached the engine."""
    depths: list[int] = field(default_factory=list)
    """The engine's own waiting list after each step."""
    idle: int = 0
    """Slot-steps left empty while somebody waited at the gateway."""

    def arrive(self, job: Job) -> None:
        """The gateway sends it."""
        self.starts.append(job.tenant)
        self.waiting.append(job)

    async def step(self) -> None:
        """One step, its signals, and what the gateway does about it."""
        prefill = 0
        while self.waiting and len(self.running) < self.slots:
            job = self.waiting.pop(0)
            prefill += job.prompt
            self._serve(job, job.prompt)
            self.running.append(job)
        if self.desk.admission.snapshot().queued:
            self.idle += self.slots - len(self.running)
        for job in self.running:
            job.made += 1
            self._serve(job, 2)
        ended = [job for job in self.running if job.made >= job.output]
        self.running = [job for job in self.running if job.made < job.output]
        for job in ended:
            job.share.settle(used(job.prompt, job.made), finished=True)
        self.depths.append(len(self.waiting))
        self.desk.step(running=len(self.running), waiting=len(self.waiting), prefill=prefill)
        await settle()

    def _serve(self, job: Job, units: int) -> None:
        self.served[job.tenant] = self.served.get(job.tenant, 0) + units
