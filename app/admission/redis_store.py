"""Buckets that replicas share, in Redis (7.0 or later) or Valkey.

Owns `RedisStore`. Made by ``server.py`` when a shared store is configured: importing this module imports
redis-py. Called by ``admission.py`` like any `Store`. ``redis_store.lua`` does on the server, in one
atomic step, what ``quota.py`` defines; what is read back is judged here by ``quota.py`` itself.

What always holds:

* Redis's clock is the only clock of a decision. Ours only tells how old a last-seen level is. Set back, it
  holds up no account by the step: a bucket from the future drains on from now.
* A request waits for the store no longer than ``timeout_s``. A store that failed once is lost: no request
  tries it again until a task in the background has found it working. Meanwhile the fallback decides, or,
  without one, nobody is admitted (`StoreLost`).
* A reservation is settled where it was made, once: its key in the store is deleted by the settlement, and
  without that key a settlement changes nothing. So one that was in doubt (no answer, caller cancelled) is
  safely sent again, and a store that came back empty is not credited with what it never saw.
* The password is in no text of ours.

All keys share one hash tag, since a script may touch the keys of one cluster slot only, and a tenant's
buckets are charged together with any of its keys': quota state is one slot's worth of work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import uuid4

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from .quota import (
    Charge,
    Granted,
    Instant,
    Reservation,
    Shortage,
    Standing,
    find_shortage,
    find_standing,
    lines_of,
)
from .store import Buckets, StoreLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .quota import Account
    from .store import MemoryStore

AT_ONCE = 32
"""Calls in flight. More would wait in the server's queue, and their wait would look like a lost store."""
PROBE_S = 1.0
"""Seconds between attempts to reach a lost store. The first attempt is made at once."""
REMEMBER_MS = 24 * 3_600_000
"""A request that runs for longer keeps what it reserved."""
TRUST_US = 1_000_000
"""`peek` believes a level no older than this, the shortest Retry-After."""
OWED = 10_000
"""Settlements kept for a lost store; beyond that the oldest stay charged as reserved, until they drain."""

_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}
_LOST = (RedisError, OSError, TimeoutError)
_SCRIPT = files(__package__).joinpath("redis_store.lua").read_text()


