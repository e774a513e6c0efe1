"""Refusals at the border to vLLM: ours in its error types, its errors in our words.

vLLM's handlers answer these types without logging a traceback; the edge then writes the refusal that
stands on the Record. Called by the gate and by ``routes.py``.
"""

from __future__ import annotations

from http import HTTPStatus

from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.v1.engine.exceptions import EngineGenerateError

from ..core.errors import Outcome, Rejected

RETRY_DOWN_S = 30
"""Seconds after which a supervisor will have started the next process, by a guess."""


class RefusedEarly(GracefulHTTPError):  # type: ignore[misc]
    """A refusal raised before a response has begun."""

    def __init__(self, rejection: Rejected) -> None:
        super().__init__(rejection.message, HTTPStatus(rejection.status))


class RefusedLate(GenerationError):  # type: ignore[misc]
    """A refusal raised inside a response generator; vLLM logs no traceback for its kind."""

    def __init__(self, rejection: Rejected) -> None:
        super().__init__(rejection.message)
        self.status_code = HTTPStatus(rejection.status)


def forbidden_model(name: str) -> Rejected:
    """The refusal of a model that the tenant's entry does not list."""
    return Rejected(
        Outcome.FORBIDDEN,
        f"This key may not use the model {name!r}. /v1/models lists those that it may use.",
        code="model_not_allowed",
        param="model",
    )


def engine_down() -> Rejected:
    """The refusal once the engine is gone."""
    return Rejected(Outcome.ENGINE_DOWN, "The engine has ended.", retry_after_s=RETRY_DOWN_S)


def clients_mistake(error: Exception) -> Rejected | None:
    """The 400 for an input that vLLM refuses: its own client errors, and the plain ones of older checks."""
    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, GracefulHTTPError):
        return Rejected(Outcome.OVERLOADED, error.message, retry_after_s=1)
    if not isinstance(error, (VLLMClientError, ValueError, OverflowError)):
        return None
    # Not str(error): that adds the field and the value, which stand elsewhere in the answer
    message = sanitize_message(str(error.args[0] if error.args else error))
    code = "context_length_exceeded" if "maximum model length" in message else "invalid_request"
    return Rejected(Outcome.INVALID, message, code=code, param=getattr(error, "parameter", None))
