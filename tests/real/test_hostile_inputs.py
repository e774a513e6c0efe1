"""Case B07: one tenant's bad request is its own affair. The engine lives, and another's stream goes on."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.gateway import MODEL, Stream, chat, chunks, eventually

from .test_tenants import check_strict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.gateway import Gateway

VOCABULARY = 49_152
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HUGE = 2**70


def talk(**options: Any) -> tuple[str, str]:
    """A chat request, as text: JSON libraries refuse some of what clients send."""
    return CHAT, json.dumps(chat("hi", max_tokens=4) | options)


def complete(**options: Any) -> tuple[str, str]:
    """A completion request."""
    return COMPLETIONS, json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 4} | options)


def schema(shape: Any) -> dict[str, Any]:
    """A response format."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": shape}}


def grammar(text: str) -> tuple[str, str]:
    """A request bound by a grammar."""
    return talk(structured_outputs={"grammar": text})


REFUSED: dict[str, tuple[tuple[str, str], str]] = {
    "bias beyond the vocabulary": (talk(logit_bias={str(VOCABULARY + 10): 5}), "logit_bias"),
    "bias of no token": (talk(logit_bias={"abc": 1}), "logit_bias"),
    "token beyond the vocabulary": (complete(prompt=[VOCABULARY + 1]), "vocabulary"),
    "negative token": (complete(prompt=[-1]), "prompt"),
    "token beyond any integer": (complete(prompt=[HUGE]), "vocabulary"),
    "no tokens": (complete(prompt=[]), "prompt"),
    "no text": (complete(prompt=""), "prompt"),
    "a billion alternatives": (talk(logprobs=True, top_logprobs=10**9), "logprobs"),
    "negative logprobs": (complete(logprobs=-1), "logprobs"),
    "all prompt logprobs": (complete(prompt_logprobs=-1), "prompt_logprobs"),
    "stop token beyond the vocabulary": (talk(stop_token_ids=[10**9]), "stop_token_ids"),
    "stop token beyond any integer": (talk(stop_token_ids=[HUGE]), "stop_token_ids"),
    "allowed token beyond the vocabulary": (talk(allowed_token_ids=[10**9]), "allowed_token_ids"),
    "schema of an unknown type": (talk(response_format=schema({"type": "nonsense"})), "type"),
    "schema that refers to nothing": (talk(response_format=schema({"$ref": "#/nope"})), "nope"),
    "schema that is no object": (talk(response_format=schema("{broken")), "response_format"),
    "empty schema text": (talk(structured_outputs={"json": ""}), "structured_outputs.json"),
    "json_object false": (talk(structured_outputs={"json_object": False}), "json_object"),
    "broken regular expression": (talk(structured_outputs={"regex": "(["}), "regex"),
    "broken grammar": (grammar("root ::= ((("), "grammar"),
    "least above most tokens": (talk(min_tokens=10), "min_tokens"),
    "negative temperature": (talk(temperature=-1), "temperature"),
    "temperature NaN": (talk(temperature=float("nan")), "temperature"),
    "temperature infinite": (talk(temperature=float("inf")), "temperature"),
    "temperature 1e308": (talk(temperature=1e308), "temperature"),
    "seed beyond 64 bits": (talk(seed=HUGE), "seed"),
    "no tokens to make": (talk(max_tokens=0), "max_tokens"),
    "more tokens than fit": (talk(max_tokens=10**12), "max_tokens"),
    "no choices": (talk(n=0), "n must"),
    "a million choices": (talk(n=10**6), "n must"),
    "empty stop": (talk(stop=[""]), "stop"),
    "priority beyond 64 bits": (talk(priority=10**30), "priority"),
    "half a surrogate pair in a chat": (talk(messages=[{"role": "user", "content": "\ud800"}]), "Unicode"),
    "half a surrogate pair in a prompt": (complete(prompt="\ud800"), "Unicode"),
    "nested beyond reason": ((CHAT, "[" * 100_000), "body"),
}
"""What is sent, and what the message or the param must name."""

LEGAL: dict[str, tuple[str, str]] = {
    "a grammar before a broken one": grammar('root ::= "yes" | "no"'),
    "the largest seed": talk(seed=2**63 - 1),
    "a negative seed": talk(seed=-5),
    "a template's own arguments": talk(chat_template_kwargs={"anything": 1}),
    "somebody else's cache": talk(kv_transfer_params={"do_remote_prefill": True, "remote_host": "x"}),
    "another's request id": talk(request_id="fairgate-0"),
}


