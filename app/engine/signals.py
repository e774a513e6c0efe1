"""Per-step statistics of the engine, as `EngineSignals`.

vLLM calls a stat logger once per engine step, on our event loop, right after that step's tokens were
queued (``AsyncLLM._run_output_handler``): what is told here is never stale. A scrape is 50 to 200 ms old.
Made by ``launch.py``; heard by admission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

from ..core.facts import EngineSignals

if TYPE_CHECKING:
    from collections.abc import Callable


class StepSignals:
    """Collects the steps of all ranks and tells them to one listener.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.listener: Callable[[EngineSignals], None] | None = None
        """Called on the event loop, once per step. Must be quick and may not raise."""

    def logger_of(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """A stat logger of one rank, for ``AsyncLLM(stat_loggers=[…])``."""
        return _StepLogger(self, engine_index)

    def tell(self, rank: int, scheduler: Any, iteration: Any) -> None:
        """One step of a rank; ``scheduler`` and ``iteration`` are vLLM's (vllm/v1/metrics/stats.py)."""
        if self.listener is None or scheduler is None:
            return
        self.listener(
            EngineSignals(
                rank=rank,
                at_s=self._clock(),
                running=scheduler.num_running_reqs,
                waiting=scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs,
                kv_usage=scheduler.kv_cache_usage,
                prefill_tokens=iteration.prompt_token_stats.computed if iteration else 0,
                decode_tokens=iteration.num_generation_tokens if iteration else 0,
                preempted=iteration.num_preempted_reqs if iteration else 0,
            )
        )


class _StepLogger(StatLoggerBase):  # type: ignore[misc]
    def __init__(self, signals: StepSignals, rank: int) -> None:
        self._signals = signals
        self._rank = rank

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._signals.tell(self._rank, scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
