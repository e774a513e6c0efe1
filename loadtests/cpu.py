"""CPU seconds of processes, from ``/proc``.

Read by the client at the ends of its window, and by ``servers`` to find what a server has started.
A process's figure holds all its threads, also ended ones, and none of its children: the front end
is told apart from the engine core and the workers that it has started.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """What is read of ``/proc/PID/stat``."""

    pid: int
    parent: int
    cpu_s: float
    started: int
    """Clock ticks after boot: with the pid, it names a process for good."""


def parse_stat(text: str) -> Stat:
    """Read one line of ``/proc/PID/stat`` (proc_pid_stat(5))."""
    # The name may hold blanks and brackets; what follows its last bracket does not.
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    return Stat(
        pid=int(pid),
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
        started=int(fields[19]),
    )


def read_stat(pid: int) -> Stat | None:
    """The process's figures, or ``None`` where it is gone."""
    with contextlib.suppress(OSError):
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    return None


def descendants(pid: int) -> list[Stat]:
    """Every process below ``pid``."""
    everyone = [stat for entry in Path("/proc").iterdir() if entry.name.isdigit()
                if (stat := read_stat(int(entry.name))) is not None]  # fmt: skip
    return below(pid, everyone)


def below(pid: int, everyone: list[Stat]) -> list[Stat]:
    """Of ``everyone``, who descends from ``pid``."""
    found: list[Stat] = []
    parents = {pid}
    while parents:
        children = [stat for stat in everyone if stat.parent in parents]
        found += children
        parents = {stat.pid for stat in children}
    return found


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds used so far: of the front end alone, of all below it, and of the caller."""

    front_end_s: float
    engine_s: float
    client_s: float

    @classmethod
    def now(cls, front_end: int) -> CpuTimes:
        """Read them.

        Raises:
            ProcessLookupError: The front end is gone.
        """
        stat = read_stat(front_end)
        if stat is None:
            raise ProcessLookupError(f"the server's process {front_end} has ended")
        own = os.times()
        return cls(stat.cpu_s, sum(one.cpu_s for one in descendants(front_end)), own.user + own.system)

    def since(self, earlier: CpuTimes) -> CpuTimes:
        """What was used between the two."""
        return CpuTimes(
            self.front_end_s - earlier.front_end_s,
            self.engine_s - earlier.engine_s,
            self.client_s - earlier.client_s,
        )
