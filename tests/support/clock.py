"""A clock that moves when a test says so."""

from __future__ import annotations


class FakeClock:
    """Monotonic seconds, by hand."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
