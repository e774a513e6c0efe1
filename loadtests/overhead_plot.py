"""The picture of the scenario ``overhead``: throughput, CPU for a token, first-token times.

Called by ``overhead`` with what it has measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .overhead_report import SERVERS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from .overhead_report import Measured

_COLOURS = ("#8a8f98", "#1f6feb")


def draw(measured: Measured, file: Path) -> None:
    """Write the PNG."""
    from matplotlib.figure import Figure  # half a second to import, and needs no display

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    speed, cpu, first = figure.subplots(1, 3)
    _bars(speed, [(a.tokens_per_s, b.tokens_per_s) for a, b in measured.windows], "tokens/s, saturated")
    _bars(cpu, [(a.front_end_us, b.front_end_us) for a, b in measured.windows], "front-end CPU, µs/token")
    for which, server in enumerate(SERVERS):
        times = sorted(pair[which] for pair in measured.streamed_ms)
        shares = [(place + 1) / len(times) for place in range(len(times))]
        first.step(times, shares, where="post", color=_COLOURS[which], label=server)
    first.set_title("first token of a lone stream, ms", fontsize=10)
    first.set_xlim(
        0, 1.5 * sorted(max(pair) for pair in measured.streamed_ms)[len(measured.streamed_ms) // 2]
    )
    first.set_ylabel("share of requests")
    first.legend(frameon=False)
    for axes in (speed, cpu, first):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def _bars(axes: Axes, pairs: Sequence[tuple[float, float]], title: str) -> None:
    """A pair of bars for each round."""
    for which in range(len(SERVERS)):
        places = [number + 1 + (which - 0.5) * 0.38 for number in range(len(pairs))]
        axes.bar(places, [pair[which] for pair in pairs], 0.36, color=_COLOURS[which])
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("round")
    axes.set_xticks(range(1, len(pairs) + 1))
