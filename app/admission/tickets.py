"""What stands in the fair queue: tickets in a tenant's line, tenants under a class.

Owns `Ticket` (a request's place and account), `Flow` (a tenant under one class) and `Group` (a class).
Made and moved by ``fairness.py``; ``admission.py`` holds Tickets and knows nothing of the rest.

Always: a ticket is linked in its flow's line exactly while it is QUEUED.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Generic, TypeVar

from ..core.record import PriorityClass
from .virtual_time import UNIT, UNIT_WEIGHT, Level, Share

CLASS_WEIGHTS = {PriorityClass.INTERACTIVE: 8000, PriorityClass.STANDARD: 4000, PriorityClass.BATCH: 1000}
"""Thousandths. Weights, not ranks: none starves another."""

T = TypeVar("T")


def weight_milli(weight: float) -> int:
    """A tenant's weight as this module wants it.

    Raises:
        ValueError: It is not a finite number of at least 0.001.
    """
    if not math.isfinite(weight) or round(weight * UNIT_WEIGHT) < 1:
        raise ValueError(f"a weight is a finite number of at least 0.001, not {weight}")
    return round(weight * UNIT_WEIGHT)


class TicketState(Enum):
    """Where a request stands."""

    QUEUED = auto()
    IN_FLIGHT = auto()
    GONE = auto()
    """Removed or settled."""


class Ticket(Generic[T]):
    """A request's place in line and, once popped, its account."""

    __slots__ = ("charged_ticks", "cost_ticks", "flow", "item", "next_", "previous", "state", "tag")

    def __init__(self, item: T, cost_ticks: int, flow: Flow[T]) -> None:
        self.item = item
        self.cost_ticks = cost_ticks
        """Expected."""
        self.charged_ticks = 0
        self.state = TicketState.QUEUED
        self.tag = 0
        """Set by `pop`: vLLM's `priority`. Lower is earlier; above 0 and at most MAX_TAG."""
        self.flow = flow
        self.previous: Ticket[T] | None = None
        self.next_: Ticket[T] | None = None

    def __repr__(self) -> str:
        return f"<Ticket {self.state.name.lower()}, {self.tenant_id}, {self.cost_ticks / UNIT:g} units>"

    @property
    def tenant_id(self) -> str:
        """Whose request it is."""
        return self.flow.tenant_id

    @property
    def priority_class(self) -> PriorityClass:
        """The class that it waits in: the tenant's, or a lower one that the client asked for."""
        return self.flow.group.priority_class


class Flow(Share, Generic[T]):
    """A tenant under one class. Its FIFO is a linked list, so that leaving it is O(1) and leaves nothing."""

    __slots__ = ("first", "group", "in_flight", "last", "length", "owes", "tenant_id")

    def __init__(self, uid: int, tenant_id: str, weight: int, group: Group[T]) -> None:
        super().__init__(uid, weight)
        self.tenant_id = tenant_id
        self.group = group
        self.first: Ticket[T] | None = None
        self.last: Ticket[T] | None = None
        self.length = 0
        self.in_flight = 0
        self.owes = False
        """Whether it stands among its class's debtors."""

    def append(self, ticket: Ticket[T]) -> None:
        """The newcomer stands last."""
        ticket.previous, self.last = self.last, ticket
        if ticket.previous is None:
            self.first = ticket
        else:
            ticket.previous.next_ = ticket
        self.length += 1

    def unlink(self, ticket: Ticket[T]) -> None:
        """It leaves the line, wherever it stands."""
        before, after = ticket.previous, ticket.next_
        if before is None:
            self.first = after
        else:
            before.next_ = after
        if after is None:
            self.last = before
        else:
            after.previous = before
        ticket.previous = ticket.next_ = None
        self.length -= 1


class Group(Share, Generic[T]):
    """A class: a share of the root, and the level that its tenants stand on."""

    __slots__ = ("debtors", "flows", "in_flight", "length", "level", "priority_class")

    def __init__(self, uid: int, priority_class: PriorityClass) -> None:
        super().__init__(uid, CLASS_WEIGHTS[priority_class])
        self.priority_class = priority_class
        self.level = Level[Flow[T]]()
        self.flows: dict[str, Flow[T]] = {}
        self.debtors: list[tuple[int, int, Flow[T]]] = []
        """Heap, by tag, of idle tenants whose tag is ahead of V: forgotten when V has passed it."""
        self.length = 0
        self.in_flight = 0

    def forget_if_idle(self, flow: Flow[T]) -> None:
        """Keep of an idle tenant its debt, while it has one; in a quiet class nobody has."""
        if not self.length and not self.in_flight:
            self.flows.clear()
            self.debtors.clear()
            return
        if not flow.length and not flow.in_flight and not flow.owes:
            self._note_debt(flow)
        while self.debtors and self.debtors[0][0] <= self.level.virtual:
            self._review(heappop(self.debtors)[2])

    def _note_debt(self, flow: Flow[T]) -> None:
        flow.owes = True
        heappush(self.debtors, (flow.tag, flow.uid, flow))

    def _review(self, flow: Flow[T]) -> None:
        """V has passed a debtor's tag: forget the tenant, if it is still idle and owes no more."""
        flow.owes = False
        if flow.length or flow.in_flight:
            return
        if flow.tag <= self.level.virtual:
            del self.flows[flow.tenant_id]
        else:
            self._note_debt(flow)
