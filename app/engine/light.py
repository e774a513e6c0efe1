"""What vLLM's front end does for every token and nobody needs, taken off it.

Owns two changes, both measured with ``python -m loadtests overhead``, neither seen by a client. Called once
by ``routes.py``. A vLLM that has neither any more is served as it is.
"""

from __future__ import annotations

from vllm import envs
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)

_VALIDATOR = "__log_extra_fields__"
# Inner ones first: a model is built from those of its fields.
_STREAMED = (
    DeltaMessage,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)


def lighten() -> None:
    """Make both changes. Idempotent."""
    # Statistics read an environment variable for every output; vLLM caches them in its core and
    # its workers, and not in the front end. Nothing of ours changes one after this.
    envs.enable_envs_cache()
    for model in _STREAMED:
        _drop_request_validator(model)


def _drop_request_validator(model: type) -> None:
    """Streamed models inherit a validator that logs a *request's* unknown fields, in Python, per token."""
    validators = model.__pydantic_decorators__.model_validators  # type: ignore[attr-defined]
    if validators.pop(_VALIDATOR, None) is not None:
        model.model_rebuild(force=True)  # type: ignore[attr-defined]
