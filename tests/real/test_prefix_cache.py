"""Case B36: what one tenant has asked cannot be found out by another through the prefix cache."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.gateway import MODEL

if TYPE_CHECKING:
    from tests.support.gateway import Gateway

BLOCK = 128
"""Tokens in a KV block of the CPU engine."""


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> list[int]:
    """Five blocks and a bit that no other test has asked."""
    words = random.Random(f"{request.node.name} {time.time()}")
    return [words.randrange(100, 40_000) for _ in range(5 * BLOCK + 10)]


def cached(gateway: Gateway, tenant: str, prompt: list[int], **options: str) -> int:
    """How many of the prompt's tokens were found in the cache."""
    with gateway.http(gateway.keys[tenant]) as client:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **options}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_finds_its_own_prompts_only(gateway: Gateway, prompt: list[int]) -> None:
    """The second time is nearly free for acme, and tells umbrella nothing."""
    assert cached(gateway, "acme", prompt) == 0
    assert cached(gateway, "acme", prompt) == 5 * BLOCK
    assert cached(gateway, "umbrella", prompt) == 0
    assert cached(gateway, "umbrella", prompt) == 5 * BLOCK, "its own entries are its own"


def test_a_salt_of_the_clients_selects_nobody_elses_space(gateway: Gateway, prompt: list[int]) -> None:
    """Whatever umbrella guesses, it is looked up under umbrella's own secret."""
    assert cached(gateway, "acme", prompt) == 0
    assert cached(gateway, "acme", prompt, cache_salt="family") == 0, "a salt divides acme's own space"
    assert cached(gateway, "acme", prompt, cache_salt="family") == 5 * BLOCK
    for guess in ("acme", "tenant acme", "acme-key", "family", "shared", gateway.keys["acme"]):
        assert cached(gateway, "umbrella", prompt, cache_salt=guess) == 0, guess
    assert cached(gateway, "sharing-one", prompt, cache_salt="family") == 0


def test_tenants_that_share_find_each_others(gateway: Gateway, prompt: list[int]) -> None:
    """Isolation off by configuration, for those two alone."""
    assert cached(gateway, "acme", prompt) == 0
    assert cached(gateway, "sharing-one", prompt) == 0
    assert cached(gateway, "sharing-two", prompt) == 5 * BLOCK
    assert cached(gateway, "umbrella", prompt) == 0


def test_chat_reports_what_was_cached(gateway: Gateway, prompt: list[int]) -> None:
    """Also in the gateway's own counters, for the tenant."""
    text = " ".join(f"word{token}" for token in prompt[:200])
    before = gateway.value("fairgate_tokens_total", tenant="umbrella", kind="cached")
    found = []
    with gateway.http(gateway.keys["umbrella"]) as client:
        for _ in range(2):
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
            usage = client.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found[0] < BLOCK
    assert found[1] >= 4 * BLOCK
    assert gateway.value("fairgate_tokens_total", tenant="umbrella", kind="cached") - before == sum(found)
