"""Can this account pay, and if not, when? Leaky buckets for the rates, a counter for the UTC day.

Owns the arithmetic of limits: `Account` (who pays, under which `Line` s), `Charge` (what a request
costs), `Bucket` (what has been used of one line) and the answers, `Granted` or `Shortage`. Called by
the stores, which hold the buckets; ``admission.py`` reads the answers. No await, no clock.

The algorithm is the generic cell rate algorithm of ITU-T I.371 in its continuous-state form, the leaky
bucket (its other form, a theoretical arrival time, decides the same; brandur.org/rate-limiting tells
that one for web services). A charge pours into the bucket, time drains it, and a charge that would
overflow is refused. No calendar windows, so any 60 s see at most the rate plus the burst. This form is
taken because it is exact in integers: a unit (request or token) is 60,000,000 ticks, and a limit of L a
minute drains L ticks in a microsecond. A theoretical arrival time must round 60 s / L to microseconds, and
a limit of 7 a minute would then admit 6 at once.

What always holds:

* All lines of all accounts are looked at first, then charged together; a refusal changes none.
* `Shortage.retry_after_s` is exact: nothing else changing, the same charge is granted then, and refused
  a second earlier. Of several short lines it tells the one that takes longest.
* A settled reservation leaves a bucket as if the real cost had been charged at the start: exactly, if the
  bucket would not have run empty meanwhile; else wrong by no more than the estimate was, since an empty
  bucket keeps no credit. Never below empty, so that no refund makes more than a full burst.
* The day's tokens count for the UTC day of the reservation, whenever it is settled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..core.record import Limits

SECOND_US = 1_000_000
DAY_US = 86_400 * SECOND_US
UNIT = 60 * SECOND_US
"""Ticks of one request or token in a rate's bucket: what a limit of 1 a minute drains in a minute."""

MOST = 150_000_000
"""Units of the largest burst: a full bucket is exact in a double, the only number of a Redis script."""

RATES = ("requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute", "tokens_per_minute")
"""The fields of `Limits` that are rates."""


class Dimension(StrEnum):
    """What is limited. The value goes into keys of the store and into messages."""

    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    TOKENS = "tokens"
    DAY_TOKENS = "day_tokens"


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request costs, expected or used. ``Charge()`` as the use of a request undoes it wholly."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens


class Instant(NamedTuple):
    """When it is, by the store's clock."""

    us: int
    """Microseconds of the clock that drains the rates; it should never be set."""
    utc_us: int
    """Microseconds since 1970 UTC, for the day's end."""

    @property
    def day(self) -> int:
        """Days since 1970 UTC."""
        return self.utc_us // DAY_US


@dataclass(slots=True)
class Bucket:
    """What has been used of one line. Mutable; owned by one store."""

    at_us: int
    """When `level` was true: by `Instant.us` for a rate, by `Instant.utc_us` for the day's counter."""
    level: int
    """Ticks of a rate, tokens of the day."""


