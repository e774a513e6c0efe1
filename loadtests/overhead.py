"""The scenario ``overhead``: what the gateway costs beside vLLM's own server in front of the same engine.

Owns its measurements; called by ``__main__``. Both servers are loaded once and stay up: one that has
nothing to do takes about half a percent of a core, which the report shows. They are asked in turn:

1. *saturated*, round by round, the first of a round changing: 64 streams, tokens/s and the front end's
   CPU for each token. Ratios are taken within a round, so that a slow minute of the machine hits both.
2. *alone*, request by request: the time to the first token of a lone stream, and of a lone answer that
   is not streamed.
"""

from __future__ import annotations

import importlib
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from .client import LoadClient, Saturation, Target, Window, load_client
from .cpu import CpuTimes
from .overhead_plot import draw
from .overhead_report import SERVERS, Measured, Plan, conclude
from .progress import Clock, Steps, steps
from .servers import TINY_FLAGS, EngineFlags, Tenant, fairgate, running, stock
from .wire import Ask

_LIMIT_S = 570.0
_START_S = 30.0
_MAX_TOKENS = 128
_WARM_UP_S = 5.0
_WARM_UP_PAIRS = 20


def command(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each, both servers are measured.")] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Streams at a time, and slots of the engines.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each saturated measurement.")] = 20,
    pairs: Annotated[int, typer.Option(min=5, help="Lone requests in each round, of either kind.")] = 150,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("loadtests/out/overhead"),
    model: Annotated[
        str | None, typer.Option(help="Directory or name; a tiny random model if unset.")
    ] = None,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAGS]", help="Flags of vllm serve, for both engines.")
    ] = None,
) -> None:
    """Throughput, CPU and first-token time, beside vLLM's own server with the same flags."""
    plan = Plan(rounds, Saturation(streams, _MAX_TOKENS, _WARM_UP_S, seconds), pairs)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    engine = _engine(model, streams, tuple(flags or ()))
    measured = measure(plan, engine, out)
    draw(measured, out / "overhead.png")
    report = conclude(plan, engine.to_show(), measured)
    report.write(out)
    typer.echo(report.markdown(), err=True)
    typer.echo(f"written to {out}", err=True)
    typer.echo(report.summary())


def _engine(model: str | None, slots: int, more: tuple[str, ...]) -> EngineFlags:
    if model is not None:
        return EngineFlags(model, slots, more)
    # The tests' own: loads torch, so only where it is wanted.
    tiny = importlib.import_module("tests.support.tiny_model").tiny_model()
    return EngineFlags(str(tiny), slots, (*TINY_FLAGS, *more))


def measure(plan: Plan, engine: EngineFlags, out: Path) -> Measured:
    """Start both servers, run the rounds, stop both.

    Ends early, with the rounds it has, where another one would pass the limit of time.
    """
    clock = Clock(_LIMIT_S)
    measured = Measured()
    with ExitStack() as stack:
        step = stack.enter_context(steps("overhead", 2 * _START_S + plan.rounds * plan.round_s))
        client = stack.enter_context(load_client())
        launches = (stock(engine), fairgate(engine, [Tenant.new("loadtest")], out))
        targets = []
        for launch in launches:
            step(f"starting {launch.name}", _START_S)
            targets.append(stack.enter_context(running(launch, out)))
        step("warming up", 0)
        client.alternate(targets, _lone(_WARM_UP_PAIRS, stream=True, salt="w"), timeout_s=clock.left_s)
        longest_s = 0.0
        for number in range(plan.rounds):
            if number and clock.left_s < 1.2 * longest_s:
                break
            began_s = time.monotonic()
            _round(number, plan, client, targets, measured, clock, step)
            longest_s = max(longest_s, time.monotonic() - began_s)
        measured.log_lines = _request_lines(out / "fairgate.log")
        step("stopping the servers", 0)
    return measured


def _round(
    number: int,
    plan: Plan,
    client: LoadClient,
    targets: list[Target],
    measured: Measured,
    clock: Clock,
    step: Steps,
) -> None:
    """Both servers saturated, one after the other, then both in turn, one request at a time."""
    label = f"round {number + 1} of {plan.rounds}"
    windows: dict[int, Window] = {}
    for which in (0, 1) if number % 2 == 0 else (1, 0):
        step(f"{label}: {SERVERS[which]}, {plan.load.streams} streams", plan.saturated_s)
        other = targets[1 - which].pid
        began_s, used_s = time.monotonic(), _used_s(other)
        windows[which] = client.saturate(targets[which], plan.load, timeout_s=clock.left_s)
        measured.idle_cpu.append((_used_s(other) - used_s) / (time.monotonic() - began_s))
    measured.windows.append((windows[0], windows[1]))
    step(f"{label}: both in turn, one request at a time", plan.alone_s)
    for stream, into in ((True, measured.streamed_ms), (False, measured.whole_ms)):
        asks = _lone(plan.pairs, stream=stream, salt=f"{number}")
        for first, second in client.alternate(targets, asks, timeout_s=clock.left_s):
            into.append((first.ttft_s * 1e3, second.ttft_s * 1e3))


def _request_lines(log: Path) -> int:
    """Lines about requests in the gateway's log: what it does for them is part of what it costs."""
    with log.open("rb") as lines:
        return sum(b'"outcome"' in line for line in lines)


def _used_s(pid: int) -> float:
    """CPU seconds of a server so far, front end and engine."""
    cpu = CpuTimes.now(pid)
    return cpu.front_end_s + cpu.engine_s


def _lone(count: int, *, stream: bool, salt: str) -> list[Ask]:
    return [Ask(f"{salt}.{i}: say something short.", 4 if stream else 1, stream=stream) for i in range(count)]
