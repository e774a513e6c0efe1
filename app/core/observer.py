"""The seams between a request and those who watch it or hold something for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .record import Record


class Observer(Protocol):
    """Told once about each request, when it has ended. Metrics, logs, ledger and traces are such."""

    def closed(self, record: Record) -> None:
        """``record.outcome`` and ``record.usage`` are final. Must not raise, must not block."""


class Releasable(Protocol):
    """Something held for a request: a slot, a running engine request."""

    def release(self) -> None:
        """Give it back. Idempotent and synchronous: it belongs to whoever ends first."""
