"""Case B24: the shape of a stream, and when it carries usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.gateway import MODEL, Stream, chat, chunks

if TYPE_CHECKING:
    from tests.support.gateway import Gateway

COMPLETION = {"model": MODEL, "prompt": "hello"}
ROUTES = pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", chat("hello")), ("/v1/completions", COMPLETION)],
    ids=["chat", "completions"],
)


def streamed(gateway: Gateway, path: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a complete stream."""
    with Stream(gateway, gateway.keys["acme"], path, body) as stream:
        assert stream.response.status_code == 200
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        return chunks(list(stream.events()))


@ROUTES
@pytest.mark.parametrize(
    "options",
    [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}],
    ids=["none", "null", "empty", "false"],
)
def test_no_usage_unless_asked_for(
    gateway: Gateway, path: str, body: dict[str, Any], options: dict[str, Any]
) -> None:
    """Clients index ``choices[0]`` in every chunk."""
    for chunk in streamed(gateway, path, {**body, **options, "max_tokens": 4}):
        assert chunk["choices"]
        assert chunk.get("usage") is None


@ROUTES
@pytest.mark.parametrize("ending", ["length", "stop"])
def test_usage_comes_once_and_last(gateway: Gateway, path: str, body: dict[str, Any], ending: str) -> None:
    """One chunk without choices, after everything else, however the text ended."""
    body = {**body, "max_tokens": 6, "temperature": 0}
    if ending == "stop":
        answer = streamed(gateway, path, body)
        token = answer[3]["choices"][0]
        body["stop"] = token["delta"]["content"] if "delta" in token else token["text"]
    *others, last = streamed(gateway, path, {**body, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert 1 <= last["usage"]["completion_tokens"] <= 6
    assert last["usage"]["total_tokens"] == (
        last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    )
    for chunk in others:
        assert chunk["choices"]
        assert chunk.get("usage") is None
    finish_reasons = [chunk["choices"][0]["finish_reason"] for chunk in others]
    assert [reason for reason in finish_reasons if reason] == [ending]


@ROUTES
def test_every_choice_finishes_once(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    """One id, one time, one model in all chunks; a role first, one finish reason for each choice."""
    answer = streamed(gateway, path, {**body, "max_tokens": 5, "n": 3})
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in answer}) == 1
    for index in range(3):
        choices = [choice for chunk in answer for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert choices[-1]["finish_reason"] == "length"
        if path.endswith("/chat/completions"):
            assert choices[0]["delta"]["role"] == "assistant"


@ROUTES
def test_stream_options_without_a_stream_are_refused(
    gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    """400, naming the field."""
    with gateway.http(gateway.keys["acme"]) as client:
        answer = client.post(path, json={**body, "stream_options": {"include_usage": True}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"
