"""Anthropic's official Python client on ``/v1/messages``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anthropic
import pytest

from tests.support.gateway import MODEL

if TYPE_CHECKING:
    from anthropic.types import MessageParam

    from tests.support.gateway import Gateway

HELLO: list[MessageParam] = [{"role": "user", "content": "hello"}]


def test_message(claude: anthropic.Anthropic) -> None:
    """The key comes in ``x-api-key``; the answer in blocks."""
    message = claude.messages.create(model=MODEL, max_tokens=6, messages=HELLO, system="Be brief.")
    assert message.role == "assistant"
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 6


def test_message_streamed(claude: anthropic.Anthropic) -> None:
    """The client's own accumulator makes a message of the events."""
    with claude.messages.stream(model=MODEL, max_tokens=6, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 6


def test_count_tokens_counts_what_a_message_is_charged(claude: anthropic.Anthropic) -> None:
    """The same template, the same number."""
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO)
    message = claude.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
    assert counted.input_tokens == message.usage.input_tokens > 0


def test_errors_have_anthropics_form(gateway: Gateway, claude: anthropic.Anthropic) -> None:
    """Its client finds its own classes."""
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="nope", max_tokens=1, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError) as invalid:
        claude.messages.create(model=MODEL, max_tokens=0, messages=HELLO)
    with (
        anthropic.Anthropic(base_url=gateway.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as unauthenticated,
    ):
        client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
    kinds = ("not_found_error", "invalid_request_error", "authentication_error")
    for caught, kind in zip((unknown, invalid, unauthenticated), kinds, strict=True):
        body = caught.value.body
        assert isinstance(body, dict)
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
        assert body["error"]["message"]
        assert body["request_id"] == caught.value.response.headers["x-request-id"]
