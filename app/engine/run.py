"""What runs in the engine: `Run`, one request there, and `Runs`, all of them by the engine's id.

Used by the gate. A `Run` is made the moment its request has a slot, hangs on the Record, and ends
once: by the generator when the engine is done, or by the edge when the client is gone.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any, Protocol

from ..core.record import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..core.record import Demand, Record


class ShareSeam(Protocol):
    """What one generation holds of the engine."""

    @property
    def priority(self) -> int:
        """Place in fair order: lower goes first."""

    @property
    def rank(self) -> int:
        """The data-parallel rank to run on."""

    def settle(self, usage: Usage, *, finished: bool) -> None:
        """It has ended, having used so much. Idempotent."""


class Runs:
    """All requests in the engine. One event loop; no await between reading state and changing it.

    Args:
        engine: Asked for `computed` and `abort`, and tells of its own aborts through `on_abort`.
        clock: Monotonic seconds.
    """

    def __init__(self, engine: Any, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._ids = itertools.count()
        # Mutable state: what runs, by the engine's id, and aborts under way
        self._running: dict[str, Run] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        engine.on_abort = self._on_abort

    def __len__(self) -> int:
        return len(self._running)

    def start(self, record: Record, slot: ShareSeam, demand: Demand) -> Run:
        """The request is admitted: from here on its slot and its tokens are this run's."""
        # An id of ours: the engine aborts every request that shares one, and clients choose theirs.
        run = Run(f"fairgate-{next(self._ids)}", self, record, slot, demand)
        self._running[run.id] = run
        record.held.append(run)
        record.decide(self._clock())
        return run

    def has_ended(self, run: Run) -> bool:
        """Whether its release has been."""
        return run.id not in self._running

    def end(self, run: Run) -> None:
        """Forget it, and abort what still runs of it in the engine (by a task: a release cannot wait)."""
        if not run.is_finished:
            run.computed(self._engine.computed(run.id))
            task = asyncio.get_running_loop().create_task(self._engine.abort(run.id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
        del self._running[run.id]

    def now_s(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def _on_abort(self, engine_id: str, counts: dict[int, int]) -> None:
        run = self._running.get(engine_id)
        if run is not None:
            run.computed(counts)

    def stalled(self, limit_s: float) -> Iterator[Record]:
        """The requests whose clients have left their tokens unread for so long. Asked once a second or so.

        The engine does not wait for a client: it computes on, and vLLM keeps what is not fetched. A stream is
        stalled when the engine has more for it than it has taken, and it has taken nothing since.
        """
        now_s = self._clock()
        for run in self._running.values():
            if run.is_stalled(now_s, limit_s) and self._has_more(run):
                yield run.record

    def _has_more(self, run: Run) -> bool:
        computed = self._engine.computed(run.id)
        # Unknown there: it has ended. Sequence by sequence: of ``n``, those that have ended are not told.
        return not computed or any(tokens > run.counts[index] for index, tokens in computed.items())


class Run:
    """One request in the engine: its id there, its counts, its slot."""

    def __init__(self, id: str, runs: Runs, record: Record, slot: ShareSeam, demand: Demand) -> None:
        self.id = id
        self.record = record
        self.counts = [0] * demand.sequences
        """Tokens computed, by sequence index."""
        self.has_output = False
        self.is_finished = False
        self._runs = runs
        self._slot = slot
        self._prompt_tokens = demand.prompt_tokens
        self._cached_tokens = 0
        self._was_taken = False
        self._seen_tokens = 0
        self._seen_s = 0.0

    @property
    def priority(self) -> int:
        """Place in fair order, for the engine's own waiting list."""
        return self._slot.priority

    @property
    def rank(self) -> int:
        """The data-parallel rank to run on."""
        return self._slot.rank

    def is_stalled(self, now_s: float, limit_s: float) -> bool:
        """Whether no token has passed for so long, between looks. Only of a stream that has begun."""
        tokens = sum(self.counts)
        if tokens != self._seen_tokens or not self.has_output:
            self._seen_tokens, self._seen_s = tokens, now_s
            return False
        return now_s - self._seen_s >= limit_s

    def first_output(self, output: Any) -> None:
        """Note the first token's time, and what the prefix cache gave."""
        self.has_output = True
        self._cached_tokens = getattr(output, "num_cached_tokens", None) or 0
        if self.record.first_token_s is None:
            self.record.first_token_s = self._runs.now_s()

    def computed(self, counts: dict[int, int]) -> None:
        """What the engine says it has computed, which may be more than has passed the gate."""
        self._was_taken = self._was_taken or bool(counts)
        for index, tokens in counts.items():
            self.counts[index] = max(self.counts[index], tokens)

    def finish(self) -> None:
        """The engine is done with it by itself: there is nothing to abort."""
        self.is_finished = True

    def release(self) -> None:
        """End it in the engine if it still runs there, settle its usage, give its slot back. Idempotent."""
        if self._runs.has_ended(self):
            return
        self._runs.end(self)
        self.record.held.remove(self)
        used = self._used()
        self.record.usage.add(used)
        self._slot.settle(used, finished=self.is_finished)

    def _used(self) -> Usage:
        """What the engine computed; nothing for a request that it refused to take."""
        if not (self.has_output or self.is_finished or self._was_taken):
            return Usage()
        return Usage(self._prompt_tokens, self._cached_tokens, sum(self.counts))
