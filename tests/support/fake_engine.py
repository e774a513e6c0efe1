"""vLLM's own `AsyncLLM` over an engine core that a test scripts.

Owns `FakeCore`, which stands where the client of the engine's process stands, and `FakeEngine`, the real
`CountedLLM` around it: rendering, validation, request ids, detokenizing, ``n``, output kinds, aborts and the
errors of a dead engine are vLLM's own code, in this process, without a thread. No weights are read.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from vllm.renderers import renderer_from_config
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, async_llm
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor as EngineExecutor
from vllm.v1.metrics.stats import PrefillStats

from app.engine.llm import CountedLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from app.engine.signals import StepSignals

TOKENS = (4093, 451, 1343, 253, 2160)
"""What the core says of itself, over and over: a few ordinary words of SmolLM2's tokenizer."""


class FakeCore:
    """The engine's process, by hand. By default it answers each request at once, to its ``max_tokens``."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.automatic = True
        """Whether requests are answered as they arrive; otherwise `emit` answers them."""
        self.tasks: tuple[str, ...] = ("generate",)
        self.cached_tokens = 0
        """Of each prompt, found in the prefix cache."""
        self.arrived: list[EngineCoreRequest] = []
        """Every request that has come, in order; one for each sequence."""
        self.aborted: list[str] = []
        """Ids of ours, once for each time that one was aborted while it ran."""
        self.refuse: BaseException | None = None
        """Raised at the next arrivals."""
        self._running: dict[str, EngineCoreRequest] = {}
        self._begun: set[str] = set()
        self._outputs: asyncio.Queue[EngineCoreOutputs | BaseException] = asyncio.Queue()

    # The test's side

    @property
    def running(self) -> list[EngineCoreRequest]:
        """Requests that have come and are neither finished nor aborted."""
        return list(self._running.values())

    @property
    def last(self) -> EngineCoreRequest:
        """The request that came last."""
        return self.arrived[-1]

    def emit(
        self,
        tokens: int | Iterable[int] = 1,
        *,
        finish: str | None = None,
        request: EngineCoreRequest | None = None,
        pooled: Any = None,
    ) -> None:
        """One step: new tokens of a request (by default the one that came last), and perhaps its end.

        Args:
            tokens: How many, or which.
            finish: ``stop``, ``length`` or ``error``.
            request: Whose.
            pooled: A pooling model's answer.
        """
        request = request or self.last
        assert request.request_id in self._running, "it has ended, or was aborted"
        ids = list(_words(tokens)) if isinstance(tokens, int) else list(tokens)
        output = EngineCoreOutput(request.request_id, ids, pooling_output=pooled)
        if request.request_id not in self._begun:
            self._begun.add(request.request_id)
            prompt_tokens = len(request.prompt_token_ids or ())
            output.prefill_stats = PrefillStats()
            output.prefill_stats.set(
                num_prompt_tokens=prompt_tokens,
                num_local_cached_tokens=self.cached_tokens,
                num_external_cached_tokens=0,
            )
        if finish is not None:
            output.finish_reason = FinishReason[finish.upper()]
            del self._running[request.request_id]
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))

    def die(self) -> None:
        """The engine's process ends: running requests fail, new ones are refused by vLLM."""
        self.resources.engine_dead = True
        self._running.clear()
        self._outputs.put_nowait(EngineDeadError())

    def break_down(self, fault: BaseException) -> None:
        """Something in vLLM's front end fails while it takes the next outputs."""
        self._running.clear()
        self._outputs.put_nowait(fault)

    # AsyncLLM's side (vllm/v1/engine/core_client.py)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """A request arrives."""
        if self.refuse is not None:
            raise self.refuse
        self.arrived.append(request)
        self._running[request.request_id] = request
        if not self.automatic:
            return
        params = request.sampling_params
        for index in range(most := params.max_tokens or 1):
            self.emit(finish="length" if index == most - 1 else None, request=request)

    async def abort_requests_async(self, ids: list[str]) -> None:
        """Requests end by the front end's wish."""
        for id_ in ids:
            request = self._running.pop(id_, None)
            if request is not None:
                self.aborted.append(request.external_req_id or id_)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next step's outputs."""
        output = await self._outputs.get()
        if isinstance(output, BaseException):
            raise output
        return output

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """What the model can do."""
        return self.tasks

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to end."""


class _Inline(Executor):
    """Runs what it is given at once: the renderer's thread pools, without threads."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class FakeEngine(CountedLLM):
    """`CountedLLM` over a `FakeCore`. Made inside the event loop of its test.

    Args:
        config: A real ``VllmConfig``.
        core: What computes.
        signals: Told of each step, as the server's are.
    """

    output_handler: asyncio.Task[None] | None

    def __init__(self, config: Any, core: FakeCore, signals: StepSignals) -> None:
        with (
            mock.patch.object(async_llm.EngineCoreClient, "make_async_mp_client", return_value=core),
            mock.patch.object(async_llm, "renderer_from_config", _renderer),
        ):
            super().__init__(
                config, EngineExecutor, log_stats=False, log_requests=False, stat_loggers=[signals.logger_of]
            )
        self.core = core

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to end; vLLM's would end the renderer, which the tests share."""

    async def close(self) -> None:
        """End its one task."""
        handler, self.output_handler = self.output_handler, None
        if handler is not None:
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)


def _renderer(config: Any) -> Any:
    """One renderer for all tests of a configuration: its copies of the tokenizer take most of a start."""
    if id(config) not in _renderers:
        renderer = renderer_from_config(config)
        renderer._executor.shutdown(wait=False)
        renderer._executor._inner = _Inline()
        _renderers[id(config)] = renderer
    return _renderers[id(config)]


_renderers: dict[int, Any] = {}


def _words(count: int) -> Iterable[int]:
    return (TOKENS[index % len(TOKENS)] for index in range(count))
