"""``GET /usage``: what a tenant is told of itself, and of nobody else."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from app.core.facts import EngineSignals

from .support.asgi import settle
from .support.limited import LimitedStack, key_of, limited
from .support.stack import ACME, OPERATOR, Stack, chat

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = {"requests_per_minute": 10, "tokens_per_minute": 6000, "max_concurrency": 1}
TENANTS: dict[str, dict[str, Any]] = {"acme": {"limits": LIMITS}, "globex": {}}


async def usage(stack: Stack, key: str = ACME) -> dict[str, Any]:
    """The page, strictly read."""
    answer = await stack.fetch("GET", "/usage", key)
    assert answer.status == 200, answer.content
    assert answer.headers["content-type"] == "application/json"

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    told: dict[str, Any] = json.loads(answer.content, parse_constant=no_constant)
    return told


async def busy(stack: LimitedStack, held: AsyncExitStack) -> None:
    """One of acme's runs, two wait."""
    stack.core.automatic = False
    for _ in range(3):
        await held.enter_async_context(
            stack.request("POST", "/v1/chat/completions", key_of("acme"), json=chat(stream=True))
        )
        await settle()


async def test_tenant_sees_its_limits_use_and_place(tmp_path: Path) -> None:
    """Running, queued, the next one's place, the expected wait, what is left of the minute."""
    async with limited(tmp_path, TENANTS) as stack, AsyncExitStack() as held:
        idle = await usage(stack)
        assert idle["requests_per_minute"] == {"limit": 10, "remaining": 10, "reset_s": 0}
        assert (idle["running"], idle["queued"], idle["position"]) == (0, 0, None)
        assert idle["limits"] == {**LIMITS, "burst_s": 60}
        await busy(stack, held)
        told = await usage(stack)
        assert told["tenant"] == "acme"
        assert (told["running"], told["queued"], told["position"]) == (1, 2, 0)
        assert told["requests_per_minute"] == {"limit": 10, "remaining": 7, "reset_s": 18}
        assert told["tokens_per_minute"]["limit"] == 6000
        assert told["tokens_per_minute"]["remaining"] < 6000
        assert told["estimated_wait_s"] is None


async def test_expected_wait_follows_the_measured_rate(tmp_path: Path) -> None:
    """Once the engine has shown what it can."""
    async with limited(tmp_path, TENANTS) as stack, AsyncExitStack() as held:
        admission = stack.gateway.admission
        assert admission is not None
        for step in range(10):
            admission.on_signals(EngineSignals(0, 1000 + step / 10, 1, 0, 0.0, 0, 1, 0))
        await busy(stack, held)
        wait_s = (await usage(stack))["estimated_wait_s"]
        assert isinstance(wait_s, float)
        assert wait_s >= 0


async def test_tenant_sees_nothing_of_others(tmp_path: Path) -> None:
    """Not even that they are there."""
    async with limited(tmp_path, TENANTS) as stack, AsyncExitStack() as held:
        await busy(stack, held)
        told = await usage(stack, key_of("globex"))
        assert told == {
            "tenant": "globex",
            "running": 0,
            "queued": 0,
            "position": None,
            "estimated_wait_s": None,
            "limits": {"burst_s": 60},
            "requests_per_minute": None,
            "tokens_per_minute": None,
        }


async def test_usage_is_for_tenants(tmp_path: Path) -> None:
    """An operator's key without a tenant has none; no key, none at all; nothing is counted for asking."""
    async with limited(tmp_path, TENANTS) as stack:
        assert (await stack.fetch("GET", "/usage", OPERATOR)).status == 403
        assert (await stack.fetch("GET", "/usage", None)).status == 401
        assert (await stack.fetch("POST", "/usage", key_of("acme"))).status == 405
        for _ in range(20):
            told = await usage(stack)
        assert told["requests_per_minute"]["remaining"] == 10


async def test_usage_of_a_loading_gateway_is_a_503_with_a_time(loading: Stack) -> None:
    """In our form, as any other route's."""
    answer = await loading.fetch("GET", "/usage", ACME)
    assert answer.status == 503
    assert answer.json_content["error"]["code"] == "loading"
    assert int(answer.headers["retry-after"]) >= 1


async def test_usage_answers_while_the_gateway_drains(tmp_path: Path) -> None:
    """Who has requests under way may still look."""
    async with limited(tmp_path, TENANTS) as stack, AsyncExitStack() as held:
        await busy(stack, held)
        stack.gateway.health.drain()
        stack.gateway._close_admission()
        await settle()
        told = await usage(stack)
        assert (told["running"], told["queued"]) == (1, 0)


async def test_usage_waits_for_nobody(tmp_path: Path) -> None:
    """Not behind the tenant's own queue, nor its rates."""
    tenants = {"acme": {"limits": {"requests_per_minute": 1, "max_concurrency": 1}}}
    async with limited(tmp_path, tenants) as stack:
        assert (await stack.fetch("POST", "/v1/chat/completions", json=chat())).status == 200
        assert (await stack.fetch("POST", "/v1/chat/completions", json=chat())).status == 429
        answering = asyncio.create_task(usage(stack))
        await settle()
        assert (await answering)["requests_per_minute"]["remaining"] == 0
