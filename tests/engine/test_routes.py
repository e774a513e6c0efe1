"""vLLM's routers as we mount them: every family answers, in the form that its clients expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from app.core.errors import Outcome

from ..support.asgi import settle
from ..support.stack import MODEL, chat

if TYPE_CHECKING:
    from ..support.stack import Stack


async def test_tokenizer_routes_ask_nothing_of_the_engine(stack: Stack) -> None:
    """Text to tokens and back, and counting in Anthropic's form."""
    answer = await stack.fetch("POST", "/tokenize", json={"model": MODEL, "prompt": "Say something."})
    tokens = answer.json_content["tokens"]
    assert answer.json_content["count"] == len(tokens)
    answer = await stack.fetch("POST", "/detokenize", json={"model": MODEL, "tokens": tokens})
    assert answer.json_content["prompt"] == "Say something."
    answer = await stack.fetch("POST", "/v1/messages/count_tokens", json=chat())
    assert answer.json_content["input_tokens"] > len(tokens)
    assert stack.core.arrived == []


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/chat/completions", chat(stream=True), b"data: [DONE]\n\n"),
        (
            "/v1/completions",
            {"model": MODEL, "prompt": "Say", "max_tokens": 3, "stream": True},
            b"data: [DONE]\n\n",
        ),
        ("/v1/messages", chat(stream=True), b'data: {"type":"message_stop"}\n\n'),
        (
            "/v1/responses",
            {"model": MODEL, "input": "Say", "max_output_tokens": 3, "stream": True, "store": False},
            b"",
        ),
    ],
)
async def test_stream_comes_piece_by_piece_to_its_end(
    stack: Stack, path: str, body: dict[str, Any], last: bytes
) -> None:
    """Each token when it is there, none before, and the family's own last word."""
    stack.core.automatic = False
    async with stack.request("POST", path, json=body) as exchange:
        await settle()
        assert not exchange.has_begun
        seen = 0
        for index in range(3):
            stack.core.emit(finish="length" if index == 2 else None)
            await settle()
            assert len(exchange.content) > seen
            seen = len(exchange.content)
        await exchange.body()
    assert exchange.status == 200
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert exchange.content.endswith(last)
    if path == "/v1/responses":
        assert b"event: response.completed" in exchange.content.split(b"\n\n")[-2]


async def test_route_that_this_model_has_not_is_no_route(stack: Stack) -> None:
    """Embeddings of a model that generates, audio of one that cannot hear: absent, and said so."""
    for path in ("/v1/embeddings", "/v1/audio/transcriptions", "/rerank", "/score", "/classify"):
        answer = await stack.fetch("POST", path, json={"model": MODEL, "input": "x"})
        assert answer.status == 404, (path, answer.content)


async def test_handler_that_would_stop_the_server_stops_nothing(stack: Stack) -> None:
    """vLLM's handler for a dead engine sets a flag on the server that it finds; ours decides by itself."""
    stack.core.die()
    await settle()
    assert (await stack.fetch("POST", "/v1/chat/completions", json=chat())).status == 503
    assert (await stack.fetch("GET", "/v1/models")).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_handlers_own_fault_in_a_stream_is_noted_on_the_record(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """vLLM's stream handlers swallow it, tell it as an event and go on to ``[DONE]``; the Record knows."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

    def broken(*args: object, **kwargs: object) -> str:
        raise RuntimeError("cannot be written")

    stack.core.automatic = False
    body = {**chat(stream=True), "prompt": "Say"}
    async with stack.request("POST", path, json=body) as exchange:
        await settle()
        stack.core.emit()
        await exchange.chunk()
        await settle()
        for response in (ChatCompletionStreamResponse, CompletionStreamResponse):
            monkeypatch.setattr(response, "model_dump_json", broken)
        stack.core.emit()
        await exchange.body()
    assert b"[DONE]" not in exchange.content
    assert b"error" in exchange.content
    assert b"cannot be written" not in exchange.content
    assert stack.record.outcome is Outcome.FAILED
    await settle()
    assert stack.core.aborted == ["fairgate-0"]
