"""What the scenario ``overhead`` has measured, and what it concludes: bars, tables, words.

Owns `Plan` and `Measured`, which ``overhead`` fills, and the report made of them. No server is needed here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from .report import Bar, Report, table
from .stats import Pair, added, quantile, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .client import Saturation, Window

SERVERS = ("stock", "fairgate")

_DRAIN_S = 4.0
"""About what the last answers take to end."""
_LONE_S = 0.02
"""About what a lone request takes: only the progress bar believes it."""

_QUESTION = """\
What does the gateway cost beside vLLM's own server, with the same engine behind it? `stock` is vLLM's OpenAI
server with its defaults, without a key, and with its access log off. `fairgate` is the gateway with its
defaults: every request brings a tenant's key and leaves a line in the request log, which goes to a file."""

_METHOD = """\
## How it was measured

- Both servers were up all the time and were asked in turn. Who came first changed from round to round, and
  with lone requests from request to request. Ratios are taken within a round; the value is their median.
- Streams: chat completions with short prompts of their own, greedy, {max_tokens} tokens each, asked again as
  soon as one ends; the first answers have staggered lengths. The window opened {warm_up_s:g} s after the
  start and was {seconds:g} s long.
- Tokens were counted by the client: events that came inside the window, times the tokens that an event of
  that answer stood for. A front end that falls behind its engine puts several tokens into one event, which
  makes a token cheaper: where tokens/event differ, compare the CPU for an event too, and mistrust a busy
  machine.
- Front-end CPU is user and system time of the one process that holds the socket, with all its threads
  (`/proc`), over the window. Engine CPU is that of all processes below it. The client ran in a process of
  its own.
- Front end, engine core, its worker and the client share the cores of this machine: read the ratios, not
  the tokens per second.
- The 95 % intervals are bootstraps: over rounds for the ratios (few rounds make them crude), over pairs of
  requests for the times."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    load: Saturation
    pairs: int
    """Lone requests to each server in each round, of either kind."""

    @property
    def saturated_s(self) -> float:
        """About what one saturated measurement takes."""
        return self.load.warm_up_s + self.load.seconds + _DRAIN_S

    @property
    def alone_s(self) -> float:
        """About what a round's lone requests take."""
        return 4 * self.pairs * _LONE_S

    @property
    def round_s(self) -> float:
        """About what a round takes."""
        return 2 * self.saturated_s + self.alone_s


@dataclass(slots=True)
class Measured:
    """What the rounds have brought; in every pair, stock comes first."""

    windows: list[tuple[Window, Window]] = field(default_factory=list)
    streamed_ms: list[Pair] = field(default_factory=list)
    whole_ms: list[Pair] = field(default_factory=list)
    idle_cpu: list[float] = field(default_factory=list)
    """Share of a core that the server which was not asked took."""
    log_lines: int = 0
    """Requests that the gateway has logged."""


def conclude(plan: Plan, flags: Sequence[str], measured: Measured) -> Report:
    """Judge the bars and put the report together.

    Args:
        plan: How much was measured.
        flags: The engines'.
        measured: At least one round.
    """
    windows = measured.windows
    bars = (
        Bar(
            "throughput_ratio",
            ratio([(a.tokens_per_s, b.tokens_per_s) for a, b in windows]),
            "≥",
            0.97,
            f"tokens/s at {plan.load.streams} streams, fairgate over stock",
        ),
        Bar(
            "cpu_per_token_ratio",
            ratio([(a.front_end_us, b.front_end_us) for a, b in windows]),
            "≤",
            1.0,
            "front-end CPU for each streamed token, fairgate over stock",
            aim=0.85,
        ),
        Bar(
            "ttft_added_ms",
            added(measured.streamed_ms),
            "≤",
            1.0,
            "ms that fairgate adds to the median time to the first token of a lone stream",
        ),
    )
    load, count = plan.load, len(windows)
    short = f"Only {count} of {plan.rounds} rounds fitted into the time. " if count < plan.rounds else ""
    return Report(
        scenario="overhead",
        question=short + _QUESTION,
        bars=bars,
        sections=(
            _rounds(measured),
            _alone(measured),
            _METHOD.format(max_tokens=load.max_tokens, warm_up_s=load.warm_up_s, seconds=load.seconds),
            "Engine flags of both: `" + " ".join(flags) + "`",
        ),
        plots=("overhead.png",),
        data={"plan": asdict(plan), "flags": list(flags), "measured": asdict(measured)},
    )


def _rounds(measured: Measured) -> str:
    columns: dict[str, Callable[[Window], str]] = {
        "tokens/s": lambda window: f"{window.tokens_per_s:.0f}",
        "tokens/event": lambda window: f"{window.tokens_per_event:.2f}",
        "front-end µs/token": lambda window: f"{window.front_end_us:.1f}",
        "front-end µs/event": lambda window: f"{window.front_end_us * window.tokens_per_event:.1f}",
        "front-end cores": lambda window: f"{window.cpu.front_end_s / window.seconds:.2f}",
        "engine cores": lambda window: f"{window.cpu.engine_s / window.seconds:.2f}",
        "client cores": lambda window: f"{window.cpu.client_s / window.seconds:.3f}",
    }
    rows = [
        [str(number + 1), SERVERS[which], *(show(window) for show in columns.values())]
        for number, pair in enumerate(measured.windows)
        for which, window in enumerate(pair)
    ]
    idle = max(measured.idle_cpu, default=0.0)
    return (
        "## Saturated\n\n"
        + table(["round", "server", *columns], rows)
        + f"\n\nThe server that was not asked took at most {idle:.1%} of a core meanwhile."
        + f" The gateway's request log has {measured.log_lines} lines."
        + ("" if measured.log_lines else " **It logged nothing: its cost is missing from these figures.**")
    )


def _alone(measured: Measured) -> str:
    kinds = (
        ("streamed, to the first token", measured.streamed_ms),
        ("whole answer of one token", measured.whole_ms),
    )
    rows = []
    for name, pairs in kinds:
        for which, server in enumerate(SERVERS):
            times = [pair[which] for pair in pairs]
            rows.append([name, server, *(f"{quantile(times, q):.2f}" for q in (0.5, 0.9, 0.99))])
        more = added(pairs)
        rows.append([name, "added", f"**{more.value:.2f}** ({more.low:.2f} to {more.high:.2f})", "", ""])
    count = len(measured.streamed_ms)
    return (
        "## Alone\n\n"
        + table(["request", "server", "median ms", "p90", "p99"], rows)
        + (f"\n\n{count} requests of either kind to each server, one at a time.")
    )
