"""What a person sees while a scenario runs: a bar on a terminal, a line a step elsewhere; on standard error.

Used by the scenarios, which also keep their time by `Clock`: a load test has an end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator


class Steps:
    """Says which step runs, and moves the bar to where it begins."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._running_s = 0.0

    def __call__(self, label: str, seconds: float) -> None:
        """A step begins that takes about ``seconds``."""
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"{time.strftime('%H:%M:%S')} {label}")
        self._progress.update(self._task, advance=self._running_s, description=label)
        self._running_s = seconds


@contextlib.contextmanager
def steps(scenario: str, total_s: float) -> Iterator[Steps]:
    """A bar over about ``total_s`` seconds of work."""
    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn(scenario), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal
    ) as progress:
        yield Steps(progress, progress.add_task("", total=total_s))


class Clock:
    """The time that a scenario may take.

    Args:
        limit_s: Seconds from now.
    """

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds left; never below 1, so that it can serve as a timeout."""
        return max(1.0, self._end_s - time.monotonic())
