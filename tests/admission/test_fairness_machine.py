"""The fair queue and a window, driven at random; the invariants of design/fairness.md §3.1 after every rule.

`HYPOTHESIS_PROFILE=long` looks further than the bounded `ci` profile.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.admission.fairness import MAX_TAG, FairQueue
from app.admission.tickets import CLASS_WEIGHTS, Flow, Group, Ticket, TicketState
from app.admission.virtual_time import REFUND_CREDIT_TICKS, UNIT, UNIT_WEIGHT, Level
from app.admission.window import GREATEST_DEPTH, Window
from app.core.facts import EngineSignals
from app.core.record import PriorityClass

from .fluid import Fluid

SLOTS = 4
TENANTS = st.sampled_from(["a", "b", "c"])
CLASSES = st.sampled_from([PriorityClass.STANDARD, *PriorityClass, PriorityClass.STANDARD])
WEIGHTS = st.sampled_from([1, 300, 1000, 1000, 2500, 7777])
TICKS = st.one_of(st.integers(1, 2000 * UNIT), st.sampled_from([1, 100 * UNIT]))
PICK = st.integers(0, 10**6)


@dataclass
class Epoch:
    """A time in which the same children of a level wait, at the same weights."""

    fluid: Fluid
    start_tags: dict[str, int]
    weights: dict[str, int]
    served: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class Watch:
    """Compares one level with its fluid ideal (I6): epoch by epoch, from outside."""

    def __init__(self, level: Level[Flow[int]] | Level[Group[int]]) -> None:
        self.level = level
        self.largest: defaultdict[str, int] = defaultdict(int)
        self.extra: defaultdict[str, int] = defaultdict(int)
        """Ticks beyond the expected cost since the child's last turn."""
        self.epoch = Epoch(Fluid({}), {}, {})
        self.virtual = 0

    def children(self) -> dict[str, Flow[int] | Group[int]]:
        """Who waits, by name."""
        return {str(share.uid): share for share in self.level.children() if isinstance(share, Flow | Group)}

    def served(self, share: Flow[int] | Group[int], ticks: int, *, turn: bool = False) -> None:
        """A child was charged (refunded, if negative)."""
        name = str(share.uid)
        if turn:
            self.largest[name] = max(self.largest[name], ticks)
            self.extra[name] = 0
        else:
            self.extra[name] += max(ticks, 0)
        if name in self.epoch.weights:
            self.epoch.served[name] += ticks
            self.epoch.fluid.serve(ticks)

    def check(self) -> None:
        """V has not fallen, and nobody who waits is further from the ideal than the bound."""
        assert self.level.virtual >= self.virtual, "V fell"
        self.virtual = self.level.virtual
        children = self.children()
        weights = {name: share.weight for name, share in children.items()}
        if weights != self.epoch.weights:
            tags = {name: share.tag for name, share in children.items()}
            self.epoch = Epoch(Fluid(weights), tags, weights)
            return
        epoch = self.epoch
        room = {
            name: (self.largest[name] + self.extra[name] + REFUND_CREDIT_TICKS) * UNIT_WEIGHT / weight + 2
            for name, weight in weights.items()
        }
        for name, weight in weights.items():
            off = abs(epoch.served[name] - epoch.fluid.served[name]) * UNIT_WEIGHT / weight
            start = epoch.start_tags
            bound = max(room[name] + room[other] + abs(start[name] - start[other]) for other in weights)
            assert off <= bound, f"{name} is {float(off)} from its fluid share, {bound} allowed"


