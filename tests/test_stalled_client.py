"""A client that does not read holds its slot for a bounded time, and no other client is cut for it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from app.core.errors import Outcome

from .support.asgi import settle
from .support.limited import LimitedStack, key_of, limited
from .support.stack import MODEL, chat

if TYPE_CHECKING:
    from pathlib import Path

    from .support.asgi import Exchange

STALL_S = 30.0
T = key_of("t")
TENANTS: dict[str, dict[str, Any]] = {"t": {"limits": {"max_concurrency": 1, "tokens_per_minute": 100_000}}}

STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(max_tokens=100),
    "/v1/completions": {"model": MODEL, "prompt": "Say", "max_tokens": 100},
    "/v1/responses": {"model": MODEL, "input": "Say", "max_output_tokens": 100, "store": False},
    "/v1/messages": chat(max_tokens=100),
}


async def look(stack: LimitedStack, seconds: float) -> None:
    """Time passes; the server looks four times a second, here once."""
    for _ in range(round(seconds)):
        stack.clock.advance(1)
        stack.gateway._gate.cut_stalled(STALL_S)
        await settle()


async def blocked(stack: LimitedStack, exchange: Exchange) -> None:
    """The client has read a token and reads no more; the engine goes on."""
    await settle()
    stack.core.emit()
    await exchange.chunk()
    exchange.stop_reading()
    stack.core.emit()
    await settle()
    stack.core.emit(5)
    await settle()


@pytest.mark.parametrize("path", STREAMS)
async def test_stream_that_is_not_read_is_cut(tmp_path: Path, path: str) -> None:
    """Not before its time; then its slot is back, the engine's request aborted, its outcome cancelled."""
    async with limited(tmp_path, TENANTS) as stack:
        stack.core.automatic = False
        body = {**STREAMS[path], "stream": True}
        async with AsyncExitStack() as held:
            exchange = await held.enter_async_context(stack.request("POST", path, T, json=body))
            await blocked(stack, exchange)
            waiting = await held.enter_async_context(stack.request("POST", path, T, json=body))
            await look(stack, STALL_S - 1)
            assert not exchange.task.done()
            assert stack.queued() == 1
            await look(stack, 3)
            assert exchange.task.done()
            assert exchange.task.exception() is None
            assert stack.core.aborted == ["fairgate-0"]
            assert stack.records[0].outcome is Outcome.CANCELLED
            assert stack.records[0].usage.completion_tokens == 7
            assert stack.queued() == 0
            assert stack.running() == {"t": 1}
            stack.core.emit(2, finish="stop")
            await waiting.body()
            assert waiting.status == 200


async def test_answer_that_the_engine_has_finished_is_cut_too(tmp_path: Path) -> None:
    """What is left lies in the gateway, unread."""
    async with limited(tmp_path, TENANTS) as stack:
        stack.core.automatic = False
        async with stack.request("POST", "/v1/chat/completions", T, json=chat(stream=True)) as exchange:
            await blocked(stack, exchange)
            stack.core.emit(2, finish="stop")
            await settle()
            await look(stack, STALL_S + 2)
            assert exchange.task.done()
        assert stack.core.aborted == []
        assert stack.record.outcome is Outcome.CANCELLED
        assert stack.running() == {}


async def test_slow_engine_is_no_stall(tmp_path: Path) -> None:
    """Nothing to read is not the client's doing: a minute for each token, and it ends well."""
    async with limited(tmp_path, TENANTS) as stack:
        stack.core.automatic = False
        body = chat(stream=True, max_tokens=9)
        async with stack.request("POST", "/v1/chat/completions", T, json=body) as exchange:
            await settle()
            await look(stack, 2 * STALL_S)
            for _ in range(3):
                stack.core.emit()
                await exchange.chunk()
                await settle()
                await look(stack, 2 * STALL_S)
            stack.core.emit(finish="stop")
            assert b"[DONE]" in await exchange.body()
        assert stack.record.outcome is Outcome.FINISHED


async def test_slow_reader_is_no_stall(tmp_path: Path) -> None:
    """Who takes a token now and then is served to the end, however far behind."""
    async with limited(tmp_path, TENANTS) as stack:
        stack.core.automatic = False
        body = chat(stream=True, max_tokens=20)
        async with stack.request("POST", "/v1/chat/completions", T, json=body) as exchange:
            await blocked(stack, exchange)
            for _ in range(4):
                await look(stack, STALL_S - 2)
                exchange._writable.set()
                await settle()
                exchange.stop_reading()
                stack.core.emit(2)
                await settle()
                stack.core.emit(2)
                await settle()
            exchange._writable.set()
            stack.core.emit(1, finish="stop")
            assert b"[DONE]" in await exchange.body()
        assert stack.record.outcome is Outcome.FINISHED


@pytest.mark.parametrize("path", STREAMS)
async def test_whole_answer_is_never_cut(tmp_path: Path, path: str) -> None:
    """It has nothing to read before its end."""
    async with limited(tmp_path, TENANTS) as stack:
        stack.core.automatic = False
        async with stack.request("POST", path, T, json=STREAMS[path]) as exchange:
            await settle()
            for _ in range(3):
                stack.core.emit()
                await settle()
                await look(stack, 2 * STALL_S)
            stack.core.emit(finish="stop")
            await exchange.body()
            assert exchange.status == 200
        assert stack.record.outcome is Outcome.FINISHED


async def test_one_of_several_sequences_that_has_ended_hides_no_stall(tmp_path: Path) -> None:
    """Its tokens are not told any more; the other's are unread."""
    async with limited(tmp_path, TENANTS) as stack:
        stack.core.automatic = False
        body = chat(stream=True, n=2, max_tokens=100)
        async with stack.request("POST", "/v1/chat/completions", T, json=body) as exchange:
            await settle()
            first, second = stack.core.running
            stack.core.emit(50, finish="stop", request=first)
            stack.core.emit(1, request=second)
            await settle()
            exchange.stop_reading()
            stack.core.emit(1, request=second)
            await settle()
            stack.core.emit(10, request=second)
            await settle()
            await look(stack, STALL_S + 2)
            assert exchange.task.done()
        assert stack.record.outcome is Outcome.CANCELLED
        assert stack.record.usage.completion_tokens == 62


async def test_list_of_prompts_that_is_not_read_is_cut_whole(tmp_path: Path) -> None:
    """All its generations end."""
    async with limited(tmp_path, TENANTS) as stack:
        stack.core.automatic = False
        body = {"model": MODEL, "prompt": ["One", "Two"], "max_tokens": 100, "stream": True}
        async with stack.request("POST", "/v1/completions", T, json=body) as exchange:
            await settle()
            for request in stack.core.running:
                stack.core.emit(request=request)
            await exchange.chunk()
            exchange.stop_reading()
            for _ in range(3):
                for request in stack.core.running:
                    stack.core.emit(2, request=request)
                await settle()
            await look(stack, STALL_S + 2)
            assert exchange.task.done()
        await settle()
        assert sorted(stack.core.aborted) == ["fairgate-0", "fairgate-1"]
        assert stack.record.outcome is Outcome.CANCELLED
        assert stack.running() == {}
