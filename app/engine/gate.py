"""`EngineGate`: the engine as vLLM's own routers see it, with a tenant behind every request.

Owns the passage into the engine. vLLM's handlers call `check_admission`, `generate` and `encode`;
everything else passes through to the engine untouched. Here a request states its `Demand`, waits
for its `Slot`, loses what a client may not set for itself, and has its tokens counted.

What always holds:

* Without an open Record there is no generation.
* The engine knows a request by an id of ours: ``abort`` ends every request that shares an id, and
  clients choose theirs.
* What is taken here (a slot, a running engine request) hangs on the Record before the next await,
  and is given back by the generator or by the edge, whichever ends first.
* A refusal is written on the Record before it is raised, and raised as one of vLLM's own error
  types, so that its handlers answer instead of logging a traceback.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from vllm.renderers.inputs.preprocess import extract_prompt_len
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from ..core.errors import Outcome, Rejected
from ..core.record import Demand, Record, Tenant, Usage, current_record
from .refusals import RefusedEarly, RefusedLate, clients_mistake, engine_down, forbidden_model
from .run import Run, Runs, ShareSeam
from .wishes import FLEX, capped, salted, strip

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator


_NO_BACKGROUND = "Nothing is generated in the background of a request."


class AdmissionSeam(Protocol):
    """What the gate asks of ``admission/``."""

    def check(self, record: Record, sequences: int) -> None:
        """Refuse early, before the prompt is rendered."""

    async def admit(self, record: Record, demand: Demand, *, flex: bool = False) -> ShareSeam:
        """Wait for the tenant's turn; ``flex`` asks for the batch class."""


