"""Where bucket state lives: the `Store` that admission speaks to, and the one in this process.

Owns `Store`, `MemoryStore` and the table of `Buckets` under it. Called by ``admission.py``: one `reserve`
for each charge, one `settle` for each reservation; `peek` and `standing` at any time. The arithmetic is
``quota.py``'s; ``redis_store.py`` has the store that replicas share.

What always holds:

* A bucket that is empty again is forgotten: the table holds those who used something lately, not all
  who ever came.
* `MemoryStore` never waits: its coroutines finish at their first step. The event loop is the lock.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

from .quota import (
    SECOND_US,
    Account,
    Bucket,
    Charge,
    Granted,
    Instant,
    Reservation,
    Shortage,
    Standing,
    divided,
    find_shortage,
    find_standing,
    lines_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .quota import Line


class StoreLost(Exception):
    """The shared store does not answer, and the settings say to admit nobody without it."""


class Store(Protocol):
    """Keeps what each account has used."""

    async def reserve(self, accounts: Sequence[Account], charge: Charge) -> Granted | Shortage:
        """Charge all lines of the accounts, or none.

        Raises:
            StoreLost: Nothing can be decided now. Nothing stays charged.
        """

    async def settle(self, reservation: Reservation, used: Charge) -> None:
        """Put what was used in the place of what was reserved. The first call counts; none raises."""

    def peek(self, accounts: Sequence[Account], least: Charge) -> Shortage | None:
        """What `reserve` would refuse, from what this process knows: nothing is charged, nothing waited for.

        The wait is exact for ``least``; for a charge that turns out larger it is a lower bound.
        """

    def standing(self, accounts: Sequence[Account]) -> Standing:
        """What is left, from what this process knows."""

    async def close(self) -> None:
        """Give back what the store holds. It is not used again."""


class Buckets:
    """Buckets by key, forgotten when they are empty.

    Each bucket has one entry in a heap, ordered by when it is empty if nothing more is charged, at the
    soonest in a second. Every `touch` looks at no more than `SWEEP` entries that are due: one that was
    charged since goes back with its new time. A touch makes one bucket at most, so the table cannot
    outgrow its use, and no call pays for a sweep.
    """

    SWEEP = 2
    """Entries looked at for each bucket touched: one would keep pace, two catch up."""

    def __init__(self) -> None:
        # All mutable state
        self._buckets: dict[str, Bucket] = {}
        self._due: list[tuple[int, str, Line]] = []

    def __len__(self) -> int:
        return len(self._buckets)

    def levels(self, lines: Sequence[Line], now: Instant, *, since_us: int = 0) -> list[int]:
        """What is in each line's bucket; 0 for one that was last touched before `since_us`."""
        get = self._buckets.get
        return [
            line.level(bucket, now) if (bucket := get(line.key)) and bucket.at_us >= since_us else 0
            for line in lines
        ]

    def touch(self, line: Line, now: Instant) -> Bucket:
        """The line's bucket, made if there is none. The caller changes it at once."""
        for _ in range(self.SWEEP):
            if not self._due or self._due[0][0] > now.us:
                break
            self._look_at(heappop(self._due), now)
        bucket = self._buckets.get(line.key)
        if bucket is None:
            bucket = self._buckets[line.key] = Bucket(now.us if line.drain else now.utc_us, 0)
            heappush(self._due, (now.us + SECOND_US, line.key, line))
        return bucket

    def _look_at(self, entry: tuple[int, str, Line], now: Instant) -> None:
        _, key, line = entry
        level = line.level(self._buckets[key], now)
        if level == 0:
            del self._buckets[key]
        else:
            heappush(self._due, (now.us + max(SECOND_US, line.wait_us(level, now)), key, line))


class MemoryStore:
    """Buckets in this process.

    Args:
        clock_us: Monotonic microseconds.
        utc_us: Microseconds since 1970 UTC.
        replicas: Processes that serve the same tenants, each with a store of its own: each grants a
            part of every limit (`divided`).
    """

    def __init__(self, clock_us: Callable[[], int], utc_us: Callable[[], int], *, replicas: int = 1) -> None:
        self._clock_us = clock_us
        self._utc_us = utc_us
        self._replicas = replicas
        # All mutable state
        self._buckets = Buckets()

    def __repr__(self) -> str:
        return f"<MemoryStore {len(self._buckets)} buckets>"

    async def reserve(self, accounts: Sequence[Account], charge: Charge) -> Granted | Shortage:
        """Charge all lines of the accounts, or none."""
        return self.reserve_now(accounts, charge)

    async def settle(self, reservation: Reservation, used: Charge) -> None:
        """Put what was used in the place of what was reserved."""
        self.settle_now(reservation, used)

    def reserve_now(self, accounts: Sequence[Account], charge: Charge) -> Granted | Shortage:
        """As `reserve`, for who need not wait."""
        now, lines = self._now(), self._lines(accounts)
        costs = [line.cost(charge) for line in lines]
        levels = self._buckets.levels(lines, now)
        for line, cost, level in zip(lines, costs, levels, strict=True):
            if cost and level + cost > line.capacity:
                shortage = find_shortage(lines, costs, levels, now)
                assert shortage is not None, "a line is short"
                return shortage
        for index, cost in enumerate(costs):
            if cost:
                levels[index] += cost
                lines[index].reserve(self._buckets.touch(lines[index], now), levels[index], now)
        reservation = Reservation(tuple(lines), tuple(costs), now.day)
        return Granted(reservation, find_standing(lines, levels))

    def settle_now(self, reservation: Reservation, used: Charge) -> None:
        """As `settle`, for who need not wait."""
        if reservation.is_settled:
            return
        reservation.is_settled = True
        now = self._now()
        for line, difference in zip(reservation.lines, reservation.differences(used), strict=True):
            if difference:
                line.settle(self._buckets.touch(line, now), difference, now, reservation.day)

    def peek(self, accounts: Sequence[Account], least: Charge) -> Shortage | None:
        """What `reserve` would refuse. Exact."""
        now, lines = self._now(), self._lines(accounts)
        costs = [line.cost(least) for line in lines]
        return find_shortage(lines, costs, self._buckets.levels(lines, now), now)

    def standing(self, accounts: Sequence[Account]) -> Standing:
        """What is left. Exact."""
        lines = self._lines(accounts)
        return find_standing(lines, self._buckets.levels(lines, self._now()))

    async def close(self) -> None:
        """Nothing is held."""

    def _now(self) -> Instant:
        return Instant(self._clock_us(), self._utc_us())

    def _lines(self, accounts: Sequence[Account]) -> Sequence[Line]:
        if self._replicas > 1:
            accounts = [_part(account, self._replicas) for account in accounts]
        # Mostly there is one account, whose lines all its reservations can share
        return accounts[0].lines if len(accounts) == 1 else lines_of(accounts)


@lru_cache(maxsize=10_000)
def _part(account: Account, replicas: int) -> Account:
    return Account(account.id, divided(account.limits, replicas))
