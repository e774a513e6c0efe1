"""The form of a report, and what ``overhead`` concludes from figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from loadtests.client import Saturation, Window
from loadtests.cpu import CpuTimes
from loadtests.overhead_plot import draw
from loadtests.overhead_report import Measured, Plan, conclude
from loadtests.report import Bar
from loadtests.servers import EngineFlags
from loadtests.stats import Estimate

if TYPE_CHECKING:
    from pathlib import Path

PLAN = Plan(rounds=3, load=Saturation(streams=64, max_tokens=128, warm_up_s=5, seconds=20), pairs=2)


def window(tokens: float, front_end_s: float) -> Window:
    """Twenty seconds at a server."""
    return Window(20.0, tokens, 10, int(tokens), CpuTimes(front_end_s, 20.0, 0.5))


def measured() -> Measured:
    """Fairgate at 0.98 of the tokens, with 0.9 of the CPU for each, and half a millisecond later."""
    pair = window(40_000, 4.0), window(39_200, 4.0 * 0.98 * 0.9)
    return Measured([pair, pair], [(9.0, 9.5), (9.2, 9.7)], [(7.0, 7.1)], [0.004, 0.006])


@pytest.mark.parametrize(
    ("value", "relation", "is_met"),
    [(0.97, "≥", True), (0.9696, "≥", True), (0.9694, "≥", False), (1.0004, "≤", True), (1.001, "≤", False)],
)
def test_bar_is_judged_on_the_printed_figure(value: float, relation: str, is_met: bool) -> None:
    """The last line and the verdict never disagree."""
    bound = 0.97 if relation == "≥" else 1.0
    bar = Bar("key", Estimate(value, value, value), "≥" if relation == "≥" else "≤", bound, "meaning")
    assert bar.is_met is is_met


def test_last_line_names_scenario_and_figures() -> None:
    """In the order that others read it in."""
    line = conclude(PLAN, [], measured()).summary()
    assert line == "overhead throughput_ratio=0.980 cpu_per_token_ratio=0.900 ttft_added_ms=0.500"


def test_report_says_met_or_missed_and_what_is_short() -> None:
    """A figure that misses its bar stands out, and so does a run that ended early."""
    found = measured()
    found.windows = [(slow, fast) for fast, slow in found.windows]
    text = conclude(PLAN, ["--enforce-eager"], found).markdown()
    assert "**missed**" in text
    assert "| met |" in text
    assert "Only 2 of 3 rounds" in text
    assert "--enforce-eager" in text
    assert "at most 0.6% of a core" in text
    assert "It logged nothing" in text


def test_report_figures_and_plot_are_written(tmp_path: Path) -> None:
    """Three files, and the JSON holds every measurement."""
    report = conclude(PLAN, [], measured())
    report.write(tmp_path)
    draw(measured(), tmp_path / "overhead.png")
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["figures"]["throughput_ratio"]["is_met"] is True
    assert len(content["measured"]["windows"]) == 2
    assert (tmp_path / "report.md").read_text().startswith("# overhead\n")
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")


def test_report_shows_a_model_by_its_name_alone() -> None:
    """Directories are the host's own affair."""
    flags = EngineFlags("/somewhere/deep/tiny", 64, ("--enforce-eager",)).to_show()
    assert flags[:2] == ["--model", "tiny"]
    assert not any("somewhere" in flag for flag in flags)