class EngineGate:
    """vLLM's `EngineClient`, tenant by tenant; by ``__getattr__``, so that it survives upgrades.

    Args:
        engine: A `CountedLLM`, or a fake with the same `generate`, `encode`, `abort` and `computed`.
        admission: Hands out slots.
        served_names: Names of the base model.
        salt_secret: Keys the tenants' prefix-cache salts.
        ranks: Data-parallel ranks; with one, the engine is not told which.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        engine: Any,
        *,
        admission: AdmissionSeam,
        served_names: tuple[str, ...],
        salt_secret: bytes,
        clock: Callable[[], float],
        ranks: int = 1,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._served_names = served_names
        self._salt_secret = salt_secret
        self._ranks = ranks
        self._runs = Runs(engine, clock)

    def __repr__(self) -> str:
        return f"<EngineGate {len(self._runs)} running>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def errored(self) -> bool:
        """Always false: a dead engine is refused by `check_admission`, in our words and form.

        vLLM's handlers would raise `dead_error`, whose own handler ends the server.
        """
        return False

    def cut_stalled(self, limit_s: float) -> None:
        """End the requests whose clients have read nothing for so long."""
        for record in list(self._runs.stalled(limit_s)):
            if record.on_cut is not None:
                record.on_cut()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Called by vLLM's handlers before the prompt is rendered.

        Raises:
            RefusedEarly: Refused; the Record says why.
        """
        record = _open_record()
        try:
            if self._engine.errored:
                raise engine_down()
            with _ours():
                self._admission.check(record, n)
        except Rejected as rejection:
            raise RefusedEarly(record.reject(rejection)) from None

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        **rest: Any,
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's, for the tenant of the open Record.

        The arguments named above and not passed on as they came are not a client's to set.
        ``priority`` is what `wishes.priority_of` made of the request.

        Raises:
            RefusedLate: Refused; the Record says why.
            GenerationError: The engine failed.
        """
        record = _open_record()
        with self._answering(record):
            # 1. Who, and with what
            tenant = self._authorize(record, lora_request)
            prompt = salted(prompt, tenant, self._salt_secret)
            strip(sampling_params)
            # 2. How much, and whose turn
            demand = self._demand(prompt, sampling_params.max_tokens, sampling_params.n)
            if demand.max_new_tokens >= self._room_after(demand.prompt_tokens):
                # vLLM's handlers fill in the whole context where a client names no bound: the tenant's it is
                demand = capped(demand, record)
            sampling_params.max_tokens = demand.max_new_tokens
            run = await self._admitted(record, demand, flex=priority == FLEX)
            # 3. The engine's tokens, counted as they pass
            is_delta = sampling_params.output_kind is RequestOutputKind.DELTA
            counts = run.counts
            stream = self._engine.generate(
                prompt,
                sampling_params,
                run.id,
                lora_request=lora_request,
                priority=run.priority,
                data_parallel_rank=run.rank if self._ranks > 1 else None,
                **rest,
            )
            try:
                async for output in stream:
                    for sequence in output.outputs:
                        if is_delta:
                            counts[sequence.index] += len(sequence.token_ids)
                        else:
                            counts[sequence.index] = len(sequence.token_ids)
                        if sequence.finish_reason == "error":  # told before the answer can claim success
                            record.fail(RuntimeError("the engine gave the request up"))
                    if not run.has_output:
                        run.first_output(output)
                    yield output
                run.finish()
            finally:
                run.release()
                await stream.aclose()

    async def encode(
        self,
        prompt: Any,
        pooling_params: Any,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        **rest: Any,
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's, for the tenant of the open Record.

        Raises:
            RefusedLate: Refused; the Record says why.
            GenerationError: The engine failed.
        """
        record = _open_record()
        with self._answering(record):
            tenant = self._authorize(record, lora_request)
            prompt = salted(prompt, tenant, self._salt_secret)
            demand = self._demand(prompt, 0, 1)
            run = await self._admitted(record, demand)
            stream = self._engine.encode(
                prompt,
                pooling_params,
                run.id,
                lora_request=lora_request,
                trace_headers=trace_headers,
                priority=run.priority,
                **rest,
            )
            try:
                async for output in stream:
                    if not run.has_output:
                        run.first_output(output)
                    yield output
                run.finish()
            finally:
                run.release()
                await stream.aclose()

    async def _admitted(self, record: Record, demand: Demand, *, flex: bool = False) -> Run:
        """Wait for its turn; it is among those that run from then on."""
        with _ours():
            share = await self._admission.admit(record, demand, flex=flex)
        if record.outcome is not None:  # closed while it waited: nobody would give back what it takes
            share.settle(Usage(), finished=False)
            raise Rejected(Outcome.INVALID, _NO_BACKGROUND)
        return self._runs.start(record, share, demand)

    def _authorize(self, record: Record, lora_request: Any) -> Tenant:
        names = self._served_names if lora_request is None else (lora_request.lora_name,)
        record.model = names[0]
        tenant = record.tenant
        if tenant is None:
            raise Rejected(Outcome.FORBIDDEN, "This key belongs to no tenant; models answer to tenants.")
        if not any(tenant.may_use(name) for name in names):
            raise forbidden_model(names[0])
        return tenant

    def _demand(self, prompt: Any, max_new_tokens: int | None, sequences: int) -> Demand:
        prompt_tokens = int(extract_prompt_len(self._engine.model_config, prompt))
        if max_new_tokens is None:
            max_new_tokens = self._room_after(prompt_tokens)
        return Demand(prompt_tokens, max_new_tokens, sequences)

    def _room_after(self, prompt_tokens: int) -> int:
        """Tokens that the model's context leaves for an answer; at least 1."""
        return max(1, int(self._engine.model_config.max_model_len) - prompt_tokens)

    @contextmanager
    def _answering(self, record: Record) -> Iterator[None]:
        """The border: what goes wrong inside becomes a fact on the Record and one of vLLM's errors."""
        try:
            yield
        except Rejected as rejection:
            record.reject(rejection)
            if record.status is not None:  # a stream kept alive while it waited: its status is out
                record.fail(rejection)
            raise RefusedLate(rejection) from None
        except Exception as error:
            mapped = engine_down() if isinstance(error, EngineDeadError) else clients_mistake(error)
            if mapped is None or record.status is not None or record.first_token_s is not None:
                # Too late for a refusal, or none of the client's doing.
                record.fail(error)
                raise
            raise RefusedLate(record.reject(mapped)) from error


def _open_record() -> Record:
    record = current_record.get()
    if record is None or record.outcome is not None:
        raise RefusedEarly(Rejected(Outcome.INVALID, _NO_BACKGROUND))
    return record


@contextmanager
def _ours() -> Iterator[None]:
    """What goes wrong in admission is no mistake of the client's, though its type may say so."""
    try:
        yield
    except (ValueError, OverflowError) as fault:
        raise RuntimeError("admission has failed") from fault
