"""The official Python client against the real engine. Shapes, not texts: the model's words are random."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.gateway import ALIAS, MODEL
from tests.support.tiny_model import tiny_model

from .conftest import openai_client

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

    from tests.support.gateway import Gateway

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True},
}


@pytest.fixture(scope="session")
def terse() -> dict[str, int]:
    """A logit bias by which even random words come to an end: no white space, and the end where it may be."""
    text = (tiny_model() / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary: dict[str, int] = json.loads(text)["model"]["vocab"]
    # A token that closes one tool call may open the next, where the end could not be said in between.
    endless = [
        id for token, id in vocabulary.items() if set(token) <= set("ĠĊĉč") or token[:-1].startswith(">")
    ]
    return {**{str(id): -100 for id in endless}, str(vocabulary["<|im_end|>"]): 100}


def check_weather(text: str | None) -> None:
    """The text is JSON that fits `SCHEMA`."""
    answer = json.loads(text or "")
    assert answer.keys() == {"unit", "days"}
    assert answer["unit"] in {"celsius", "fahrenheit"}
    assert answer["days"] in range(1, 10)


def test_chat(acme: openai.OpenAI) -> None:
    """One answer, with its usage and its request id."""
    answer = acme.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
    (choice,) = answer.choices
    assert answer.model == MODEL
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer._request_id


def test_chat_with_several_choices_and_a_stop(acme: openai.OpenAI) -> None:
    """``n`` different choices; with the same seed the same words, up to a stop string that is left out."""
    whole = acme.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, seed=3, n=3)
    texts = [choice.message.content or "" for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    stop = texts[1][len(texts[1]) // 2 :][:4]
    cut = acme.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, seed=3, n=3, stop=stop)
    assert cut.choices[1].finish_reason == "stop"
    assert cut.choices[1].message.content == texts[1][: texts[1].index(stop)]


def test_stream_is_the_answer_in_parts(acme: openai.OpenAI) -> None:
    """The deltas of a greedy stream make up the greedy answer."""
    whole = acme.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0)
    stream = acme.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=12, temperature=0, stream=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (
        whole.choices[0].message.content
    )
    assert len(chunks) >= 12, "token by token, not in one piece"


def test_chat_logprobs(acme: openai.OpenAI) -> None:
    """As many as tokens, each with its alternatives, likeliest first."""
    answer = acme.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        ranked = [top.logprob for top in token.top_logprobs]
        assert len(ranked) == 3
        assert ranked == sorted(ranked, reverse=True)
        assert token.logprob == ranked[0] <= 0


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [("once", 1), (["once", "upon", "a"], 3), ([11, 22, 33], 1), ([[11, 22], [33]], 2)],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
def test_completions(acme: openai.OpenAI, prompt: Any, answers: int) -> None:
    """Each prompt of a list is answered; ``n`` multiplies."""
    answer = acme.completions.create(model=MODEL, prompt=prompt, max_tokens=3, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * answers))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * answers


def test_completions_echo_and_logprobs(acme: openai.OpenAI) -> None:
    """The prompt comes back, with its own probabilities; its first token has none."""
    answer = acme.completions.create(
        model=MODEL, prompt="once upon a time", max_tokens=2, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text.startswith("once upon a time")
    assert choice.logprobs is not None
    tokens, values = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    assert answer.usage is not None
    assert len(tokens) == len(values) == answer.usage.total_tokens
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_forced(acme: openai.OpenAI, terse: dict[str, int], choice: Any) -> None:
    """Even random words become a call that fits its parameters."""
    answer = acme.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice=choice, max_tokens=100, logit_bias=terse
    )
    calls = answer.choices[0].message.tool_calls or []
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        check_weather(call.function.arguments)


def test_tools_streamed(acme: openai.OpenAI, terse: dict[str, int]) -> None:
    """The arguments come in parts that make up the whole."""
    stream = acme.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=100,
        logit_bias=terse,
        stream=True,
    )
    parts = [part for chunk in stream for part in chunk.choices[0].delta.tool_calls or []]
    functions = [part.function for part in parts if part.function is not None]
    assert [function.name for function in functions if function.name] == ["get_weather"]
    check_weather("".join(function.arguments or "" for function in functions))


def test_json_schema(acme: openai.OpenAI, terse: dict[str, int]) -> None:
    """Random words, and yet JSON that validates."""
    answer = acme.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=100,
        logit_bias=terse,
        response_format={"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}},
    )
    assert answer.choices[0].finish_reason == "stop"
    check_weather(answer.choices[0].message.content)


def test_responses(acme: openai.OpenAI) -> None:
    """The responses API, at once."""
    answer = acme.responses.create(model=MODEL, input="hello", max_output_tokens=6)
    assert answer.status == "incomplete"
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6


def test_responses_streamed(acme: openai.OpenAI) -> None:
    """The responses API, event by event, in their own order."""
    events = list(acme.responses.create(model=MODEL, input="hello", max_output_tokens=6, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    assert "response.output_text.delta" in kinds
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("option", ["background", "store"])
def test_responses_are_not_kept(gateway: Gateway, acme: openai.OpenAI, option: str) -> None:
    """Nothing is generated behind a request's back, and nothing can be asked for later."""
    if option == "background":
        with pytest.raises(openai.BadRequestError) as refused:
            acme.responses.create(model=MODEL, input="hello", max_output_tokens=2, background=True)
        assert refused.value.param == "background"
        return
    answer = acme.responses.create(model=MODEL, input="hello", max_output_tokens=2, store=True)
    with pytest.raises(openai.NotFoundError):
        acme.responses.retrieve(answer.id)


