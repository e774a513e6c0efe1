"""The load, made in a process of its own so that neither progress bars nor plots disturb its clock.

Owns the ways of asking: `saturate` keeps streams busy over a window, `alternate` asks one request at a
time, each of several servers in turn. A scenario calls them through `LoadClient`, which runs them in the
client's process. All figures are the client's own: its clock, its count.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvloop

from .cpu import CpuTimes
from .wire import Answer, Ask, Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from multiprocessing.connection import Connection as PipeConnection

_ANSWER_S = 120.0
"""The longest that one request may take."""


class LoadFailed(Exception):
    """A request was not answered as it should be: what was measured is worth nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to be asked."""

    host: str
    port: int
    model: str
    key: str | None
    pid: int
    """Of its front end."""

    def connect(self) -> Connection:
        """A connection of its own, opened when it is used."""
        return Connection(self.host, self.port, self.key)


@dataclass(frozen=True, slots=True)
class Saturation:
    """How many streams, for how long, with answers of which length."""

    streams: int
    max_tokens: int
    warm_up_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Window:
    """What came in between the two ends of a window."""

    seconds: float
    tokens: float
    requests: int
    """Answers that ended inside."""
    events: int
    cpu: CpuTimes

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.seconds

    @property
    def tokens_per_event(self) -> float:
        """Above 1, the front end fell behind its engine and put tokens together."""
        return self.tokens / self.events

    @property
    def front_end_us(self) -> float:
        """Microseconds of the front end's CPU for each streamed token."""
        return self.cpu.front_end_s / self.tokens * 1e6


class LoadClient:
    """Runs the load in the client's process."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def saturate(self, target: Target, load: Saturation, *, timeout_s: float) -> Window:
        """See `saturate`.

        Raises:
            LoadFailed: A request went wrong, or it took longer than ``timeout_s``.
        """
        window: Window = self._call(saturate, (target, load), timeout_s)
        return window

    def alternate(
        self, targets: Sequence[Target], asks: Sequence[Ask], *, timeout_s: float
    ) -> list[list[Answer]]:
        """See `alternate`.

        Raises:
            LoadFailed: A request went wrong, or it took longer than ``timeout_s``.
        """
        answers: list[list[Answer]] = self._call(alternate, (targets, asks), timeout_s)
        return answers


@contextlib.contextmanager
def load_client() -> Iterator[LoadClient]:
    """The client's process; killed at the end, whatever it is doing."""
    context = multiprocessing.get_context("spawn")
    pipe, its_pipe = context.Pipe()
    process = context.Process(target=_work, args=(its_pipe,), name="load-client", daemon=True)

    def call(function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        pipe.send((function, args))
        try:
            if not pipe.poll(timeout_s):
                raise LoadFailed(f"{function.__name__} was not done after {timeout_s:.0f} s")
            result = pipe.recv()
        except (EOFError, ConnectionError):
            raise LoadFailed("the client's process has ended") from None
        if isinstance(result, LoadFailed):
            raise result
        return result

    process.start()
    its_pipe.close()
    try:
        yield LoadClient(call)
    finally:
        process.kill()
        process.join()
        pipe.close()


def _work(pipe: PipeConnection) -> None:
    """The client's process: run what comes, send back what it gives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            pipe.send(_outcome(function, args))


def _outcome(function: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]) -> Any:
    """What it gives. Many streams fail for one reason: the first one's is told."""
    try:
        return uvloop.run(function(*args))
    except* (LoadFailed, OSError) as failures:
        count, first = len(failures.exceptions), failures.exceptions[0]
    return LoadFailed(f"{count} of the streams failed, the first with {type(first).__name__}: {first}")


async def saturate(target: Target, load: Saturation) -> Window:
    """Keep ``load.streams`` streams busy; look at the middle, when all are, and have been for a while.

    Each stream asks again as soon as its answer ends. The first answers have staggered lengths, so that
    the streams do not begin and end together. After the window the last answers may end: only a whole
    answer says how many tokens an event of it stood for.
    """
    start_s = time.monotonic() + load.warm_up_s
    end_s = start_s + load.seconds
    answers: list[Answer] = []

    async def keep_busy(number: int) -> None:
        length = load.max_tokens * (number + 1) // load.streams or 1
        with contextlib.closing(target.connect()) as connection:
            for turn in itertools.count():
                if time.monotonic() >= end_s:
                    return
                ask = Ask(f"{number}.{turn}: tell me a long story.", length)
                answers.append(await _ask(connection, target, ask))
                length = load.max_tokens

    async with asyncio.TaskGroup() as group:
        for number in range(load.streams):
            group.create_task(keep_busy(number))
        await asyncio.sleep(load.warm_up_s)
        start_s, before = time.monotonic(), CpuTimes.now(target.pid)
        await asyncio.sleep(load.seconds)
        stop_s, after = time.monotonic(), CpuTimes.now(target.pid)
    return Window(
        seconds=stop_s - start_s,
        tokens=sum(answer.tokens_between(start_s, stop_s) for answer in answers),
        requests=sum(start_s <= answer.ended_s < stop_s for answer in answers),
        events=sum(answer.events_between(start_s, stop_s) for answer in answers),
        cpu=after.since(before),
    )


async def alternate(targets: Sequence[Target], asks: Sequence[Ask]) -> list[list[Answer]]:
    """Ask one request at a time, each of the targets in turn; who is first changes from ask to ask.

    Returns:
        For each ask the targets' answers, in the targets' order.
    """
    results: list[list[Answer]] = []
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(contextlib.closing(target.connect())) for target in targets]
        for number, ask in enumerate(asks):
            order = list(range(len(targets)))
            order = order[number % len(order) :] + order[: number % len(order)]
            got = {which: await _ask(connections[which], targets[which], ask) for which in order}
            results.append([got[which] for which in range(len(targets))])
    return results


async def _ask(connection: Connection, target: Target, ask: Ask) -> Answer:
    answer = await connection.ask(ask, target.model, timeout_s=_ANSWER_S)
    if answer.error is not None or answer.tokens != ask.max_tokens:
        raise LoadFailed(
            f"port {target.port} answered {answer.status} with {answer.tokens} of {ask.max_tokens} tokens: "
            f"{answer.error or ''}"
        )
    return answer
