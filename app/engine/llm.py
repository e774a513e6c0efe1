"""`CountedLLM`: vLLM's `AsyncLLM`, which also tells what an aborted request had computed.

vLLM counts a request when it finishes; a client that leaves moves none of its counters, and of an
answer that is not streamed nobody has seen a token yet. Made by ``launch.py``, heard by the gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class CountedLLM(AsyncLLM):  # type: ignore[misc]  # vLLM's types stay inside app/engine
    """Calls `on_abort` before a request's state is dropped."""

    on_abort: Callable[[str, dict[int, int]], None] | None = None
    """``(external request id, {sequence index: tokens computed})``."""

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """As vLLM's; what has been computed is told first."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if self.on_abort is not None:
            for state in self._states(ids, internal=internal):
                self.on_abort(state.external_req_id, _computed(state))
        await super().abort(ids, internal)

    def computed(self, external_id: str) -> dict[int, int]:
        """Tokens computed for a request that still runs, by sequence index."""
        counts: dict[int, int] = {}
        for state in self._states([external_id], internal=False):
            counts |= _computed(state)
        return counts

    def _states(self, ids: list[str], *, internal: bool) -> list[Any]:
        """The ids' ``RequestState`` objects (vllm/v1/engine/output_processor.py)."""
        processor = self.output_processor
        if not internal:
            ids = [inner for outer in ids for inner in processor.external_req_ids.get(outer, ())]
        # A parent's id (n > 1) stands for its children's.
        parents = processor.parent_requests
        ids = [inner for id_ in ids for inner in (parents[id_].child_requests if id_ in parents else (id_,))]
        return [processor.request_states[id_] for id_ in ids if id_ in processor.request_states]


def _computed(state: Any) -> dict[int, int]:
    """Tokens by sequence index: the live sequence's, and those of finished siblings not yet delivered."""
    counts = {state.request_index: 0}  # pooling makes none; that it is known here says something too
    if state.parent_req is not None:
        counts |= {
            i: len(done.token_ids) for i, done in enumerate(state.parent_req.output_aggregator) if done
        }
    if state.detokenizer is not None:
        counts[state.request_index] = state.detokenizer.num_output_tokens()
    return counts
