"""What is taken off vLLM's streamed models changes nothing that a client sees."""

from __future__ import annotations

import pytest
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)

from app.engine import light

STREAMED = [
    DeltaMessage,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
]


def outermost(model: type) -> str:
    """What validates a model first: itself, or a function around it."""
    schema = model.__pydantic_core_schema__  # type: ignore[attr-defined]
    while schema["type"] == "definitions":
        schema = schema["schema"]
    return str(schema["type"])


def chunk() -> ChatCompletionStreamResponse:
    """A chunk with everything in it, a field that vLLM does not know included."""
    delta = DeltaMessage.model_validate({"role": "assistant", "content": "é", "unknown": [1]})
    choice = ChatCompletionResponseStreamChoice(index=0, delta=delta, finish_reason="stop", more="kept")
    return ChatCompletionStreamResponse(id="c", created=1, model="m", choices=[choice])


def test_chunk_is_written_as_before() -> None:
    """The same JSON from the classes as vLLM makes them and as we leave them; unknown fields stay."""
    before = chunk().model_dump_json(exclude_unset=True)
    light.lighten()
    assert chunk().model_dump_json(exclude_unset=True) == before
    assert '"unknown":[1]' in before
    assert '"more":"kept"' in before


@pytest.mark.parametrize("model", STREAMED)
def test_streamed_model_runs_no_python_per_token(model: type) -> None:
    """The wrapper that logs a request's unknown fields is gone from the compiled schema too."""
    light.lighten()
    assert outermost(model) == "model"


def test_request_keeps_its_checks() -> None:
    """Only streamed answers are touched: a request still warns of fields that vLLM has removed."""
    light.lighten()
    assert "__log_extra_fields__" in ChatCompletionRequest.__pydantic_decorators__.model_validators
