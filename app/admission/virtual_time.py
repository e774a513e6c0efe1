"""One level of the fair tree: a server that divides its service among the children that wait.

Owns `Share` (a child's tag, weight and ledger) and `Level` (the children's common virtual time).
Called by ``fairness.py`` alone, which hangs levels under one another. No clock, no await, no floats.

This is start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", SIGCOMM 1996,
ToN 1997). Each child has a start tag: the work it has had, over its weight. The smallest tag is
served next, and virtual time V is the tag last served. We take SFQ rather than WFQ or DRR because
it needs no size in advance to order by, and its bound holds for a server whose speed varies, which
a batch does. Three rules are taken from elsewhere, or are ours:

* **Lift** (VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Who begins
  to wait starts at V or later: idle time earns no credit, a debt (tag > V) survives it. V is first brought
  up to the smallest waiting tag less its last turn, lest what its requests made since then, while nobody
  else wanted it, count against it. So a newcomer goes before who was just served, and once only.
* **Nobody waits, nobody owes.** While no child waits, a charge moves V along with the tag: capacity
  that nobody wanted is no debt, and debts from before are kept. When all is quiet V passes every
  tag (tenants are forgotten, which is the same), as at the end of SFQ's busy period.
* **Refunds.** Expected costs are charged early and corrected later. A refund may put a waiting child's
  tag under V by the work of REFUND_CREDIT_TICKS at most. A floor at V itself takes 6-7 % of its share from
  a tenant whose lengths vary around a true forecast (its tag is always near V, so half of each refund is
  lost); without a floor, who overstated while alone keeps a newcomer waiting for all that he overstated.
  ``test_fairness.py`` has both.

Always: V never falls. A child that begins to wait has tag ≥ V. ``weight * tag`` moves by exactly the
ticks charged (the remainder of each division is carried), save for the lift and for refunds forfeited.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

UNIT = 1024
"""Ticks in one cost unit (one uncached input token). Costs are charged in ticks."""

UNIT_WEIGHT = 1000
"""Weights are in thousandths: a weight of 1.0 is 1000, and one tick then moves a tag by one."""

REFUND_CREDIT_TICKS = 256 * UNIT
"""A child's work that refunds may put it under V by: 128 output tokens, about a step of a full batch."""

_SLACK = 64
"""Heap entries out of date that are tolerated beyond one for each child that waits."""


