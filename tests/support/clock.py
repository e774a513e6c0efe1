"""A clock that moves when a test says so."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class FakeClock:
    """Monotonic seconds, by hand."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


@asynccontextmanager
async def loop_clock(clock: FakeClock) -> AsyncIterator[None]:
    """Inside, the running loop's timers go by this clock. `settle` runs those that are due."""
    loop = asyncio.get_running_loop()
    loop.time = clock  # type: ignore[method-assign]
    try:
        yield
    finally:
        del loop.time
