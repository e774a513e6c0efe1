"""How many sequences the engine holds: never idle while somebody waits, never deep."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.admission.window import GREATEST_DEPTH, LEAST_DEPTH, Window, Windows
from app.core.facts import EngineSignals

STEP_S = 0.01


def signals(running: int, waiting: int, *, at_s: float = 0.0, rank: int = 0) -> EngineSignals:
    """A step of the engine."""
    return EngineSignals(
        rank=rank,
        at_s=at_s,
        running=running,
        waiting=waiting,
        kv_usage=0.0,
        prefill_tokens=0,
        decode_tokens=running,
        preempted=0,
    )


@dataclass
class Engine:
    """Slots, a waiting list and requests that take so many steps. What is sent is seen a step later."""

    slots: int
    rng: random.Random
    longest: int
    window: Window
    backlog: int = 10**9
    sent: int = 0
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    usable: int = 10**9
    """Fewer than the slots, when the KV cache is short."""
    now_s: float = 0.0
    idle: int = 0
    """Slot-steps that stood empty while somebody waited."""
    deepest: int = 0

    def run(self, steps: int) -> None:
        """So many steps, each followed by its signals and by what the gateway does about it."""
        for _ in range(steps):
            self.waiting += [self.rng.randint(1, self.longest) for _ in range(self.sent)]
            self.sent = 0
            usable = min(self.slots, self.usable)
            while self.waiting and len(self.running) < usable:
                self.running.append(self.waiting.pop(0))
            self.idle += max(0, usable - len(self.running)) if self.backlog else 0
            self.running = [left - 1 for left in self.running]
            ended = self.running.count(0)
            self.running = [left for left in self.running if left]
            self.now_s += STEP_S
            self.deepest = max(self.deepest, len(self.waiting))
            for _ in range(ended):
                self.window.give()
                self._dispatch()
            step = signals(len(self.running), len(self.waiting), at_s=self.now_s)
            self.window.on_signals(step, backlog=self.backlog > 0)
            self._dispatch()

    def _dispatch(self) -> None:
        while self.backlog and self.window.has_room():
            self.window.take()
            self.backlog -= 1
            self.sent += 1


class TestWindow:
    """One rank."""

    @pytest.mark.parametrize(("slots", "longest"), [(8, 100), (32, 60), (64, 40), (256, 200)])
    def test_the_engine_is_busy_and_its_list_short(self, slots: int, longest: int) -> None:
        """From the first second on: 1 % of the slots idle at most, never more than L waiting."""
        engine = Engine(slots, random.Random(slots), longest, Window(slots))
        engine.run(100)
        engine.idle = engine.deepest = 0
        engine.run(2000)
        assert engine.idle <= 0.01 * slots * 2000
        assert engine.deepest <= GREATEST_DEPTH
        assert engine.waiting

    @settings(max_examples=40, deadline=None)
    @given(
        slots=st.integers(1, 64),
        longest=st.integers(1, 80),
        seed=st.integers(0, 2**16),
        usable=st.lists(st.integers(1, 64), max_size=4),
    )
    def test_never_deep_never_stuck(self, slots: int, longest: int, seed: int, usable: list[int]) -> None:
        """Whatever the lengths, and with a cache that shrinks and grows: bounds hold, work goes on."""
        window = Window(slots)
        engine = Engine(slots, random.Random(seed), longest, window)
        for count in [64, *usable]:
            engine.usable = count
            engine.run(longest + 60)
            assert 1 <= window.limit <= slots + window.depth
            assert len(engine.waiting) <= window.depth + max(0, slots - count)
            assert engine.running or engine.waiting or engine.sent
            assert window.in_flight == len(engine.running) + len(engine.waiting) + engine.sent

    def test_a_cache_that_is_short_leaves_the_list_short(self) -> None:
        """Half of the slots usable: the window comes down with them, and up again after."""
        engine = Engine(64, random.Random(1), 50, Window(64))
        engine.run(200)
        engine.usable = 30
        engine.run(200)
        assert 1 <= len(engine.waiting) <= GREATEST_DEPTH
        engine.usable = 64
        engine.run(40)
        engine.idle = 0
        engine.run(200)
        assert engine.idle <= 0.01 * 64 * 200

    def test_an_excess_seen_twice_counts_once(self) -> None:
        """What is in the engine cannot be called back: lowering again would empty it later."""
        window = Window(32)
        window.take(34)
        for _ in range(10):
            window.on_signals(signals(20, 14), backlog=True)
        assert window.limit == 34 - (14 - LEAST_DEPTH)

    def test_without_a_backlog_it_does_not_grow(self) -> None:
        """An empty list is no news when nobody waits."""
        window = Window(4)
        window.take(6)
        window.on_signals(signals(4, 0), backlog=False)
        assert window.limit == 6

    def test_room_that_is_there_is_not_enlarged(self) -> None:
        """Waiters held back by something else (the cache) say nothing about the window."""
        window = Window(4)
        window.on_signals(signals(0, 0), backlog=True)
        assert window.limit == 6

    def test_many_sequences_go_when_the_first_has_room(self) -> None:
        """And count, all of them."""
        window = Window(4)
        window.take(5)
        assert window.has_room()
        window.take(8)
        assert not window.has_room()
        assert repr(window) == "<Window 13 of 6 in flight, 0 waiting in the engine>"
        window.give(8)
        assert window.in_flight == 5

    def test_what_was_not_taken_cannot_be_given(self) -> None:
        """A double release is a fault, and told."""
        window = Window(4)
        with pytest.raises(ValueError, match="1 sequences given back, 0 in flight"):
            window.give()

    def test_many_completions_a_step_deepen_the_list(self) -> None:
        """L follows completions per round trip, within its bounds."""
        window = Window(64)
        for step in range(1000):
            window.take(3)
            window.give(3)
            window.on_signals(signals(64, 1, at_s=step * STEP_S), backlog=True)
        assert 6 <= window.depth <= GREATEST_DEPTH
        for step in range(1000, 2000):
            window.on_signals(signals(64, 1, at_s=step * STEP_S), backlog=True)
        assert window.depth == LEAST_DEPTH

    def test_lanes_are_room_on_top(self) -> None:
        """The window may grow by them."""
        window = Window(4, lanes=2)
        for _ in range(20):
            window.take(int(window.has_room()))
            window.on_signals(signals(4, 0), backlog=True)
        assert window.limit == 4 + 2 + window.depth


class TestWindows:
    """B52: several ranks."""

    def test_a_burst_is_spread_evenly(self) -> None:
        """64 at once on two ranks: half on each."""
        windows = Windows(2, 40)
        for _ in range(64):
            rank = windows.best()
            assert rank is not None
            windows.take(rank)
        assert windows[0].in_flight == windows[1].in_flight == 32
        assert windows.in_flight == 64

    def test_requests_go_where_least_is(self) -> None:
        """Long ones pile up nowhere."""
        windows = Windows(3, 4)
        windows.take(0, 3)
        windows.take(1, 1)
        assert windows.best() == 2
        windows.take(2, 2)
        assert windows.best() == 1
        windows.give(0, 3)
        assert windows.best() == 0

    def test_a_rank_whose_cache_is_short_does_not_stop_the_others(self) -> None:
        """Its window is full at less; the next one has room."""
        windows = Windows(2, 8)
        windows.take(0, 4)
        windows.take(1, 5)
        windows.on_signals(signals(1, 3), backlog=True)
        assert windows[0].limit == 3
        assert windows.best() == 1
        windows.take(1, 5)
        assert windows.best() is None

    def test_ranks_with_room_come_least_first(self) -> None:
        """Where the cache of the first is short, the next is tried; an extension goes to the least anyway."""
        windows = Windows(3, 4)
        for rank, sequences in enumerate((6, 3, 1)):
            windows.take(rank, sequences)
        assert list(windows.with_room()) == [2, 1]
        windows.take(1, 3)
        windows.take(2, 6)
        assert list(windows.with_room()) == []
        assert windows.least() == 0

    def test_the_true_depth_is_ours_and_the_engines(self) -> None:
        """What a balancer should scrape."""
        windows = Windows(2, 8)
        windows.on_signals(signals(8, 2, rank=1), backlog=True)
        assert windows.depths(9) == (5, 7)
        assert "Windows <Window 0 of 10" in repr(windows)