class RedisStore:
    """One server, shared by replicas; one connection pool, on one event loop.

    Args:
        url: ``redis://``, ``rediss://`` (TLS), ``valkey://``, ``valkeys://``, user and password in it.
        clock_us: Monotonic microseconds.
        fallback: Decides while the server is lost (fail open); without one nobody does (fail closed).
        timeout_s: What a request waits for the server at most.
        prefix: Tells apart gateways that share a server but no limits.
        on_health: Told when the store is lost, with the reason, and when it is back (``None``).
    """

    def __init__(
        self,
        url: str,
        clock_us: Callable[[], int],
        *,
        fallback: MemoryStore | None,
        timeout_s: float = 0.25,
        prefix: str = "fairgate",
        on_health: Callable[[str | None], None] | None = None,
    ) -> None:
        self._pool, self._server = _connect(url)
        self._script = Redis(connection_pool=self._pool).register_script(_SCRIPT)
        self._clock_us = clock_us
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._tag = f"{{{prefix}}}:"
        self._on_health = on_health
        self._turns = asyncio.Semaphore(AT_ONCE)
        # All mutable state
        self._is_healthy = True
        self._owed: deque[tuple[Reservation, Charge]] = deque(maxlen=OWED)
        self._background: asyncio.Task[None] | None = None
        self._seen = Buckets()
        self._ahead_us = 0  # Redis's clock less ours, when it last answered

    def __repr__(self) -> str:
        state = "healthy" if self._is_healthy else "lost"
        return f"<RedisStore {self._server} {state}, {len(self._owed)} owed>"

    @property
    def is_healthy(self) -> bool:
        """Whether requests are decided by the shared store."""
        return self._is_healthy

    async def reserve(self, accounts: Sequence[Account], charge: Charge) -> Granted | Shortage:
        """Charge all lines of the accounts, or none.

        Raises:
            StoreLost: The store does not answer, and there is no fallback.
        """
        lines = lines_of(accounts)
        if not lines:
            return Granted(Reservation((), ()), Standing())
        costs = [line.cost(charge) for line in lines]
        reservation = Reservation(tuple(lines), tuple(costs), id=uuid4().hex)
        try:
            done, now, levels = await self._ask(reservation)
        except StoreLost:
            if self._fallback is None:
                raise
            return await self._fallback.reserve(accounts, charge)
        if done:
            return Granted(reservation, find_standing(lines, levels))
        shortage = find_shortage(lines, costs, levels, now)
        assert shortage is not None, "the script refuses what the arithmetic refuses"
        return shortage

    async def settle(self, reservation: Reservation, used: Charge) -> None:
        """Put what was used in the place of what was reserved, now or when the store is back."""
        if reservation.id:
            with suppress(StoreLost):  # then it is owed
                await self._ask(reservation, used)
        elif self._fallback is not None:
            await self._fallback.settle(reservation, used)

    def peek(self, accounts: Sequence[Account], least: Charge) -> Shortage | None:
        """What `reserve` would refuse, from levels that were told within `TRUST_US`.

        A level falls as time passes, which is reckoned with, and by refunds to other replicas, which is
        not: a refusal is wrong only about a refund of the last second, which Retry-After is never under.
        """
        if not self._is_healthy:
            return None if self._fallback is None else self._fallback.peek(accounts, least)
        now, lines = self._now(), lines_of(accounts)
        levels = self._seen.levels(lines, now, since_us=now.us - TRUST_US)
        return find_shortage(lines, [line.cost(least) for line in lines], levels, now)

    def standing(self, accounts: Sequence[Account]) -> Standing:
        """What is left, as last told to this process."""
        if not self._is_healthy and self._fallback is not None:
            return self._fallback.standing(accounts)
        lines = lines_of(accounts)
        return find_standing(lines, self._seen.levels(lines, self._now()))

    async def close(self) -> None:
        """Pay what is owed, if the store answers at once, and close the connections."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.wait([self._background])
        if self._owed:
            with suppress(*_LOST):
                async with asyncio.timeout(self._timeout_s):
                    await self._pay()
        await self._pool.disconnect()

    # The calls

    async def _ask(
        self, reservation: Reservation, used: Charge | None = None
    ) -> tuple[bool, Instant, list[int]]:
        """Call the script once, for a reservation or, with `used`, its settlement.

        Whatever ends it, what may now be wrong in the store is owed: a settlement that may not have been
        made, the undoing of a reservation that may have been made.
        """
        is_owed = used is not None
        try:
            async with self._turns:
                if not self._is_healthy:
                    raise StoreLost(self._server)
                is_owed = True
                return await self._call(reservation, used)
        except BaseException as error:
            if is_owed:
                self._owed.append((reservation, used or Charge()))
            if isinstance(error, _LOST):
                self._lose(error)
                raise StoreLost(self._server) from error
            self._wake()
            raise

    async def _call(self, reservation: Reservation, used: Charge | None) -> tuple[bool, Instant, list[int]]:
        keys = [f"{self._tag}{reservation.id}"]
        arguments: list[str | int] = ["reserve" if used is None else "settle", REMEMBER_MS]
        amounts = reservation.costs if used is None else reservation.differences(used)
        for line, amount in zip(reservation.lines, amounts, strict=True):
            keys.append(self._tag + line.key)
            arguments += (amount, line.capacity, line.drain)
        async with asyncio.timeout(self._timeout_s):
            done, time_us, *texts = await self._script(keys, arguments)
        now, levels = Instant(int(time_us), int(time_us)), [int(text) for text in texts]
        self._ahead_us = now.us - self._clock_us()
        for line, level in zip(reservation.lines, levels, strict=False):  # no levels: settled before
            seen = self._seen.touch(line, now)
            seen.at_us, seen.level = now.us, level
        return done == b"1", now, levels

    def _now(self) -> Instant:
        us = self._clock_us() + self._ahead_us
        return Instant(us, us)

    # The background: lost and found

    def _lose(self, error: BaseException) -> None:
        if self._is_healthy:
            self._is_healthy = False
            if self._on_health is not None:
                self._on_health(type(error).__name__)
        self._wake()

    def _wake(self) -> None:
        is_running = self._background is not None and not self._background.done()
        if not is_running and (self._owed or not self._is_healthy):
            self._background = asyncio.create_task(self._recover(), name="fairgate store")

    async def _recover(self) -> None:
        """Try until the store takes what is owed to it; then requests may use it again."""
        while True:
            try:
                await self._pay()
                break
            except _LOST as error:
                self._lose(error)
                await asyncio.sleep(PROBE_S)
        if not self._is_healthy:
            self._is_healthy = True
            if self._on_health is not None:
                self._on_health(None)

    async def _pay(self) -> None:
        probe = Reservation((), (), id=uuid4().hex)
        await self._call(probe, None)  # a reservation of nothing proves that the script may write
        self._owed.append((probe, Charge()))
        while self._owed:
            owed = self._owed.popleft()
            try:
                await self._call(*owed)
            except BaseException:
                self._owed.appendleft(owed)
                raise


def _connect(url: str) -> tuple[ConnectionPool, str]:
    """The pool, not yet connected, and the server's name without user and password."""
    try:
        parts = urlsplit(url)
        parts = parts._replace(scheme=_SCHEMES.get(parts.scheme, parts.scheme))
        pool = ConnectionPool.from_url(
            parts.geturl(),
            max_connections=AT_ONCE + 1,  # the background has its own
            retry=Retry(NoBackoff(), 0),
        )
        return pool, f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"
    except ValueError:  # its text may hold a piece of the password
        raise ValueError("the store's URL is not of the form redis://user:password@host:port/0") from None