@dataclass(frozen=True, slots=True)
class Line:
    """One limit of one account. The stores know no other difference between lines than these numbers."""

    account: str
    dimension: Dimension
    limit: int
    """Units a minute or a day, as configured."""
    unit: int
    """Of `Bucket.level`, what one request or token takes."""
    capacity: int
    """The highest level that a charge may bring about."""
    drain: int
    """Of the level, what a microsecond takes away; 0 for the day's counter, which ends with its day."""
    key: str
    """Names the bucket in a store."""
    units: Callable[[Charge], int]
    """Of a charge, what this line counts."""

    def cost(self, charge: Charge) -> int:
        """The charge in this line's measure."""
        return self.units(charge) * self.unit

    def level(self, bucket: Bucket, now: Instant) -> int:
        """What is in the bucket now."""
        if self.drain:
            return max(0, bucket.level - max(0, now.us - bucket.at_us) * self.drain)
        return bucket.level if bucket.at_us // DAY_US >= now.day else 0

    def reserve(self, bucket: Bucket, level: int, now: Instant) -> None:
        """Set the level that a charge brings about; it has been found to fit."""
        bucket.level = level
        bucket.at_us = now.us if self.drain else max(bucket.at_us, now.utc_us)

    def settle(self, bucket: Bucket, difference: int, now: Instant, day: int) -> None:
        """Put used in the place of reserved; ``day`` is the reservation's."""
        if self.drain:
            bucket.level = max(0, self.level(bucket, now) + difference)
            bucket.at_us = now.us
        elif bucket.at_us // DAY_US == day:
            bucket.level = max(0, bucket.level + difference)

    def wait_us(self, excess: int, now: Instant) -> int:
        """Microseconds until the level has fallen by that much (for the day's counter: to its end)."""
        return -(-excess // self.drain) if self.drain else DAY_US - now.utc_us % DAY_US


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """A tenant, or a key with limits of its own. A request is charged on one or two, together.

    Make it once for a `Limits`, not for every request: it works out the lines.
    """

    id: str
    """Unique among tenants and keys: ``tenant:acme``, ``key:k1``. Part of the store's keys."""
    limits: Limits
    lines: tuple[Line, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple(_lines(self.id, self.limits)))


def _lines(account: str, limits: Limits) -> Iterator[Line]:
    for name in RATES:
        limit: int | None = getattr(limits, name)
        if limit is not None:
            capacity = min(MOST * UNIT, max(UNIT, limit * limits.burst_s * SECOND_US))  # at least one unit
            dimension = Dimension(name.removesuffix("_per_minute"))
            key, units = f"{account}:{dimension}", attrgetter(str(dimension))
            yield Line(account, dimension, limit, UNIT, capacity, limit, key, units)
    if (limit := limits.tokens_per_day) is not None:
        dimension = Dimension.DAY_TOKENS
        yield Line(account, dimension, limit, 1, limit, 0, f"{account}:{dimension}", attrgetter("tokens"))


def lines_of(accounts: Sequence[Account]) -> list[Line]:
    """All lines that a request of these accounts is charged on."""
    return [line for account in accounts for line in account.lines]


def divided(limits: Limits, replicas: int) -> Limits:
    """Each replica's part, where they share no store: of rates and day only, rounded down, at least 1."""
    parts = {
        name: max(1, limit // replicas)
        for name in (*RATES, "tokens_per_day")
        if (limit := getattr(limits, name)) is not None
    }
    return replace(limits, **parts)


@dataclass(slots=True, eq=False)
class Reservation:
    """A charge that was granted. Settled once: later settlements change nothing."""

    lines: tuple[Line, ...] = field(repr=False)
    costs: tuple[int, ...]
    """Of each line, what was charged."""
    day: int = 0
    """The UTC day on which it was made, where the reservation and not the store remembers it."""
    id: str = ""
    """Its name in a shared store; empty for one that only this process knows."""
    is_settled: bool = False

    def differences(self, used: Charge) -> list[int]:
        """Of each line, what a settlement adds to the level."""
        return [line.cost(used) - cost for line, cost in zip(self.lines, self.costs, strict=True)]


class Headroom(NamedTuple):
    """One pair of ``x-ratelimit`` headers' worth: what is left of a limit."""

    limit: int
    """Units that a full burst holds; with the usual burst of 60 s, the limit as configured."""
    remaining: int
    """Whole units that may still come at once; never negative."""
    reset_s: int
    """Whole seconds until all of it is there again, nothing else changing."""


class Standing(NamedTuple):
    """How an account stands with its limits a minute: the tightest of each kind, `None` without one."""

    requests: Headroom | None = None
    tokens: Headroom | None = None


class Granted(NamedTuple):
    """The charge is reserved. `Store.settle` the reservation, whatever becomes of the request."""

    reservation: Reservation
    standing: Standing


@dataclass(frozen=True, slots=True)
class Shortage:
    """The charge does not fit, and nothing was charged."""

    account: str
    dimension: Dimension
    limit: int
    """Units a minute or a day, as configured."""
    used: int
    """Units in the bucket, reserved ones included."""
    asked: int
    """Units of the charge."""
    wait_us: int
    """Until it fits, nothing else changing; of no meaning when it never does."""
    never: bool
    """The charge is larger than a full burst or a whole day: no wait helps."""
    standing: Standing

    @property
    def retry_after_s(self) -> int:
        """Whole seconds, rounded up; at least 1, since a shortage waits."""
        return -(-self.wait_us // SECOND_US)


def find_shortage(
    lines: Sequence[Line], costs: Sequence[int], levels: Sequence[int], now: Instant
) -> Shortage | None:
    """The line that keeps the charge waiting longest, if one does. A line that is not charged keeps none."""
    worst: tuple[bool, int] | None = None
    found = 0
    for index, (line, cost, level) in enumerate(zip(lines, costs, levels, strict=True)):
        excess = level + cost - line.capacity
        if cost > 0 and excess > 0:
            rank = (cost > line.capacity, line.wait_us(excess, now))
            if worst is None or rank > worst:
                worst, found = rank, index
    if worst is None:
        return None
    line, (never, wait_us) = lines[found], worst
    used, asked = -(-levels[found] // line.unit), costs[found] // line.unit
    standing = find_standing(lines, levels)
    return Shortage(line.account, line.dimension, line.limit, used, asked, wait_us, never, standing)


def find_standing(lines: Sequence[Line], levels: Sequence[int]) -> Standing:
    """What is left, for the response's headers. The day's counter is not part of it."""
    requests: tuple[int, Line] | None = None
    tokens: tuple[int, Line] | None = None
    for line, level in zip(lines, levels, strict=True):
        room = line.capacity - level
        if not line.drain:
            continue
        if line.dimension is Dimension.REQUESTS:
            if requests is None or room < requests[0]:
                requests = room, line
        elif tokens is None or room < tokens[0]:
            tokens = room, line
    return Standing(_headroom(requests), _headroom(tokens))


def _headroom(tightest: tuple[int, Line] | None) -> Headroom | None:
    if tightest is None:
        return None
    room, line = tightest
    reset_s = -((room - line.capacity) // (line.drain * SECOND_US))
    return Headroom(line.capacity // line.unit, max(0, room) // line.unit, reset_s)
