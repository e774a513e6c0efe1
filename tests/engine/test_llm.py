"""What a request had computed, asked of vLLM's own bookkeeping."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from ..support.asgi import settle

if TYPE_CHECKING:
    from ..support.stack import Stack


class Rig:
    """The engine of a stack, without its gate."""

    def __init__(self, stack: Stack) -> None:
        self.engine, self.core = stack.engine, stack.core
        self.core.automatic = False
        self.told: list[tuple[str, dict[int, int]]] = []
        self.engine.on_abort = lambda engine_id, counts: self.told.append((engine_id, counts))

    def start(self, engine_id: str, **params: Any) -> asyncio.Task[None]:
        """A request, taken to its end."""

        async def take() -> None:
            async for _ in self.engine.generate(tokens_input([1, 2]), SamplingParams(**params), engine_id):
                pass

        return asyncio.create_task(take())


@pytest.fixture
def rig(stack: Stack) -> Rig:
    """The rig over a ready stack."""
    return Rig(stack)


KINDS = pytest.mark.parametrize("kind", list(RequestOutputKind))


@KINDS
async def test_abort_tells_first_what_was_computed(rig: Rig, kind: RequestOutputKind) -> None:
    """Also of an answer that is only delivered whole."""
    running = rig.start("a", output_kind=kind)
    await settle()
    rig.core.emit(3)
    await settle()
    assert rig.engine.computed("a") == {0: 3}
    await rig.engine.abort("a")
    assert rig.told == [("a", {0: 3})]
    assert rig.engine.computed("a") == {}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@KINDS
async def test_sequences_are_told_one_by_one(rig: Rig, kind: RequestOutputKind) -> None:
    """The running ones, and a finished one whose output waits for its siblings."""
    running = rig.start("a", n=3, output_kind=kind)
    await settle()
    first, second, third = rig.core.running
    rig.core.emit(2, request=first, finish="stop")
    rig.core.emit(4, request=third)
    await settle()
    counts = rig.engine.computed("a")
    assert counts[2] == 4
    assert counts.get(1, 0) == 0
    assert counts.get(0, 2) == 2
    if kind is RequestOutputKind.FINAL_ONLY:
        assert counts[0] == 2, "nobody else has seen it yet"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    told = {index: tokens for _, counts in rig.told for index, tokens in counts.items()}
    assert told[2] == 4
    assert {second.request_id, third.request_id} == {r.request_id for r in rig.core.arrived[1:]}


async def test_requests_of_one_outer_id_are_told_together(rig: Rig) -> None:
    """vLLM aborts all that share an id; why the gate gives ids of its own."""
    tasks = [rig.start("same"), rig.start("same")]
    await settle()
    for request in rig.core.running:
        rig.core.emit(1, request=request)
    await settle()
    await rig.engine.abort(["same"])
    assert rig.told == [("same", {0: 1}), ("same", {0: 1})]
    assert rig.core.running == []
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_unknown_request_has_computed_nothing(rig: Rig) -> None:
    """It may have ended just now."""
    assert rig.engine.computed("gone") == {}
    await rig.engine.abort("gone")
    assert rig.told == []
