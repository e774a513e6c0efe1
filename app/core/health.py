"""Where the process is in its life. One `Health`, moved by ``server.py``, read by ops and gate."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """From start to end; a process never goes back."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class Health:
    """The phase, and why. Not a lock: one event loop reads and writes it."""

    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.reason = "the model is loading"

    def __repr__(self) -> str:
        return f"<Health {self.phase}: {self.reason}>"

    def ready(self) -> None:
        """A first real generation has worked."""
        if self.phase is Phase.LOADING:
            self.phase, self.reason = Phase.READY, "serving"

    def drain(self) -> None:
        """No new work from here on; what runs may finish."""
        if self.phase is not Phase.DOWN:
            self.phase, self.reason = Phase.DRAINING, "the server is shutting down"

    def down(self, reason: str) -> None:
        """The engine is gone."""
        self.phase, self.reason = Phase.DOWN, reason

    @property
    def is_ready(self) -> bool:
        """Whether new work is taken."""
        return self.phase is Phase.READY

    @property
    def is_live(self) -> bool:
        """Whether the process is worth keeping: false only when its engine is gone."""
        return self.phase is not Phase.DOWN
