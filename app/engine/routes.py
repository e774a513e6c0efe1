"""vLLM's own HTTP API, mounted on an application of ours.

Owns the few places where vLLM's serving layer must know of tenants: which models a tenant sees, and
that an error told inside a stream is noted on the Record. Called once by ``launch.py``, when the
engine has loaded. Which of the mounted routes are open is ``http/app.py``'s affair.
"""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.launchers.api_server import app_state
from vllm.entrypoints.launchers.api_server.routers import register_api_routers
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMClientError

from ..core.record import current_record
from .light import lighten
from .refusals import RefusedEarly, RefusedLate, clients_mistake, forbidden_model
from .wishes import priority_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from .gate import EngineGate

_MESSAGES_LOGGER = "vllm.entrypoints.anthropic.api_router"

_FAILED = "The server failed on this request. The request id identifies it in the server's log."


async def mount(app: Any, gate: EngineGate, args: Namespace, tasks: tuple[str, ...]) -> None:
    """Put vLLM's routers, error handlers and serving state on ``app`` (a FastAPI application)."""
    app.state.args = args
    # vLLM's handler for engine errors stops the server through this attribute. Ours decides by itself.
    app.state.server = _NoServer()
    with _root_logger_kept():
        register_api_routers(args, app, tasks, gate.model_config)
    init_exception_handler(app)
    app_state.OpenAIServingModels = TenantModels
    _note_stream_errors()
    GenerateBaseServing._get_priority = staticmethod(lambda request, raw_request: priority_of(request))
    logging.getLogger(_MESSAGES_LOGGER).addFilter(_is_our_fault)
    await app_state.init_app_state(gate, app.state, args, tasks)
    lighten()


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Undo what a library does to the root logger when it is imported.

    model_hosting_container_standards, which comes with vLLM's SageMaker routes, sets it and its handlers
    to ERROR: from then on nothing was logged of any request.
    """
    root = logging.getLogger()
    levels: list[tuple[logging.Logger | logging.Handler, int]] = [(root, root.level)]
    levels += [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


def _is_our_fault(line: logging.LogRecord) -> bool:
    """Drop the tracebacks that the messages route logs for every client's mistake and every refusal."""
    error = line.exc_info[1] if line.exc_info else None
    return not isinstance(error, (VLLMClientError, RefusedEarly, RefusedLate, ValueError))


class _NoServer:
    should_exit = False


class TenantModels(OpenAIServingModels):  # type: ignore[misc]
    """vLLM's list of models and adapters, as the tenant of the open Record may see it."""

    def is_base_model(self, model_name: str) -> bool:
        """As vLLM's, which asks it first for every name that a client sends.

        Raises:
            RefusedEarly: 403, where the name exists but the tenant's entry does not list it.
        """
        record = current_record.get()
        is_base = bool(super().is_base_model(model_name))
        if record is None or record.tenant is None or record.tenant.may_use(model_name):
            return is_base
        if is_base or model_name in self.lora_requests:
            raise RefusedEarly(record.reject(forbidden_model(model_name)))
        return False

    async def show_available_models(self) -> Any:
        """As vLLM's, less what the tenant may not use."""
        models = await super().show_available_models()
        record = current_record.get()
        if record is not None and record.tenant is not None:
            models.data = [card for card in models.data if record.tenant.may_use(card.id)]
        for card in models.data:
            card.root = card.id  # vLLM shows the path on this host
        return models


def _note_stream_errors() -> None:
    """Have an error that vLLM writes into a stream noted on the Record.

    Its stream handlers swallow the exception and go on to ``[DONE]`` under status 200. All of them
    write the event with this one method.
    """
    original = GenerateBaseServing.create_streaming_error_response
    if getattr(original, "_fairgate", False):
        return

    @functools.wraps(original)
    def create_streaming_error_response(self: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        record = current_record.get()
        if record is not None and record.rejection is None:
            record.fail(message if isinstance(message, Exception) else RuntimeError(str(message)))
        is_fault = isinstance(message, Exception) and clients_mistake(message) is None
        if is_fault and not isinstance(message, RefusedLate):
            message = RuntimeError(_FAILED)  # vLLM would tell the client the exception's own words
        return original(self, message, *args, **kwargs)

    create_streaming_error_response._fairgate = True  # type: ignore[attr-defined]
    GenerateBaseServing.create_streaming_error_response = create_streaming_error_response
