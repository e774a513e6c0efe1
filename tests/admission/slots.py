"""A batch of slots on virtual time: every step makes one token for each request that it holds.

Drives a FairQueue as the gateway would, with tenants that always have something queued, and adds up
what each was really given. Used by ``test_fairness.py``.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.admission.fairness import FairQueue
from app.admission.tickets import Ticket, weight_milli
from app.admission.virtual_time import UNIT
from app.core.record import PriorityClass

if TYPE_CHECKING:
    from collections.abc import Callable

OUTPUT_UNITS = 2
"""Cost units of an output token; a prompt token costs one."""


@dataclass(frozen=True)
class Load:
    """A tenant that never runs out of requests."""

    tenant: str
    prompt_tokens: int
    output_tokens: Callable[[random.Random], int]
    expected_tokens: int
    weight: float = 1.0
    priority_class: PriorityClass = PriorityClass.STANDARD
    depth: int = 8
    """Requests kept waiting."""

    def expected_ticks(self) -> int:
        """What is charged when its turn comes."""
        return (self.prompt_tokens + OUTPUT_UNITS * self.expected_tokens) * UNIT


@dataclass
class Job:
    """A request of a Load."""

    load: Load
    output_tokens: int
    queued_step: int
    made_tokens: int = 0


@dataclass
class Slots:
    """So many requests at once, popped in fair order."""

    slots: int
    queue: FairQueue[Job] = field(default_factory=FairQueue)
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    loads: list[Load] = field(default_factory=list)
    running: list[Ticket[Job]] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    """Cost units really computed, by tenant."""
    order: list[str] = field(default_factory=list)
    """Tenants in the order of their turns."""
    waits: dict[str, list[int]] = field(default_factory=dict)
    """Steps that each request waited."""
    now: int = 0

    def join(self, load: Load) -> None:
        """From now on this tenant has a backlog."""
        self.loads.append(load)
        for _ in range(load.depth):
            self._push(load)

    def run(self, steps: int) -> None:
        """Let virtual time pass."""
        for _ in range(steps):
            self.now += 1
            self._dispatch()
            for ticket in tuple(self.running):
                self._step(ticket)

    def _dispatch(self) -> None:
        while len(self.running) < self.slots and (ticket := self.queue.pop()) is not None:
            load = ticket.item.load
            self.running.append(ticket)
            self.order.append(load.tenant)
            self.served[load.tenant] += load.prompt_tokens
            self.waits.setdefault(load.tenant, []).append(self.now - ticket.item.queued_step)
            self._push(load)

    def _step(self, ticket: Ticket[Job]) -> None:
        job = ticket.item
        job.made_tokens += 1
        self.served[job.load.tenant] += OUTPUT_UNITS
        if job.made_tokens >= job.output_tokens:
            self.running.remove(ticket)
            self.queue.settle(ticket, (job.load.prompt_tokens + OUTPUT_UNITS * job.made_tokens) * UNIT)
            self._dispatch()
        elif job.made_tokens > job.load.expected_tokens:
            self.queue.charge(ticket, OUTPUT_UNITS * UNIT)

    def _push(self, load: Load) -> None:
        job = Job(load, load.output_tokens(self.rng), self.now)
        self.queue.push(
            load.tenant, load.priority_class, weight_milli(load.weight), job, load.expected_ticks()
        )
