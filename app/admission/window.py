"""How many sequences the engine should hold: enough to be busy, few enough that the turn stays ours.

Owns one `Window` for each data-parallel rank. Called by ``admission.py``: `best` and `take` when a waiter
goes, `give` when its Slot is released, `on_signals` once an engine step, right after it.

What stands in the engine's own waiting list has had its turn and cannot be overtaken there by who comes
later; a list that runs empty leaves slots idle for a round trip. So each window keeps that list in [1, L],
where L covers the completions of one round trip (Little's law): L = clamp(ceil(completions/s * round trip)
+ 1, 2, 8). A step that leaves the list empty while somebody waits here raises the window; one that
leaves it longer than L lowers it. Lowering is to what is in flight less the excess, not by the excess:
the same list seen twice must not count twice, since nothing can be called back. The signal has no age
to speak of (same loop, once a step), so nothing is smoothed but the rates.

Left out: Netflix's gradient on step time as a safety net. A step's time follows the prompt tokens in it,
and these the scheduler bounds by itself (``max_num_batched_tokens``); it would cut at every long prompt.

Always: 1 ≤ limit ≤ slots + lanes + L. `in_flight` is what was taken and not given. A request goes in when its
first sequence has room: the others of an ``n > 1`` may wait in the engine, as its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..core.facts import EngineSignals

LEAST_DEPTH, GREATEST_DEPTH = 2, 8
"""Bounds of L, in sequences."""

RATE_S = 2.0
"""Time constant of the completion rate and the step time, seconds."""

LONG_STEP_S = 1.0
"""A longer gap between two signals is a pause of the engine, not a step."""


class Window:
    """How many sequences one rank may hold, and how many it does.

    Args:
        slots: Sequences per step of the engine.
        lanes: Further sequences that its fair scheduler may let in.
        steps_behind: Steps from a request's dispatch until it can be seen: 1, or 2 with async scheduling.
    """

    def __init__(self, slots: int, lanes: int = 0, *, steps_behind: int = 1) -> None:
        self._most = slots + lanes
        self._slots = slots
        self._steps_behind = steps_behind
        # All mutable state
        self.in_flight = 0
        """Sequences sent and not yet ended: running, waiting in the engine, or on their way."""
        self.waiting = 0
        """The engine's own waiting list, as of the last step."""
        self.limit = slots + LEAST_DEPTH
        self._depth = LEAST_DEPTH
        self._ended = 0
        self._completions_per_s = 0.0
        self._step_s = 0.0
        self._seen_s: float | None = None

    def __repr__(self) -> str:
        return f"<Window {self.in_flight} of {self.limit} in flight, {self.waiting} waiting in the engine>"

    @property
    def depth(self) -> int:
        """L: how many may wait in the engine."""
        return self._depth

    def has_room(self) -> bool:
        """Whether one more request may go."""
        return self.in_flight < self.limit

    def take(self, sequences: int = 1) -> None:
        """A request of so many sequences goes to the engine."""
        self.in_flight += sequences

    def give(self, sequences: int = 1) -> None:
        """It has ended, however it ended."""
        if sequences > self.in_flight:
            raise ValueError(f"{sequences} sequences given back, {self.in_flight} in flight")
        self.in_flight -= sequences
        self._ended += sequences

    def on_signals(self, signals: EngineSignals, *, backlog: bool) -> None:
        """A step of this rank has ended; `backlog`: somebody who may go waits here."""
        self._measure(signals.at_s)
        self.waiting = signals.waiting
        excess = signals.waiting - self._depth
        if excess > 0:
            self.limit = min(self.limit, self.in_flight - excess)
        elif signals.waiting == 0 and backlog and not self.has_room():
            idle = self._slots - signals.running
            self.limit += min(max(idle, 1), self._depth)
        self.limit = max(1, min(self.limit, self._most + self._depth))

    def _measure(self, now_s: float) -> None:
        """Completions a second and seconds a step, from the interval since the last signal."""
        before_s, self._seen_s = self._seen_s, now_s
        ended, self._ended = self._ended, 0
        if before_s is None or not 0 < now_s - before_s <= LONG_STEP_S:
            return
        step_s = now_s - before_s
        part = -math.expm1(-step_s / RATE_S)
        self._completions_per_s += part * (ended / step_s - self._completions_per_s)
        self._step_s = step_s if self._step_s == 0 else self._step_s + part * (step_s - self._step_s)
        round_trip_s = (1 + self._steps_behind) * self._step_s
        depth = math.ceil(self._completions_per_s * round_trip_s) + 1
        self._depth = max(LEAST_DEPTH, min(depth, GREATEST_DEPTH))


class Windows:
    """One Window a rank, and the choice between them."""

    def __init__(self, ranks: int, slots: int, lanes: int = 0, *, steps_behind: int = 1) -> None:
        self._windows = [Window(slots, lanes, steps_behind=steps_behind) for _ in range(ranks)]

    def __repr__(self) -> str:
        return f"<Windows {', '.join(map(repr, self._windows))}>"

    def __getitem__(self, rank: int) -> Window:
        return self._windows[rank]

    @property
    def in_flight(self) -> int:
        """Sequences in the engine, all ranks together."""
        return sum(window.in_flight for window in self._windows)

    def best(self) -> int | None:
        """The rank with the least in flight that has room. None: nobody may go."""
        return next(self.with_room(), None)

    def with_room(self) -> Iterator[int]:
        """The ranks whose windows have room, the one with the least in flight first."""
        if len(self._windows) == 1:
            if self._windows[0].has_room():
                yield 0
            return
        for rank in sorted(range(len(self._windows)), key=lambda at: self._windows[at].in_flight):
            if self._windows[rank].has_room():
                yield rank

    def least(self) -> int:
        """The rank with the least in flight, room or not."""
        return min(range(len(self._windows)), key=lambda at: self._windows[at].in_flight)

    def take(self, rank: int, sequences: int = 1) -> None:
        """A request of so many sequences goes to that rank."""
        self._windows[rank].take(sequences)

    def give(self, rank: int, sequences: int = 1) -> None:
        """It has ended there, however it ended."""
        self._windows[rank].give(sequences)

    def on_signals(self, signals: EngineSignals, *, backlog: bool) -> None:
        """A step of one rank has ended; `backlog`: somebody who may go waits here."""
        self._windows[signals.rank].on_signals(signals, backlog=backlog)

    def depths(self, queued: int) -> tuple[int, ...]:
        """The true queue of each rank: what waits in it, and its part of what waits here, rounded up.

        A balancer that scrapes the engine's own list sees 1 or 2 of a thousand.
        """
        part = -(-queued // len(self._windows))
        return tuple(window.waiting + part for window in self._windows)
