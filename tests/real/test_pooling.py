"""A model that makes vectors: embeddings and what vLLM builds on them, and none of the routes for text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.gateway import MODEL

from .conftest import openai_client
from .test_tenants import check_strict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.gateway import Gateway

WIDTH = 128
"""Numbers in a vector of the tiny model."""
QUERY, DOCUMENTS = "a query", ["a query", "something else"]


@pytest.fixture
def client(pooling: Gateway) -> Iterator[openai.OpenAI]:
    """OpenAI's client with acme's key."""
    with openai_client(pooling, "acme") as client:
        yield client


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of two vectors."""
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


def post(pooling: Gateway, path: str, body: dict[str, Any]) -> Any:
    """The answer to acme."""
    with pooling.http(pooling.keys["acme"]) as client:
        return client.post(path, json={"model": MODEL, **body}).raise_for_status().json()


@pytest.mark.parametrize("format", ["float", "base64"])
def test_embeddings(client: openai.OpenAI, format: Any) -> None:
    """One vector for each text; equal texts lie together."""
    answer = client.embeddings.create(model=MODEL, input=[*DOCUMENTS, QUERY], encoding_format=format)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens > 0
    if format == "float":
        same, other, query = (item.embedding for item in answer.data)
        assert len(query) == WIDTH
        assert cosine(query, same) == pytest.approx(1, abs=1e-4)
        assert cosine(query, other) < 0.999


def test_embeddings_of_token_ids(client: openai.OpenAI) -> None:
    """As LangChain sends them."""
    answer = client.embeddings.create(model=MODEL, input=[[1, 2, 3], [4, 5]])
    assert [len(item.embedding) for item in answer.data] == [WIDTH] * 2


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(pooling: Gateway, path: str) -> None:
    """The same text comes first."""
    answer = post(pooling, path, {"query": QUERY, "documents": DOCUMENTS[::-1]})
    assert [result["index"] for result in answer["results"]] == [1, 0]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores[0] == pytest.approx(1, abs=1e-3)
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(pooling: Gateway, path: str) -> None:
    """One number for each pair."""
    answer = post(pooling, path, {"text_1": QUERY, "text_2": DOCUMENTS})
    assert len(answer["data"]) == 2
    assert answer["data"][0]["score"] == pytest.approx(1, abs=1e-3)


def test_vectors_are_counted_as_prompt_tokens(pooling: Gateway, client: openai.OpenAI) -> None:
    """On the tenant, and nothing as made."""
    before = pooling.value("fairgate_tokens_total", tenant="acme", kind="prompt")
    answer = client.embeddings.create(model=MODEL, input=["three little words"] * 2)
    after = pooling.value("fairgate_tokens_total", tenant="acme", kind="prompt")
    assert after - before == answer.usage.prompt_tokens
    assert pooling.value("fairgate_tokens_total", tenant="acme", kind="completion") == 0


def test_errors_have_the_usual_form(pooling: Gateway, client: openai.OpenAI) -> None:
    """Too long, not allowed, wrong name, not text."""
    with pytest.raises(openai.BadRequestError) as too_long:
        client.embeddings.create(model=MODEL, input=[[5] * 2000])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="nope", input="x")
    assert unknown.value.code == "model_not_found"
    with openai_client(pooling, "outsider") as outsider, pytest.raises(openai.PermissionDeniedError):
        outsider.embeddings.create(model=MODEL, input="x")
    with pooling.http(pooling.keys["acme"]) as plain:
        check_strict(plain.post("/v1/embeddings", json={"model": MODEL, "input": {"a": 1}}), 400)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/classify", "/pooling"]
)
def test_routes_of_other_models_are_absent(pooling: Gateway, path: str) -> None:
    """This model neither speaks nor sorts; ``/pooling`` stands on no list."""
    with pooling.http(pooling.keys["acme"]) as client:
        check_strict(client.post(path, json={"model": MODEL, "input": "x"}), 404)