def test_models_are_those_of_the_tenant(gateway: Gateway, acme: openai.OpenAI) -> None:
    """A list for each tenant; an operator sees all."""
    assert [model.id for model in acme.models.list()] == [MODEL, ALIAS]
    seen = {}
    for tenant in ("narrow", "outsider", "operator"):
        with openai_client(gateway, tenant) as client:
            seen[tenant] = [model.id for model in client.models.list()]
    assert seen == {"narrow": [ALIAS], "outsider": [], "operator": [MODEL, ALIAS]}


def test_tokenize_and_detokenize(acme: openai.OpenAI, gateway: Gateway) -> None:
    """There and back; a chat is tokenized with its template."""
    with gateway.http(gateway.keys["acme"]) as client:
        tokens = client.post("/tokenize", json={"model": MODEL, "prompt": "hello world"}).json()
        assert tokens["count"] == len(tokens["tokens"]) == 2
        back = client.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]}).json()
        assert back["prompt"] == "hello world"
        asked = client.post("/tokenize", json={"model": MODEL, "messages": HELLO}).json()
    answer = acme.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert answer.usage is not None
    assert asked["count"] == answer.usage.prompt_tokens


def test_errors_speak_the_clients_language(gateway: Gateway, acme: openai.OpenAI) -> None:
    """The client's own classes, with message, code and param."""
    with pytest.raises(openai.BadRequestError) as invalid:
        acme.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, temperature=-1)
    assert (invalid.value.param, invalid.value.code) == ("temperature", "invalid_request")
    assert "temperature" in invalid.value.message

    with pytest.raises(openai.BadRequestError) as too_long:
        acme.completions.create(model=MODEL, prompt=[5] * 5000, max_tokens=4)
    assert too_long.value.code == "context_length_exceeded"

    with pytest.raises(openai.NotFoundError) as unknown:
        acme.chat.completions.create(model="nope", messages=HELLO)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")

    with openai_client(gateway, "narrow") as client, pytest.raises(openai.PermissionDeniedError) as forbidden:
        client.chat.completions.create(model=MODEL, messages=HELLO)
    assert (forbidden.value.param, forbidden.value.code) == ("model", "model_not_allowed")

    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as unknown_key,
    ):
        client.models.list()
    assert unknown_key.value.code == "invalid_api_key"
    for caught in (invalid, too_long, unknown, forbidden, unknown_key):
        assert caught.value.request_id


@pytest.mark.parametrize(
    "path",
    [
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/embeddings",
        "/rerank",
        "/score",
        "/classify",
    ],
)
def test_routes_of_other_models_are_absent(gateway: Gateway, path: str) -> None:
    """What this model cannot do is not there."""
    with gateway.http(gateway.keys["acme"]) as client:
        answer = client.post(path, json={"model": MODEL, "input": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
