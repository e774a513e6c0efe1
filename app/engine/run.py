"""What runs in the engine: `Run`, one request there, and `Runs`, all of them by the engine's id.

Used by the gate. A `Run` is made the moment its request has a slot, hangs on the Record, and ends
once: by the generator when the engine is done, or by the edge when the client is gone.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core.observer import Releasable
    from ..core.record import Demand, Record


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

    def start(self, record: Record, slot: Releasable, demand: Demand) -> Run:
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


class Run:
    """One request in the engine: its id there, its counts, its slot."""

    def __init__(self, id: str, runs: Runs, record: Record, slot: Releasable, demand: Demand) -> None:
        self.id = id
        self.counts = [0] * demand.sequences
        """Tokens computed, by sequence index."""
        self.has_output = False
        self.is_finished = False
        self._runs = runs
        self._record = record
        self._slot = slot
        self._prompt_tokens = demand.prompt_tokens
        self._cached_tokens = 0

    def first_output(self, output: Any) -> None:
        """Note the first token's time, and what the prefix cache gave."""
        self.has_output = True
        self._cached_tokens = getattr(output, "num_cached_tokens", None) or 0
        if self._record.first_token_s is None:
            self._record.first_token_s = self._runs.now_s()

    def computed(self, counts: dict[int, int]) -> None:
        """What the engine says it has computed, which may be more than has passed the gate."""
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
        usage = self._record.usage
        usage.prompt_tokens += self._prompt_tokens
        usage.cached_tokens += self._cached_tokens
        usage.completion_tokens += sum(self.counts)
        self._record.held.remove(self)
        self._slot.release()
