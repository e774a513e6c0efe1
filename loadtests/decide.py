"""``python -m loadtests decide``: what one admission decision costs, with a full house.

Owns the measure of `Admission` by itself: no server, no engine, no socket. 256 requests run, 10,000 tenants
have 100,000 requests queued; then, one at a time, a request comes and another ends, so that a third has its
turn: reserve, queue, turn, Slot, settlement, forecast included. Last line:
``decide median_us=… p99_us=… bytes_per_queued=…``. Admission's objects are counted as the growth of all
traced memory per queued request, less what the caller's own task, Record and Demand take.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from app.admission.admission import Admission
from app.admission.policy import Policy
from app.admission.store import MemoryStore
from app.core.facts import EngineFacts, EngineSignals
from app.core.record import Demand, Key, Limits, Principal, PriorityClass, Record, Tenant, Usage

from .progress import steps

if TYPE_CHECKING:
    from app.admission.slot import Share

SLOTS = 256
BARS = {"median_us": 50.0, "p99_us": 200.0, "bytes_per_queued": 2048.0, "leave_s": 2.0}
_FACTS = EngineFacts(
    vllm_version="",
    model="",
    served_names=("m",),
    adapters=(),
    tasks=("generate",),
    max_model_len=8192,
    slots=SLOTS,
    batched_tokens=4096,
    block_size=16,
    kv_tokens=1_000_000,
    kv_dtype="auto",
    ranks=1,
    load_s=0.0,
)
_LIMITS = Limits(requests_per_minute=10**9, tokens_per_minute=10**9, tokens_per_day=10**12, max_queued=10**6)
_DEMAND = Demand(prompt_tokens=200, max_new_tokens=1000)


@dataclass(frozen=True)
class Result:
    """What was measured."""

    median_us: float
    p99_us: float
    bytes_per_queued: float
    leave_s: float

    def line(self) -> str:
        """For machines."""
        return (
            f"decide median_us={self.median_us:.1f} p99_us={self.p99_us:.1f} "
            f"bytes_per_queued={self.bytes_per_queued:.0f} leave_s={self.leave_s:.2f}"
        )


def command(
    tenants: Annotated[int, typer.Option(help="Tenants with requests in the queue.")] = 10_000,
    queued: Annotated[int, typer.Option(help="Requests in the queue.")] = 100_000,
    decisions: Annotated[int, typer.Option(help="Decisions measured.")] = 5_000,
) -> None:
    """Cost of one admission decision, with 256 running and 100,000 queued."""
    result = uvloop.run(measure(tenants, queued, decisions))
    for name, bound in BARS.items():
        value = getattr(result, name)
        typer.echo(f"{name}: {value:.1f}, bar ≤ {bound:g}: {'met' if value <= bound else 'MISSED'}", err=True)
    typer.echo(result.line())


async def measure(tenants: int, queued: int, decisions: int) -> Result:
    """Fill the house, measure decisions, then let everybody leave."""
    house = House(tenants)
    with steps("decide", 4) as step:
        step("filling the batch", 1)
        await house.fill_batch()
        step(f"queueing {queued} requests of {tenants} tenants", 1)
        size = await house.queue(queued)
        step(f"{decisions} decisions", 1)
        took_us = sorted([await house.decide(at) for at in range(decisions)])
        step("everybody leaves", 1)
        leave_s = await house.empty()
    return Result(took_us[len(took_us) // 2], took_us[int(len(took_us) * 0.99)], size, leave_s)


class House:
    """An `Admission` without an engine: steps are told to it, requests end when they are settled here."""

    def __init__(self, tenants: int) -> None:
        store = MemoryStore(lambda: time.monotonic_ns() // 1000, lambda: time.time_ns() // 1000)
        self.admission = Admission(_FACTS, store=store, policy=Policy(), clock=time.monotonic)
        self._principals = [_principal(number) for number in range(tenants)]
        self._running: deque[Share] = deque()
        self._waiting: set[asyncio.Task[Share]] = set()

    async def fill_batch(self) -> None:
        """Ask until the first one waits: the batch is full, and the engine's own list too."""
        while not self._waiting:
            self._ask(self._principals[0])
            await _turns_of_the_loop(3)

    async def queue(self, queued: int) -> float:
        """Queue so many requests. Returns the bytes that admission holds for each."""
        records = [_record(self._principals[at % len(self._principals)]) for at in range(queued)]
        of_a_task = await _bytes_of_a_task()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for start in range(0, queued, 5000):
            for record in records[start : start + 5000]:
                self._start(record)
            await _turns_of_the_loop(3)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return held / queued - of_a_task

    async def decide(self, at: int) -> float:
        """One request comes, one ends, one has its turn. Returns µs of CPU, the loop's own included."""
        principal = self._principals[at % len(self._principals)]
        record = _record(principal)
        if at % 16 == 0:
            self._step()
        ending = self._running.popleft()
        started_ns = time.thread_time_ns()
        self._start(record)
        await _turns_of_the_loop(2)
        ending.settle(Usage(200, 0, 100), finished=True)
        await _turns_of_the_loop(2)
        return (time.thread_time_ns() - started_ns) / 1000

    async def empty(self) -> float:
        """Whoever waits leaves, whoever runs ends. Returns the seconds until the queue is empty."""
        started_s = time.perf_counter()
        for task in self._waiting:
            task.cancel()
        await _turns_of_the_loop(3)
        if self.admission.snapshot().queued:
            raise RuntimeError(f"{self.admission!r} after all have left")
        leave_s = time.perf_counter() - started_s
        while self._running:
            self._running.popleft().settle(Usage(200, 0, 100), finished=True)
        await self.admission.settled()
        self.admission.check_integrity()
        return leave_s

    def _ask(self, principal: Principal) -> None:
        self._start(_record(principal))

    def _start(self, record: Record) -> None:
        task = asyncio.get_running_loop().create_task(self.admission.admit(record, _DEMAND))
        self._waiting.add(task)
        task.add_done_callback(self._granted)

    def _granted(self, task: asyncio.Task[Share]) -> None:
        self._waiting.discard(task)
        if not task.cancelled():
            self._running.append(task.result())

    def _step(self) -> None:
        self.admission.on_signals(
            EngineSignals(
                rank=0,
                at_s=time.monotonic(),
                running=SLOTS,
                waiting=2,
                kv_usage=0.5,
                prefill_tokens=200,
                decode_tokens=SLOTS,
                preempted=0,
            )
        )


async def _turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _bytes_of_a_task() -> float:
    """What a waiting task takes that waits for nothing of ours."""
    count = 1000
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tasks = [asyncio.create_task(_wait_for_ever()) for _ in range(count)]
    await asyncio.sleep(0)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return taken / count


async def _wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def _principal(number: int) -> Principal:
    tenant = Tenant(f"t{number}", priority_class=PriorityClass.STANDARD, limits=_LIMITS)
    return Principal(Key(f"k{number}"), tenant)


def _record(principal: Principal) -> Record:
    return Record("r", "POST", "/v1/completions", time.monotonic(), principal)
