"""CPU seconds out of ``/proc``."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from loadtests.cpu import CpuTimes, Stat, below, descendants, parse_stat, read_stat


def test_stat_line_is_read_past_a_name_with_brackets() -> None:
    """A process may call itself anything."""
    line = "42 (a) b (c)) S 7 42 42 0 -1 4194304 1 2 3 4 150 50 900 900 20 0 9 0 12345 1 1"
    stat = parse_stat(line)
    assert (stat.pid, stat.parent, stat.started) == (42, 7, 12345)
    assert stat.cpu_s == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))


def test_only_descendants_are_found_whatever_their_depth() -> None:
    """Children's children too; siblings not."""
    family = [Stat(pid, parent, 0.0, 0) for pid, parent in [(2, 1), (3, 2), (4, 3), (5, 1), (6, 5)]]
    assert {stat.pid for stat in below(2, family)} == {3, 4}


def test_work_of_this_process_and_not_of_its_child_is_its_own() -> None:
    """The engine's work is not the front end's."""
    before = CpuTimes.now(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while (stat := read_stat(child.pid)) is not None and stat.cpu_s < 0.2:
            time.sleep(0.02)
        assert child.pid in {stat.pid for stat in descendants(os.getpid())}
        used = CpuTimes.now(os.getpid()).since(before)
        child.kill()
    assert used.engine_s >= 0.2
    assert used.front_end_s < used.engine_s


def test_process_that_has_ended_is_told() -> None:
    """No figure is made up for it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert read_stat(child.pid) is None
    with pytest.raises(ProcessLookupError):
        CpuTimes.now(child.pid)