class Share:
    """A child of a Level: what it has been charged, and where that puts it in line."""

    __slots__ = (
        "carry",
        "charged",
        "entry",
        "queued",
        "settled",
        "stride",
        "tag",
        "turn",
        "uid",
        "waits",
        "weight",
    )

    def __init__(self, uid: int, weight: int) -> None:
        self.uid = uid
        self.weight = weight
        """Thousandths."""
        self.tag = 0
        """Start tag, ticks at weight 1.0."""
        self.carry = 0
        """What the divisions left over: 0 ≤ carry < weight, in thousandths of a tick's work."""
        self.stride = 0
        """How far its last turn moved the tag."""
        self.turn = 0
        """When it was last served. Among equal tags the longest ago comes first."""
        self.waits = False
        self.entry: tuple[int, int, int, Share] | None = None
        """Its one valid entry in the heap; never later than (tag, turn)."""
        self.queued = 0
        """Ticks waiting here, whether or not they may go."""
        self.charged = 0
        """Ticks charged less ticks refunded."""
        self.settled = 0
        """Ticks of work that has ended."""

    def ticks_until(self, tag: int) -> int:
        """Ticks of its own work that are served before another child's work at `tag`."""
        if tag <= self.tag:
            return 0
        return min(self.queued, (tag - self.tag) * self.weight // UNIT_WEIGHT)


S = TypeVar("S", bound=Share)


class Level(Generic[S]):
    """The children's virtual time, and the order of those that wait. Every step is O(log n), amortised.

    The heap is lazy. A tag that grows (every token may do that) leaves the child's entry too early,
    which is found out when the entry comes up; a tag that falls gets a new entry, and the old one is
    dropped when it comes up, or when the entries out of date outnumber the others.
    """

    __slots__ = ("_heap", "_turns", "queued", "virtual", "waiting", "weight")

    def __init__(self) -> None:
        # All mutable state
        self.virtual = 0
        """V, in ticks at weight 1.0."""
        self.waiting = 0
        """Children that wait."""
        self.weight = 0
        """Sum of their weights, thousandths."""
        self.queued = 0
        """Sum of their queued ticks."""
        self._turns = 0
        self._heap: list[tuple[int, int, int, S]] = []

    def __repr__(self) -> str:
        return f"<Level V={self.virtual}, {self.waiting} waiting>"

    def front(self) -> S | None:
        """The child whose turn it is, if any waits."""
        heap = self._heap
        while heap:
            entry = heap[0]
            share = entry[3]
            if entry is not share.entry:
                heappop(heap)
            elif not share.waits:
                share.entry = None
                heappop(heap)
            elif entry[0] != share.tag or entry[1] != share.turn:
                share.entry = placed = (share.tag, share.turn, share.uid, share)
                heapreplace(heap, placed)
            else:
                return share
        return None

    def children(self) -> list[S]:
        """Those that wait, in no order."""
        return [entry[3] for entry in self._heap if entry is entry[3].entry and entry[3].waits]

    def entry_tag(self) -> int:
        """The least tag that a child beginning to wait now would get: V, brought up to date."""
        front = self.front()
        return self.virtual if front is None else max(self.virtual, front.tag - front.stride)

    def start(self, share: S) -> None:
        """The child begins to wait (or may again): the lift."""
        self.virtual = self.entry_tag()
        if share.tag < self.virtual:
            share.tag, share.carry = self.virtual, 0
        share.waits = True
        self.waiting += 1
        self.weight += share.weight
        self.queued += share.queued
        self._place(share)

    def stop(self, share: S) -> None:
        """The child waits no more: nothing queued, or blocked. V does not wait for it."""
        share.waits = False
        self.waiting -= 1
        self.weight -= share.weight
        self.queued -= share.queued
        self._sweep()

    def enqueue(self, share: S, ticks: int) -> None:
        """So much more work (less, if negative) is queued under the child."""
        share.queued += ticks
        if share.waits:
            self.queued += ticks

    def serve(self, share: S, ticks: int) -> None:
        """It is the child's turn: V comes to its tag, and the expected cost is charged."""
        tag = share.tag
        if tag > self.virtual:
            self.virtual = tag
        self._turns += 1
        share.turn = self._turns
        self.charge(share, ticks)
        share.stride = share.tag - tag

    def charge(self, share: S, ticks: int) -> None:
        """Work is done for the child. If nobody waits V goes along, and no debt is made."""
        debt = share.tag - self.virtual
        steps, share.carry = divmod(ticks * UNIT_WEIGHT + share.carry, share.weight)
        share.tag += steps
        share.charged += ticks
        if not self.waiting:
            self.virtual = max(self.virtual, share.tag - max(debt, 0))

    def refund(self, share: S, ticks: int) -> None:
        """Less was done than charged. The tag falls, but not further under V than the credit."""
        share.charged -= ticks
        steps, share.carry = divmod(share.carry - ticks * UNIT_WEIGHT, share.weight)
        floor = self.virtual - REFUND_CREDIT_TICKS * UNIT_WEIGHT // share.weight
        share.tag = max(share.tag + steps, min(share.tag, floor))
        if share.waits:
            self._place(share)

    def reweigh(self, share: S, weight: int) -> None:
        """Change a weight. What the child owes stays the same work, so its tag moves."""
        if share.waits:
            self.weight += weight - share.weight
        share.tag = self.virtual + (share.tag - self.virtual) * share.weight // weight
        share.weight, share.carry, share.stride = weight, 0, share.stride * share.weight // weight
        if share.waits:
            self._place(share)

    def rest(self, tag: int) -> None:
        """All is quiet: V passes every tag, and no debt is left."""
        self.virtual = max(self.virtual, tag)

    def _place(self, share: S) -> None:
        """See that the child's entry is not later than its tag."""
        entry = share.entry
        if entry is None or (entry[0], entry[1]) > (share.tag, share.turn):
            share.entry = placed = (share.tag, share.turn, share.uid, share)
            heappush(self._heap, placed)
            self._sweep()

    def _sweep(self) -> None:
        """Drop entries out of date when they outnumber the others."""
        if len(self._heap) <= 2 * self.waiting + _SLACK:
            return
        kept: list[tuple[int, int, int, S]] = []
        for entry in self._heap:
            share = entry[3]
            if entry is not share.entry:
                continue
            if share.waits:
                kept.append(entry)
            else:
                share.entry = None
        self._heap = kept
        heapify(kept)
