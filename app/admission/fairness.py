"""Whose turn is it? A hierarchical start-time fair queue: root → class → tenant → FIFO.

Owns the order of the requests that wait, and the ledger of what each tenant has had. Called by
``admission.py``, between two awaits: this module has no clock, awaits nothing, and knows nothing of slots.
How one level divides its service, with the sources, is told in ``virtual_time.py``.

A request's expected cost is charged when it is popped, to its tenant and to its class. What it
makes beyond that is charged as it comes (`charge`), and the rest is set right at the end (`settle`).
Charging late instead leaves VTC's gap between two tenants 21 times wider (design/fairness.md §0.5).

Always:

* Within a tenant and class the order is that of arrival.
* ``charged == settled + charged of what is in flight``, in ticks, at every tenant and class.
* V never falls at any level, and the `tag` of each popped ticket is greater than that of the last.
* A tenant without queue, requests in flight or debt is not stored.

A tenant's class is its own. A request that asks for less (``service_tier: "flex"``) is pushed under the
lower class: the tenant is then a second child there, with a tag of its own, so that its flex work
competes with the other batch work and neither helps nor delays what it sends at full price.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from .fair_view import QueueSnapshot, ShareSnapshot, check_ledger, seen, ticks_ahead
from .tickets import CLASS_WEIGHTS, Flow, Group, Ticket, TicketState
from .virtual_time import Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..core.record import PriorityClass

MAX_TAG = (1 << 60) - 1
"""Above it, in vLLM's signed 64 bits, stands the band. 2^50 cost units: 35 years at 10^6 a second."""

T = TypeVar("T")


