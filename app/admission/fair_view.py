"""What is seen of the fair queue from outside, and the proof that its sums agree.

Owns the frozen records that people, metrics and tests read, the estimate of the work ahead of a request
(``forecast.py`` turns it into seconds), and the integrity check. Called by ``fairness.py``; changes no order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .virtual_time import UNIT_WEIGHT, Level, Share

if TYPE_CHECKING:
    from collections.abc import Collection

    from .tickets import Flow, Group, Ticket

EXACT_UP_TO = 64
"""Waiting tenants of a class over which `work_ahead` sums one by one (10 µs); beyond, a bound in O(1)."""

T = TypeVar("T")
S = TypeVar("S", bound=Share)


@dataclass(frozen=True, slots=True)
class ShareSnapshot:
    """A class, or a tenant under one class, as it stands."""

    name: str
    weight_milli: int
    queued: int
    in_flight: int
    waits: bool
    tag: int
    charged_ticks: int
    settled_ticks: int


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The fair queue as it stands. `virtual` is V at the root; `tenants` counts those with state."""

    queued: int
    in_flight: int
    tenants: int
    virtual: int
    classes: tuple[ShareSnapshot, ...]


def seen(share: Flow[T] | Group[T], name: str) -> ShareSnapshot:
    """A class or a tenant as it stands."""
    return ShareSnapshot(
        name=name,
        weight_milli=share.weight,
        queued=share.length,
        in_flight=share.in_flight,
        waits=share.waits,
        tag=share.tag,
        charged_ticks=share.charged,
        settled_ticks=share.settled,
    )


def ticks_ahead(root: Level[Group[T]], flow: Flow[T], own_ticks: int) -> int:
    """Queued ticks that go before the flow's work that has `own_ticks` of its own before it.

    That work has the tag S + own/w. Every sibling j has min(Q_j, w_j * (tag - S_j)) served before it;
    what this makes together puts the class at a tag of its own, and the other classes are counted alike.
    """
    group = flow.group
    in_class = own_ticks + _others(group.level, flow, own_ticks)
    return in_class + _others(root, group, in_class)


def _others(level: Level[S], mine: S, own_ticks: int) -> int:
    """Queued ticks of the siblings that go before work of `mine` with `own_ticks` before it."""
    front = level.front()
    if front is None:
        return 0
    start = mine.tag if mine.waits else max(mine.tag, level.entry_tag())
    tag = start + own_ticks * UNIT_WEIGHT // mine.weight
    if tag <= front.tag:
        return 0
    if level.waiting <= EXACT_UP_TO:
        return sum(share.ticks_until(tag) for share in level.children() if share is not mine)
    weight, queued = level.weight, level.queued
    if mine.waits:
        weight, queued = weight - mine.weight, queued - mine.queued
    return min(queued, weight * (tag - front.tag) // UNIT_WEIGHT)


def check_ledger(
    root: Level[Group[T]],
    groups: Collection[Group[T]],
    in_flight: Collection[Ticket[T]],
    blocked: Collection[str],
) -> None:
    """Compare every sum with what it is the sum of. See `FairQueue.check_integrity`."""
    flying: dict[Flow[T], list[int]] = {}
    for ticket in in_flight:
        flying.setdefault(ticket.flow, []).append(ticket.charged_ticks)
    _check_level("root", root, [group for group in groups if group.waits])
    for group in groups:
        name = group.priority_class.value
        flows = group.flows.values()
        _check_level(name, group.level, [flow for flow in flows if flow.waits])
        _agree(f"{name} waits", group.waits, group.level.waiting > 0)
        _agree(f"{name} queued ticks", group.queued, group.level.queued)
        _agree(f"{name} queued", group.length, sum(flow.length for flow in flows))
        _agree(f"{name} in flight", group.in_flight, sum(flow.in_flight for flow in flows))
        owed = sum(sum(flying.get(flow, ())) for flow in flows)
        _agree(f"{name} charged", group.charged, group.settled + owed)
        for flow in flows:
            _check_flow(f"{name}/{flow.tenant_id}", flow, flying.get(flow, []), blocked)


def _check_flow(name: str, flow: Flow[T], charges: list[int], blocked: Collection[str]) -> None:
    line: list[int] = []
    ticket = flow.first
    while ticket is not None:
        line.append(ticket.cost_ticks)
        ticket = ticket.next_
    _agree(f"{name} queued", flow.length, len(line))
    _agree(f"{name} queued ticks", flow.queued, sum(line))
    _agree(f"{name} in flight", flow.in_flight, len(charges))
    _agree(f"{name} charged", flow.charged, flow.settled + sum(charges))
    _agree(f"{name} waits", flow.waits, bool(line) and flow.tenant_id not in blocked)
    if not line and not charges and not flow.owes:
        raise RuntimeError(f"{name}: idle without debt, and still stored")


def _check_level(name: str, level: Level[S], waiting: list[S]) -> None:
    _agree(f"{name} level waiting", level.waiting, len(waiting))
    _agree(f"{name} level weight", level.weight, sum(share.weight for share in waiting))
    _agree(f"{name} level queued", level.queued, sum(share.queued for share in waiting))
    _agree(
        f"{name} level entries", {share.uid for share in level.children()}, {share.uid for share in waiting}
    )


def _agree(what: str, kept: object, counted: object) -> None:
    if kept != counted:
        raise RuntimeError(f"{what}: {kept} is kept, {counted} is counted")
