"""`Keys`: a key's own bounds on sequences at once and on requests that wait, beside its tenant's.

Used by ``turns.py`` alone. A request whose key is at its concurrency is parked here, in its key's own line,
and joins its tenant's when one of the key's ends: other keys of the tenant do not wait behind it. Keys
without such bounds, which is most, leave no trace.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..core.record import Limits
    from .slot import Waiter


@dataclass(slots=True)
class _Line:
    """One key's requests."""

    through: int = 0
    """Sequences that wait for their tenant's turn or run."""
    running: int = 0
    """Of these requests, those that run."""
    requests: int = 0
    """Requests that have come through and not ended."""
    parked: deque[Waiter] = field(default_factory=deque)


class Keys:
    """All keys with bounds of their own that have something under way."""

    def __init__(self) -> None:
        # All mutable state
        self._lines: dict[str, _Line] = {}

    def __len__(self) -> int:
        """Requests parked."""
        return sum(len(line.parked) for line in self._lines.values())

    def queued(self, waiter: Waiter) -> int:
        """Requests of the key that wait, here or in its tenant's line."""
        line = self._lines.get(_key_id(waiter))
        return 0 if line is None else len(line.parked) + line.requests - line.running

    def may_pass(self, waiter: Waiter) -> bool:
        """Whether the key's bound leaves it room now. One that is wider than the bound may run alone."""
        limit = concurrency_of(waiter)
        line = self._lines.get(_key_id(waiter))
        if limit is None or line is None:
            return True
        return not line.parked and _has_room(line, waiter, limit)

    def park(self, waiter: Waiter) -> None:
        """It waits for its key."""
        self._lines.setdefault(_key_id(waiter), _Line()).parked.append(waiter)

    def is_parked(self, waiter: Waiter) -> bool:
        """Whether it waits for its key."""
        line = self._lines.get(_key_id(waiter))
        return line is not None and waiter in line.parked

    def unpark(self, waiter: Waiter) -> None:
        """It leaves, unserved."""
        line = self._lines[_key_id(waiter)]
        line.parked.remove(waiter)
        self._forget_if_idle(_key_id(waiter), line)

    def passed(self, waiter: Waiter) -> None:
        """It joins its tenant's line."""
        if _limits(waiter) is not None:
            line = self._lines.setdefault(_key_id(waiter), _Line())
            line.through += waiter.demand.sequences
            line.requests += 1

    def started(self, waiter: Waiter) -> None:
        """Its turn has come."""
        if (line := self._lines.get(_key_id(waiter))) is not None:
            line.running += 1

    def ended(self, waiter: Waiter, *, ran: bool) -> Iterator[Waiter]:
        """One that had passed is gone. Those that may pass now are to be let through, in this order."""
        line = self._lines.get(_key_id(waiter))
        if line is None:
            return
        line.through -= waiter.demand.sequences
        line.requests -= 1
        line.running -= ran
        while line.parked and _has_room(line, line.parked[0], concurrency_of(line.parked[0])):
            yield line.parked.popleft()
        self._forget_if_idle(_key_id(waiter), line)

    def _forget_if_idle(self, key_id: str, line: _Line) -> None:
        if not line.parked and not line.requests:
            self._lines.pop(key_id, None)


def concurrency_of(waiter: Waiter) -> int | None:
    """The key's own bound on sequences at once."""
    limits = _limits(waiter)
    return None if limits is None else limits.max_concurrency


def most_queued(waiter: Waiter) -> int | None:
    """The key's own bound on requests that wait."""
    limits = _limits(waiter)
    return None if limits is None else limits.max_queued


def _has_room(line: _Line, waiter: Waiter, limit: int | None) -> bool:
    return limit is None or not line.through or line.through + waiter.demand.sequences <= limit


def _limits(waiter: Waiter) -> Limits | None:
    assert waiter.record.principal is not None, "auth stands before admission"
    return waiter.record.principal.key.limits


def _key_id(waiter: Waiter) -> str:
    assert waiter.record.principal is not None, "auth stands before admission"
    return waiter.record.principal.key.id