class Neighbour:
    """Umbrella, with a long stream always under way: when one is done, it is checked, and another begins."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._pool = ThreadPoolExecutor(1)
        self._begin()

    def _begin(self) -> None:
        body = chat("a long story", max_tokens=1500, ignore_eos=True, temperature=0)
        self._stream = Stream(self._gateway, self._gateway.keys["umbrella"], CHAT, body)
        self._first = self._stream.next_event()
        self._rest = self._pool.submit(lambda: list(self._stream.events()))

    def keep_going(self) -> None:
        """Called before each input, so that none comes without a stream beside it."""
        if self._rest.done():
            self.check()
            self._begin()

    def check(self) -> None:
        """Its stream comes to its own end, whole."""
        answer = chunks([self._first, *self._rest.result(timeout=120)])
        self._stream.close()
        assert answer[-1]["choices"][0]["finish_reason"] == "length"
        assert len(answer) > 500, "many chunks, even if a slow reader got several tokens in one"

    def close(self) -> None:
        """Leave, whatever has become of it."""
        self._stream.close()
        self._pool.shutdown()


@pytest.fixture
def neighbour(gateway: Gateway) -> Iterator[Neighbour]:
    """A stream of another tenant."""
    neighbour = Neighbour(gateway)
    yield neighbour
    neighbour.close()


def test_hostile_inputs_hurt_nobody_else(gateway: Gateway, neighbour: Neighbour) -> None:
    """All of them, one after the other, each beside a stream; the same engine afterwards."""
    core = gateway.engine_core()
    with gateway.http(gateway.keys["acme"], timeout=30) as client:
        headers = {"content-type": "application/json"}
        for name, ((path, body), named) in REFUSED.items():
            neighbour.keep_going()
            answer = client.post(path, content=body, headers=headers)
            error = check_strict(answer, 400)
            assert named in f"{error['message']} {error['param']}", name
            assert len(error["message"]) < 1000, name
        for name, (path, body) in LEGAL.items():
            neighbour.keep_going()
            answer = client.post(path, content=body, headers=headers)
            assert answer.status_code == 200, f"{name}: {answer.text}"
        neighbour.check()
        assert client.get("/readyz").status_code == 200
    assert gateway.engine_core() == core


def seeded(gateway: Gateway, prompt: list[int], salt: str) -> list[int]:
    """The tokens of a seeded answer to a prompt that no cache knows."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "seed": 7, "temperature": 1.0}
    with gateway.http(gateway.keys["acme"]) as client:
        answer = client.post(COMPLETIONS, json=body | {"cache_salt": salt, "return_token_ids": True})
    answer.raise_for_status()
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return list(answer.json()["choices"][0]["token_ids"])


def test_a_seeds_text_does_not_depend_on_how_its_prompt_was_split(gateway: Gateway) -> None:
    """Four steps alone; many uneven ones while others want the budget. It used to end the engine."""
    core = gateway.engine_core()
    words = random.Random(time.time())
    prompt = [words.randrange(100, 40_000) for _ in range(1000)]
    alone = seeded(gateway, prompt, "alone")
    assert len(set(alone)) > 12, "a sampled text"
    talk = chat("a long story", max_tokens=3000, ignore_eos=True)
    with ExitStack() as crowd, ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            crowd.enter_context(gateway.post_blind(gateway.keys["umbrella"], CHAT, talk))
        eventually(lambda: gateway.value("vllm:num_requests_running") == 5, 10)
        crowded = [pool.submit(seeded, gateway, prompt, f"crowd {i}") for i in range(3)]
        assert [answer.result(60) for answer in crowded] == [alone] * 3
        assert gateway.value("vllm:num_requests_running") >= 5, "the crowd was there all the while"
    assert gateway.engine_core() == core


def test_a_seeds_text_is_that_of_an_unsplit_prompt(gateway: Gateway) -> None:
    """A prompt within one step's budget, warm from the cache, and cold: one step, one step, one text."""
    words = random.Random(time.time())
    prompt = [words.randrange(100, 40_000) for _ in range(1000)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "seed": 7, "return_token_ids": True}
    texts, cached = [], []
    with gateway.http(gateway.keys["acme"]) as client:
        for _ in range(2):
            answer = client.post(COMPLETIONS, json=body).raise_for_status().json()
            texts.append(answer["choices"][0]["token_ids"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 896], "the second prefill was 104 tokens: one step"
    assert texts[0] == texts[1]