class FairQueue(Generic[T]):
    """The requests that wait, in fair order. One event loop is the lock."""

    def __init__(self) -> None:
        # All mutable state
        self._root: Level[Group[T]] = Level()
        self._groups: dict[PriorityClass, Group[T]] = {
            priority_class: Group(uid, priority_class) for uid, priority_class in enumerate(CLASS_WEIGHTS)
        }
        self._blocked: set[str] = set()
        self._in_flight: set[Ticket[T]] = set()
        self._last_tag = 0
        self._uids = 0

    def __repr__(self) -> str:
        now = self.snapshot()
        return f"<FairQueue {now.queued} queued, {now.in_flight} in flight, {now.tenants} tenants>"

    def __len__(self) -> int:
        return sum(group.length for group in self._groups.values())

    # -- the life of a ticket ------------------------------------------------------------------

    def push(
        self, tenant_id: str, priority_class: PriorityClass, weight: int, item: T, cost_ticks: int
    ) -> Ticket[T]:
        """A request joins its tenant's queue under that class.

        Args:
            weight: Of the tenant, in thousandths; it holds from now on for all that it has queued there.
            cost_ticks: Expected cost, at least 1.
        """
        if weight < 1 or cost_ticks < 1:
            raise ValueError(f"weight and cost are at least 1, not {weight} and {cost_ticks}")
        group = self._groups[priority_class]
        flow = group.flows.get(tenant_id)
        if flow is None:
            self._uids += 1
            flow = group.flows[tenant_id] = Flow(self._uids, tenant_id, weight, group)
        elif flow.weight != weight:
            group.level.reweigh(flow, weight)
        ticket = Ticket(item, cost_ticks, flow)
        flow.append(ticket)
        group.length += 1
        group.level.enqueue(flow, cost_ticks)
        self._resume(flow)
        return ticket

    def peek(self) -> Ticket[T] | None:
        """The ticket that `pop` would return."""
        group = self._root.front()
        flow = None if group is None else group.level.front()
        return None if flow is None else flow.first

    def pop(self) -> Ticket[T] | None:
        """Whose turn it is: its expected cost is charged, it is in flight. None: nobody may go."""
        ticket = self.peek()
        if ticket is None:
            return None
        flow, group = ticket.flow, ticket.flow.group
        self._depart(ticket, group.tag)
        ticket.charged_ticks = ticket.cost_ticks
        group.level.serve(flow, ticket.cost_ticks)
        self._root.serve(group, ticket.cost_ticks)
        return ticket

    def overtake(self, ticket: Ticket[T]) -> None:
        """It goes out of turn: more work of a request that is in flight. Charged as any other."""
        self._expect(ticket, TicketState.QUEUED)
        self._depart(ticket, 0)
        self._charge(ticket, ticket.cost_ticks)

    def remove(self, ticket: Ticket[T]) -> None:
        """A waiter leaves. It costs nothing, and the others move up."""
        self._expect(ticket, TicketState.QUEUED)
        self._leave_line(ticket)
        ticket.state = TicketState.GONE
        self._forget_if_idle(ticket.flow)

    def charge(self, ticket: Ticket[T], extra_ticks: int) -> None:
        """It has made more than expected."""
        self._expect(ticket, TicketState.IN_FLIGHT)
        if extra_ticks < 0:
            raise ValueError(f"a charge is not negative: {extra_ticks}")
        self._charge(ticket, extra_ticks)

    def settle(self, ticket: Ticket[T], actual_ticks: int) -> None:
        """It has ended, however it ended: what it really cost stands, the difference is set right."""
        self._expect(ticket, TicketState.IN_FLIGHT)
        if actual_ticks < 0:
            raise ValueError(f"a cost is not negative: {actual_ticks}")
        flow, group = ticket.flow, ticket.flow.group
        refund_ticks = ticket.charged_ticks - actual_ticks
        if refund_ticks > 0:
            ticket.charged_ticks = actual_ticks
            group.level.refund(flow, refund_ticks)
            self._root.refund(group, refund_ticks)
        elif refund_ticks < 0:
            self._charge(ticket, -refund_ticks)
        flow.settled += actual_ticks
        group.settled += actual_ticks
        ticket.state = TicketState.GONE
        flow.in_flight -= 1
        group.in_flight -= 1
        self._in_flight.discard(ticket)
        self._forget_if_idle(flow)

    # -- tenants -------------------------------------------------------------------------------

    def block(self, tenant_id: str) -> None:
        """The tenant may not go now (its own concurrency): skipped, and V does not wait for it."""
        self._blocked.add(tenant_id)
        for flow in self._flows(tenant_id):
            self._pause(flow)

    def unblock(self, tenant_id: str) -> None:
        """It may go again, as if it had just come: being blocked earns no credit, debts are kept."""
        if tenant_id not in self._blocked:
            return
        self._blocked.discard(tenant_id)
        for flow in self._flows(tenant_id):
            self._resume(flow)

    def is_blocked(self, tenant_id: str) -> bool:
        """Whether the tenant may not go now."""
        return tenant_id in self._blocked

    def set_weight(self, tenant_id: str, weight: int) -> None:
        """A new weight, in thousandths, at once. A new class holds for what is pushed from then on."""
        if weight < 1:
            raise ValueError(f"a weight is at least 1, not {weight}")
        for flow in self._flows(tenant_id):
            flow.group.level.reweigh(flow, weight)

    # -- what is seen --------------------------------------------------------------------------

    def queued(self, tenant_id: str) -> int:
        """Requests that the tenant has waiting, in all classes."""
        return sum(flow.length for flow in self._flows(tenant_id))

    def front_of(self, tenant_id: str) -> Ticket[T] | None:
        """The tenant's next ticket, in the highest class where it has one."""
        return next((flow.first for flow in self._flows(tenant_id) if flow.length), None)

    def tenant(self, tenant_id: str) -> tuple[ShareSnapshot, ...]:
        """The tenant as it stands in each class where it has state."""
        return tuple(seen(flow, flow.group.priority_class.value) for flow in self._flows(tenant_id))

    def snapshot(self) -> QueueSnapshot:
        """The whole as it stands."""
        groups = self._groups.values()
        return QueueSnapshot(
            queued=len(self),
            in_flight=len(self._in_flight),
            tenants=sum(len(group.flows) for group in groups),
            virtual=self._root.virtual,
            classes=tuple(seen(group, group.priority_class.value) for group in groups),
        )

    def work_ahead(self, tenant_id: str, priority_class: PriorityClass, weight: int) -> int:
        """Queued ticks that go before a request which this tenant would push there now.

        Zero for a tenant that is not behind its share, whatever others have queued. Exact (for a queue
        to which nobody is added) where up to 64 tenants of the class wait; an upper bound
        beyond. What is in flight is not in it.
        """
        group = self._groups[priority_class]
        flow = group.flows.get(tenant_id) or Flow(0, tenant_id, weight, group)
        return ticks_ahead(self._root, flow, flow.queued)

    def position(self, ticket: Ticket[T]) -> int:
        """About how many requests go before this one. Walks its tenant's own line."""
        self._expect(ticket, TicketState.QUEUED)
        own = own_ticks = 0
        before = ticket.previous
        while before is not None:
            own, own_ticks, before = own + 1, own_ticks + before.cost_ticks, before.previous
        others_ticks = ticks_ahead(self._root, ticket.flow, own_ticks) - own_ticks
        queued_ticks = max(1, self._root.queued)
        return own + round(others_ticks * len(self) / queued_ticks)

    def check_integrity(self) -> None:
        """Compare every sum with what it is the sum of.

        Raises:
            RuntimeError: Two numbers that must agree do not; the message has them.
        """
        check_ledger(self._root, self._groups.values(), self._in_flight, self._blocked)

    # -- private -------------------------------------------------------------------------------

    def _flows(self, tenant_id: str) -> Iterator[Flow[T]]:
        for group in self._groups.values():
            if flow := group.flows.get(tenant_id):
                yield flow

    def _expect(self, ticket: Ticket[T], state: TicketState) -> None:
        if ticket.state is not state:
            raise ValueError(f"{ticket!r} is not {state.name.lower()}")

    def _charge(self, ticket: Ticket[T], ticks: int) -> None:
        ticket.charged_ticks += ticks
        ticket.flow.group.level.charge(ticket.flow, ticks)
        self._root.charge(ticket.flow.group, ticks)

    def _depart(self, ticket: Ticket[T], tag: int) -> None:
        """Out of the line and into flight. The tag is later than the last one given, whatever is asked."""
        self._leave_line(ticket)
        self._last_tag = ticket.tag = min(max(self._last_tag + 1, tag), MAX_TAG)
        ticket.state = TicketState.IN_FLIGHT
        ticket.flow.in_flight += 1
        ticket.flow.group.in_flight += 1
        self._in_flight.add(ticket)

    def _leave_line(self, ticket: Ticket[T]) -> None:
        flow, group = ticket.flow, ticket.flow.group
        flow.unlink(ticket)
        group.length -= 1
        group.level.enqueue(flow, -ticket.cost_ticks)
        if flow.waits and not flow.length:
            group.level.stop(flow)
        self._carry_up(group)

    def _resume(self, flow: Flow[T]) -> None:
        """It waits, if it has something to wait for and may go."""
        if flow.length and not flow.waits and flow.tenant_id not in self._blocked:
            flow.group.level.start(flow)
        self._carry_up(flow.group)

    def _pause(self, flow: Flow[T]) -> None:
        if flow.waits:
            flow.group.level.stop(flow)
            self._carry_up(flow.group)

    def _carry_up(self, group: Group[T]) -> None:
        """A class waits exactly while one of its tenants does, with what these have queued."""
        level = group.level
        if level.queued != group.queued:
            self._root.enqueue(group, level.queued - group.queued)
        if level.waiting and not group.waits:
            self._root.start(group)
        elif group.waits and not level.waiting:
            self._root.stop(group)

    def _forget_if_idle(self, flow: Flow[T]) -> None:
        flow.group.forget_if_idle(flow)
        if not self._in_flight and not len(self):
            self._root.rest(max(group.tag for group in self._groups.values()))