class FairQueueMachine(RuleBasedStateMachine):
    """Arrivals, turns, tokens, ends, departures, changes."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.window = Window(SLOTS)
        self.queued: list[Ticket[int]] = []
        self.flying: list[Ticket[int]] = []
        self.blocked: set[str] = set()
        self.weights: defaultdict[str, int] = defaultdict(lambda: 1000)
        self.settled: defaultdict[PriorityClass, int] = defaultdict(int)
        self.numbers = 0
        self.last_tag = 0
        self.extended = 0
        """Requests that went out of turn: the window does not hold them back."""
        self.root_watch = Watch(self.queue._root)
        self.watches = {key: Watch(group.level) for key, group in self.queue._groups.items()}

    # -- rules ---------------------------------------------------------------------------------

    @initialize()
    def begin_busy(self) -> None:
        """Two tenants have something queued, so that shares are contested from the start."""
        for tenant in "ab":
            self.arrive(tenant, PriorityClass.STANDARD, [100 * UNIT, 30 * UNIT] * 10)

    @rule(tenant=TENANTS, priority_class=CLASSES, ticks=st.lists(TICKS, min_size=1, max_size=6))
    def arrive(self, tenant: str, priority_class: PriorityClass, ticks: list[int]) -> None:
        """Some requests of a tenant."""
        waited = self.waits(tenant, priority_class)
        for cost in ticks:
            self.numbers += 1
            weight = self.weights[tenant]
            self.queued.append(self.queue.push(tenant, priority_class, weight, self.numbers, cost))
            if not waited and tenant not in self.blocked:
                self.has_no_credit(tenant, priority_class)
            waited = True

    @precondition(lambda self: self.window.has_room())
    @rule()
    def dispatch(self) -> None:
        """The next one's turn."""
        ticket = self.queue.pop()
        if ticket is None:
            return
        line = [other for other in self.queued if other.flow is ticket.flow]
        assert line[0] is ticket, "not first come, first served (I8)"
        assert self.last_tag < ticket.tag <= MAX_TAG, "priority does not follow the order (I18)"
        self.last_tag = ticket.tag
        self.queued.remove(ticket)
        self.flying.append(ticket)
        self.window.take()
        self.charged(ticket, ticket.cost_ticks, turn=True)

    @precondition(lambda self: self.flying)
    @rule(pick=PICK, ticks=TICKS)
    def extend(self, pick: int, ticks: int) -> None:
        """A request in flight has more work: out of turn, and charged."""
        like = self.flying[pick % len(self.flying)]
        weight = self.weights[like.tenant_id]
        ticket = self.queue.push(like.tenant_id, like.priority_class, weight, 0, ticks)
        self.queue.overtake(ticket)
        assert self.last_tag < ticket.tag <= MAX_TAG
        self.last_tag = ticket.tag
        self.flying.append(ticket)
        self.extended += 1
        self.window.take()
        self.charged(ticket, ticks)

    @precondition(lambda self: self.flying)
    @rule(pick=PICK, ticks=st.integers(1, 100 * UNIT))
    def token(self, pick: int, ticks: int) -> None:
        """Something beyond the expected cost."""
        ticket = self.flying[pick % len(self.flying)]
        self.queue.charge(ticket, ticks)
        self.charged(ticket, ticks)

    @precondition(lambda self: self.flying)
    @rule(pick=PICK, percent=st.integers(0, 300))
    def finish(self, pick: int, percent: int) -> None:
        """Early, late, or not at all (a failure costs nothing)."""
        ticket = self.flying.pop(pick % len(self.flying))
        charged, actual = ticket.charged_ticks, ticket.charged_ticks * percent // 100
        flow, group = ticket.flow, ticket.flow.group
        before = flow.tag, group.tag
        self.queue.settle(ticket, actual)
        self.window.give()
        self.settled[group.priority_class] += actual
        if actual < charged:  # what the floor kept back counts as had
            kept = [
                (charged - actual) - (tag - share.tag) * share.weight // UNIT_WEIGHT
                for tag, share in zip(before, (flow, group), strict=True)
            ]
            self.watches[group.priority_class].served(flow, actual - charged + max(0, kept[0]))
            self.root_watch.served(group, actual - charged + max(0, kept[1]))
        else:
            self.charged(ticket, actual - charged)

    @precondition(lambda self: self.queued)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        """A waiter leaves."""
        ticket = self.queued.pop(pick % len(self.queued))
        self.queue.remove(ticket)
        assert ticket.state is TicketState.GONE

    @rule(tenant=TENANTS, weight=WEIGHTS)
    def change_weight(self, tenant: str, weight: int) -> None:
        """By the operator."""
        self.weights[tenant] = weight
        self.queue.set_weight(tenant, weight)

    @rule(tenant=TENANTS)
    def block(self, tenant: str) -> None:
        """At its own concurrency."""
        self.blocked.add(tenant)
        self.queue.block(tenant)

    @rule(tenant=TENANTS)
    def unblock(self, tenant: str) -> None:
        """And no more."""
        was = tenant in self.blocked
        self.blocked.discard(tenant)
        self.queue.unblock(tenant)
        for priority_class in PriorityClass:
            if was and self.waits(tenant, priority_class):
                self.has_no_credit(tenant, priority_class)

    @rule(waiting=st.integers(0, 12), running=st.integers(0, SLOTS))
    def step(self, waiting: int, running: int) -> None:
        """The engine says anything."""
        signals = EngineSignals(0, 0.0, running, waiting, 0.0, 0, running, 0)
        self.window.on_signals(signals, backlog=bool(self.queued))

    # -- invariants ----------------------------------------------------------------------------

    @invariant()
    def sums_agree(self) -> None:
        """Every sum kept is what it is the sum of; charges are conserved, in ticks (I1)."""
        self.queue.check_integrity()
        for priority_class, group in self.queue._groups.items():
            mine = [ticket for ticket in self.flying if ticket.priority_class is priority_class]
            live = sum(ticket.charged_ticks for ticket in mine)
            assert group.charged == self.settled[priority_class] + live
            for flow in group.flows.values():
                live = sum(ticket.charged_ticks for ticket in mine if ticket.flow is flow)
                assert flow.charged == flow.settled + live

    @invariant()
    def somebody_goes_if_somebody_may(self) -> None:
        """Work is conserved (I5), and the first of a line is the one shown."""
        free = [ticket for ticket in self.queued if ticket.tenant_id not in self.blocked]
        shown = self.queue.peek()
        assert (shown is None) == (not free)
        assert len(self.queue) == len(self.queued)
        assert shown is None or shown in free

    @invariant()
    def shares_are_near_the_fluid(self) -> None:
        """V is monotone (I4), and service is within the bound of the ideal (I6)."""
        self.root_watch.check()
        for watch in self.watches.values():
            watch.check()

    @invariant()
    def the_window_holds(self) -> None:
        """What is in flight was let in (I12)."""
        assert self.window.in_flight == len(self.flying) <= SLOTS + GREATEST_DEPTH + self.extended
        assert 1 <= self.window.limit <= SLOTS + self.window.depth

    def teardown(self) -> None:
        """Everyone gets his turn, no later than his tag says (I7); then nothing is left."""
        for tenant in tuple(self.blocked):
            self.queue.unblock(tenant)
        heads = {}
        for ticket in self.queued:
            if ticket.flow.first is ticket:
                heads[ticket] = self.allowance(ticket)
        had: defaultdict[Flow[int], int] = defaultdict(int)
        while (next_ticket := self.queue.pop()) is not None:
            for flow, allowed in heads.pop(next_ticket, {}).items():
                assert had[flow] <= allowed, "a head waited longer than its tag (I7)"
            had[next_ticket.flow] += next_ticket.cost_ticks
            self.queued.remove(next_ticket)
            self.flying.append(next_ticket)
        assert not self.queued
        for ticket in self.flying:
            self.queue.settle(ticket, ticket.charged_ticks)
        assert self.queue.snapshot().tenants == 0
        self.queue.check_integrity()

    # -- helpers -------------------------------------------------------------------------------

    def allowance(self, head: Ticket[int]) -> dict[Flow[int], int]:
        """The most that each sibling may have before this one's turn."""
        costs: defaultdict[Flow[int], int] = defaultdict(int)
        for ticket in self.queued:
            costs[ticket.flow] = max(costs[ticket.flow], ticket.cost_ticks)
        siblings = [flow for flow in head.flow.group.flows.values() if flow is not head.flow]
        return {
            flow: max(0, head.flow.tag - flow.tag + 1) * flow.weight // UNIT_WEIGHT + costs[flow] + 1
            for flow in siblings
        }

    def waits(self, tenant: str, priority_class: PriorityClass) -> bool:
        """Whether it is in the running for a turn there."""
        flow = self.queue._groups[priority_class].flows.get(tenant)
        return flow is not None and flow.waits

    def has_no_credit(self, tenant: str, priority_class: PriorityClass) -> None:
        """Who begins to wait is at V or later (I4)."""
        group = self.queue._groups[priority_class]
        assert group.flows[tenant].tag >= group.level.virtual

    def charged(self, ticket: Ticket[int], ticks: int, *, turn: bool = False) -> None:
        """Tell the watches."""
        self.watches[ticket.priority_class].served(ticket.flow, ticks, turn=turn)
        self.root_watch.served(ticket.flow.group, ticks, turn=turn)


TestFairQueueMachine = FairQueueMachine.TestCase


@given(
    costs=st.lists(st.tuples(TENANTS, TICKS), min_size=20, max_size=60),
    weights=st.tuples(WEIGHTS, WEIGHTS),
    turns=st.integers(1, 40),
)
def test_raising_a_weight_never_lowers_what_it_gets(
    costs: list[tuple[str, int]], weights: tuple[int, int], turns: int
) -> None:
    """I11: the same arrivals, one tenant's weight higher, and it has no less after any number of turns."""
    assume(weights[0] < weights[1])
    served = []
    for weight in weights:
        queue: FairQueue[int] = FairQueue()
        for tenant, ticks in costs:
            queue.push(tenant, PriorityClass.STANDARD, weight if tenant == "a" else 1000, 0, ticks)
        popped = [queue.pop() for _ in range(turns)]
        served.append(sum(ticket.cost_ticks for ticket in popped if ticket and ticket.tenant_id == "a"))
    assert served[0] <= served[1]


def test_classes_are_known_to_the_queue() -> None:
    """Each has a weight."""
    assert set(CLASS_WEIGHTS) == set(PriorityClass)
