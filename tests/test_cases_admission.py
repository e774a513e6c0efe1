"""Cases from the field about admission, through the whole gateway over a scripted engine.

B01, B03, B04, B06, B13, B14, B16, B24, B35, B48, B50, and the admission's part of B10 and B27. What can be
shown on `Admission` alone is in ``admission/``; the parts that need a real engine are in ``real/``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from app.core.errors import Outcome
from app.core.facts import EngineSignals

from .support.asgi import eventually, settle
from .support.limited import LimitedStack, key_of, limited
from .support.stack import MODEL, chat

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from .support.asgi import Exchange

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
T = key_of("t")


def completion(**more: Any) -> dict[str, Any]:
    """A completion's body: a prompt of three tokens."""
    return {"model": MODEL, "prompt": [400, 401, 402], "max_tokens": 3, **more}


async def opened(stack: LimitedStack, held: AsyncExitStack, key: str = T, **more: Any) -> Exchange:
    """A request under way; the client leaves at the end of ``held``."""
    exchange = await held.enter_async_context(
        stack.request("POST", CHAT, key, json=chat(**({"stream": True} | more)))
    )
    await settle()
    return exchange


async def ask(
    stack: LimitedStack, body: dict[str, Any] | None = None, key: str = T, **options: Any
) -> Exchange:
    """The whole answer to a completion."""
    return await stack.fetch("POST", COMPLETIONS, key, json=body or completion(), **options)


async def in_flight(stack: LimitedStack) -> dict[str, float]:
    """The gauge, by tenant."""
    page = await stack.scrape()
    return {name[1]: value for name, value in page.items() if name[0] == "fairgate_in_flight"}


def error_of(answer: Exchange) -> dict[str, Any]:
    """The error in an answer."""
    error: dict[str, Any] = answer.json_content["error"]
    return error


# B01: slots of clients that leave


async def leaves_before_any_byte(stack: LimitedStack, exchange: Exchange) -> None:
    """The engine has not made a token."""


async def leaves_behind_the_headers(stack: LimitedStack, exchange: Exchange) -> None:
    """Between the headers and the first chunk: the write of the first is blocked."""
    exchange.stop_reading()
    stack.core.emit()
    await settle()


async def leaves_before_done(stack: LimitedStack, exchange: Exchange) -> None:
    """All content has come, the end has not."""
    stack.core.emit()
    await exchange.chunk()
    await settle()
    exchange.stop_reading()
    stack.core.emit(2, finish="length")
    await settle()


async def leaves_and_is_cancelled_twice(stack: LimitedStack, exchange: Exchange) -> None:
    """The server ends its task, and again while it cleans up."""
    stack.core.emit()
    await exchange.chunk()
    exchange.disappear()
    exchange.task.cancel()
    await asyncio.sleep(0)
    exchange.task.cancel()
    await asyncio.gather(exchange.task, return_exceptions=True)


LEAVINGS = [
    leaves_before_any_byte,
    leaves_behind_the_headers,
    leaves_before_done,
    leaves_and_is_cancelled_twice,
]


@pytest.mark.parametrize("leaves", LEAVINGS)
async def test_twenty_clients_that_leave_leak_no_slot(
    tmp_path: Path, leaves: Callable[[LimitedStack, Exchange], Awaitable[None]]
) -> None:
    """Wherever in the answer: then two may run at once again, and never was fewer than none (B01)."""
    async with limited(tmp_path, {"t": {"limits": {"max_concurrency": 2}}}) as stack:
        for _ in range(20):
            stack.core.automatic = False
            async with AsyncExitStack() as held:
                exchange = await opened(stack, held)
                assert stack.running() == {"t": 1}
                await leaves(stack, exchange)
                exchange.disappear()
                held.pop_all()  # its own way out would leave properly
                await asyncio.gather(exchange.task, return_exceptions=True)
            await settle()
            assert stack.running() == {}
            assert all(count >= 0 for count in (await in_flight(stack)).values())
        assert not stack.core.running
        async with AsyncExitStack() as held:
            two = [await opened(stack, held) for _ in range(2)]
            assert stack.running() == {"t": 2}
            for request in stack.core.running:
                stack.core.emit(3, finish="length", request=request)
            for exchange in two:
                await exchange.body()
                assert exchange.status == 200


# B03: what a stream holds


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_holds_its_slot_until_its_last_byte(tmp_path: Path, path: str) -> None:
    """The second waits, however long the first takes (B03)."""
    async with limited(tmp_path, {"t": {"limits": {"max_concurrency": 1}}}) as stack:
        stack.core.automatic = False
        body = {**(chat() if path == CHAT else completion()), "stream": True, "max_tokens": 50}
        async with (
            stack.request("POST", path, T, json=body) as first,
            stack.request("POST", path, T, json=body) as second,
        ):
            await settle()
            for _ in range(5):
                stack.core.emit()
                await first.chunk()
                assert (await in_flight(stack))["t"] == 1
                assert not second.has_begun
                assert len(stack.core.arrived) == 1
            stack.core.emit(finish="stop")
            await first.body()
            await settle()
            assert len(stack.core.arrived) == 2
            stack.core.emit(2, finish="stop")
            assert b"[DONE]" in await second.body()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_is_charged_its_exact_tokens_unasked(tmp_path: Path, path: str) -> None:
    """Nobody asked for ``include_usage``; the next request meets a bucket with all of it in (B03)."""
    async with limited(tmp_path, {"t": {"limits": {"tokens_per_minute": 300}}}) as stack:
        stack.core.automatic = False
        body = {**(chat() if path == CHAT else completion()), "stream": True, "max_tokens": 250}
        async with stack.request("POST", path, T, json=body) as exchange:
            await settle()
            prompt_tokens = len(stack.core.last.prompt_token_ids or ())
            stack.core.emit(230, finish="stop")
            await exchange.body()
        await settle()
        answer = await ask(stack, completion(max_tokens=100))
        assert answer.status == 429
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(300 - 230 - prompt_tokens)
        assert int(answer.headers["retry-after"]) >= 1
        assert stack.records[0].usage.prompt_tokens + stack.records[0].usage.completion_tokens == (
            230 + prompt_tokens
        )


# B04: bursts


@pytest.mark.parametrize(
    ("limits", "admitted", "sent"),
    [
        ({"tokens_per_minute": 100, "requests_per_minute": 100}, 1, 5),
        ({"requests_per_minute": 5}, 5, 50),
    ],
)
async def test_burst_in_one_tick_does_not_walk_through_a_limit(
    tmp_path: Path, limits: dict[str, int], admitted: int, sent: int
) -> None:
    """Checked and counted in one step (B04)."""
    async with limited(tmp_path, {"t": {"limits": limits}}) as stack:
        stack.core.automatic = False
        body = completion(prompt=list(range(400, 410)), max_tokens=60)
        answering = [asyncio.create_task(ask(stack, body)) for _ in range(sent)]
        await settle()
        assert len(stack.core.running) == admitted
        for request in stack.core.running:
            stack.core.emit(60, finish="length", request=request)
        statuses = [(await answer).status for answer in answering]
        assert statuses.count(200) == admitted
        assert statuses.count(429) == sent - admitted


# B06: every way to fail


class BrokenLedger:
    """An observer whose store is away."""

    def closed(self, record: object) -> None:
        """Fail."""
        raise RuntimeError("the ledger is away")


async def test_failures_one_after_the_other_leave_the_tenants_only_slot(tmp_path: Path) -> None:
    """Each behind the other, with one slot; another tenant's counters do not move (B06)."""
    tenants = {"t": {"limits": {"max_concurrency": 1, "max_queued": 0}}, "globex": {}}
    async with limited(tmp_path, tenants) as stack:
        as_json = [("Content-Type", "application/json")]

        async def normal() -> None:
            await settle()
            stack.core.automatic, stack.core.refuse = True, None
            assert stack.running() == {}
            assert (await ask(stack)).status == 200

        for content in (b'{"model": ', b"[]", b"\xff"):
            await stack.fetch("POST", CHAT, T, content=content, headers=as_json)
            await normal()
        bad = [chat(model="nobody's"), chat("word " * 600), chat(n=0), chat(messages=[{"role": 7}])]
        for body in bad:
            assert (await stack.fetch("POST", CHAT, T, json=body)).status in (400, 404)
            await normal()
        for stream in (False, True):
            stack.core.refuse = RuntimeError("raised at the call")
            assert (await stack.fetch("POST", CHAT, T, json=chat(stream=stream))).status == 500
            await normal()
            for tokens in (0, 3):
                stack.core.automatic = False
                async with stack.request("POST", CHAT, T, json=chat(stream=stream, max_tokens=9)) as failing:
                    await settle()
                    for _ in range(tokens):
                        stack.core.emit()
                        await settle()
                    stack.core.emit(0, finish="error")
                    await failing.ended()
                await normal()
            stack.core.automatic = False
            async with stack.request("POST", CHAT, T, json=chat(stream=stream)):
                await settle()  # the engine hangs, until the client gives up
            await normal()
        stack.app._observers = (BrokenLedger(), *stack.app._observers)
        assert (await ask(stack)).status == 200
        await normal()
        page = await stack.scrape()
        assert sum(value for name, value in page.items() if name[0] == "fairgate_requests_total") > 20
        assert not [
            name for name, value in page.items() if value and "globex" in name and name[0].endswith("_total")
        ]


# B13: refusals that clients can act on

REFUSED: dict[str, tuple[dict[str, int], str, str]] = {
    "rpm": ({"requests_per_minute": 2}, "requests_limit_exceeded", "2 requests a minute"),
    "tpm": ({"tokens_per_minute": 20}, "tokens_limit_exceeded", "20 tokens a minute"),
    "queue": ({"max_concurrency": 1, "max_queued": 2}, "queue_full", "it may have 2"),
    "concurrency": ({"max_concurrency": 1, "max_queued": 0}, "concurrency_limit_exceeded", "run 1 sequences"),
}


async def fill(stack: LimitedStack, limit: str, held: AsyncExitStack) -> None:
    """Bring the tenant to its limit. What is held ends with ``held``."""
    if limit in ("rpm", "tpm"):
        for _ in range(2):
            assert (await ask(stack, completion(max_tokens=7))).status == 200
        return
    stack.core.automatic = False
    for _ in range(3 if limit == "queue" else 1):
        await opened(stack, held)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", REFUSED)
async def test_refusal_is_a_429_that_says_what_and_when(tmp_path: Path, limit: str, stream: bool) -> None:
    """Status, code, the limit's number, whole seconds; of a stream too (B13)."""
    limits, code, words = REFUSED[limit]
    async with limited(tmp_path, {"t": {"limits": limits}}) as stack, AsyncExitStack() as held:
        await fill(stack, limit, held)
        answer = await ask(stack, completion(max_tokens=7, stream=stream))
        assert answer.status == 429
        assert answer.headers["content-type"] == "application/json"
        error = error_of(answer)
        assert (error["code"], error["type"]) == (code, "rate_limit_error")
        assert words in error["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert stack.records[-1].outcome is not None
        assert stack.records[-1].usage.prompt_tokens == 0


@pytest.mark.parametrize("limit", ["rpm", "tpm"])
async def test_retry_after_that_many_seconds_is_admitted_and_not_a_second_earlier(
    tmp_path: Path, limit: str
) -> None:
    """Nothing else running (B13)."""
    async with limited(tmp_path, {"t": {"limits": REFUSED[limit][0]}}) as stack, AsyncExitStack() as held:
        await fill(stack, limit, held)
        body = completion(max_tokens=7)
        wait_s = int((await ask(stack, body)).headers["retry-after"])
        await stack.pass_s(wait_s - 1)
        again = await ask(stack, body)
        assert (again.status, again.headers["retry-after"]) == (429, "1")
        await stack.pass_s(1)
        assert (await ask(stack, body)).status == 200


@pytest.mark.parametrize("limit", REFUSED)
async def test_openai_client_with_its_usual_retries_succeeds(tmp_path: Path, limit: str) -> None:
    """Without a line of its user's: it waits as told, and is admitted (B13)."""
    async with limited(tmp_path, {"t": {"limits": REFUSED[limit][0]}}) as stack:
        transport = httpx2.ASGITransport(stack.app)
        async with AsyncExitStack() as held:
            await fill(stack, limit, held)
            async with httpx2.AsyncClient(transport=transport) as http:
                client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=T, http_client=http)
                asking = asyncio.create_task(
                    client.completions.create(model=MODEL, prompt=[400, 401, 402], max_tokens=7)
                )
                await eventually(lambda: len(stack.records) > 0 and stack.records[-1].status == 429)
                await held.aclose()  # those before it end
                await settle()
                stack.core.automatic = True
                for _ in range(70):
                    await stack.pass_s(1)
                assert asking.done()
                assert (await asking).choices[0].finish_reason == "length"


async def test_request_that_can_never_fit_is_a_400(tmp_path: Path) -> None:
    """More than a whole minute's tokens: no loop of 429s (B13)."""
    async with limited(tmp_path, {"t": {"limits": {"tokens_per_minute": 50}}}) as stack:
        answer = await ask(stack, completion(max_tokens=60))
        assert answer.status == 400
        assert error_of(answer)["code"] == "tokens_limit_below_request"
        assert "50 tokens a minute" in error_of(answer)["message"]
        assert "retry-after" not in answer.headers
        assert stack.record.outcome is Outcome.TOO_LARGE
        assert answer.headers["x-ratelimit-remaining-tokens"] == "50"


# B14: reservations


async def left(stack: LimitedStack) -> int:
    """Tokens of the minute that are left, as the next refusal tells."""
    answer = await ask(stack, completion(max_tokens=0))
    assert answer.status == 400
    return int(answer.headers["x-ratelimit-remaining-tokens"])


async def test_reservations_become_what_was_used(tmp_path: Path) -> None:
    """Without a bound, with a high one, failed, as ids, as a list (B14 b, c, d, f)."""
    async with limited(tmp_path, {"t": {"limits": {"tokens_per_minute": 1000}}}) as stack:
        stack.core.automatic = False
        unbounded = completion()
        del unbounded["max_tokens"]
        for body in (unbounded | {"stream": True}, completion(max_tokens=400)):
            before = await left(stack)
            async with stack.request("POST", COMPLETIONS, T, json=body) as exchange:
                await settle()
                assert len(stack.core.running) == 1
                stack.core.emit(5, finish="stop")
                await exchange.body()
            await settle()
            assert await left(stack) == before - 8
        before = await left(stack)
        stack.core.refuse = RuntimeError("a fault")
        assert (await ask(stack)).status == 500
        assert await left(stack) == before - 3, "its prompt: vLLM had taken the request"
        before = await left(stack)
        stack.core.refuse, stack.core.automatic = None, True
        answer = await ask(stack, completion(prompt=["One two", "Three", "Four"], max_tokens=2))
        usage = answer.json_content["usage"]
        assert usage["completion_tokens"] == 6
        assert await left(stack) == before - usage["total_tokens"]
        stack.core.automatic = False
        before = await left(stack)
        async with stack.request("POST", COMPLETIONS, T, json=completion(max_tokens=100)):
            await settle()
            stack.core.emit(4)
            await settle()
        await settle()
        assert await left(stack) == before - 7, "a client that left pays for what was computed"


async def test_chat_without_a_bound_is_held_to_the_tenants_own(tmp_path: Path) -> None:
    """Most clients send no ``max_tokens``: a cap on the output is then their bound, not a 400 for ever."""
    async with limited(tmp_path, {"t": {"limits": {"max_output_tokens": 100}}}) as stack:
        body = chat()
        del body["max_tokens"]
        answer = await stack.fetch("POST", CHAT, T, json=body)
        assert answer.status == 200
        assert stack.core.last.sampling_params.max_tokens == 100


async def test_refusal_after_a_wait_shows_what_is_left_without_it(tmp_path: Path) -> None:
    """It was not charged in the end (B35, B48)."""
    async with limited(tmp_path, {"t": {"limits": ROOMY}}) as stack, AsyncExitStack() as held:
        answer = await by_queue_timeout(stack, held)
        assert answer.status == 429
        assert answer.headers["x-ratelimit-remaining-requests"] == "49"


async def test_list_of_prompts_is_one_request_with_one_turn(tmp_path: Path) -> None:
    """Charged once, admitted together, its slots given back with the last."""
    limits = {"requests_per_minute": 2, "max_concurrency": 8}
    async with limited(tmp_path, {"t": {"limits": limits}}) as stack:
        stack.core.automatic = False
        body = completion(prompt=[[400], [401, 402], [403, 404, 405]], n=2)
        async with stack.request("POST", COMPLETIONS, T, json=body) as exchange:
            await settle()
            assert stack.running() == {"t": 6}
            for request in stack.core.running:
                stack.core.emit(3, finish="length", request=request)
                await settle()
            answer = await exchange.json()
            assert len(answer["choices"]) == 6
            assert exchange.headers["x-ratelimit-remaining-requests"] == "1"
        await settle()
        assert stack.running() == {}
        stack.core.automatic = True
        assert (await ask(stack)).status == 200
        assert (await ask(stack)).status == 429


async def test_beam_search_is_one_request(tmp_path: Path) -> None:
    """A call of the engine for each beam and token: one request, one turn, all its tokens."""
    limits = {"requests_per_minute": 1, "tokens_per_minute": 1000, "max_concurrency": 1}
    async with limited(tmp_path, {"t": {"limits": limits}}) as stack:
        stack.core.automatic = False
        body = completion(use_beam_search=True, n=2, max_tokens=3, temperature=0)
        async with stack.request("POST", COMPLETIONS, T, json=body) as exchange:
            await settle()
            while not exchange.has_begun:
                assert 1 <= len(stack.core.running) <= 2
                for request in stack.core.running:
                    emit_with_candidates(stack, request)
                await settle()
            assert exchange.status == 200, exchange.content
        assert [len(request.prompt_token_ids or ()) for request in stack.core.arrived] == [3, 4, 4, 5, 5]
        answer = await ask(stack)
        assert (answer.status, error_of(answer)["code"]) == (429, "requests_limit_exceeded")
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - (3 + 4 + 4 + 5 + 5) - 5)


def emit_with_candidates(stack: LimitedStack, request: Any) -> None:
    """One token, and the others that it might have been."""
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists

    count = request.sampling_params.logprobs + 1
    logprobs = LogprobsLists(
        np.arange(500, 500 + count).reshape(1, count),
        -np.arange(1.0, 1.0 + count).reshape(1, count),
        np.ones(1, dtype=int),
    )
    output = EngineCoreOutput(
        request.request_id, [500], new_logprobs=logprobs, finish_reason=FinishReason.LENGTH
    )
    del stack.core._running[request.request_id]
    stack.core._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))


# B16: the right status class


async def test_queue_full_and_waited_too_long_differ(tmp_path: Path) -> None:
    """Both 429; one may come back soon, the other has waited its second already (B16)."""
    tenants = {"t": {"limits": {"max_concurrency": 1, "max_queued": 3}}}
    async with limited(tmp_path, tenants, ADMISSION__QUEUE_TIMEOUT_S="1") as stack, AsyncExitStack() as held:
        stack.core.automatic = False
        await opened(stack, held)
        waiting = [asyncio.create_task(ask(stack)) for _ in range(3)]
        await settle()
        full = await ask(stack)
        assert (full.status, error_of(full)["code"]) == (429, "queue_full")
        await stack.pass_s(0.9)
        assert stack.queued() == 3
        await stack.pass_s(0.15)
        for answering in waiting:
            answer = await answering
            assert (answer.status, error_of(answer)["code"]) == (429, "queue_timeout")
            assert int(answer.headers["retry-after"]) >= 1
        assert len(stack.core.arrived) == 1
        outcomes = [record.outcome for record in stack.records]
        assert outcomes == [Outcome.QUEUE_FULL] + [Outcome.QUEUE_TIMEOUT] * 3


async def test_two_hundred_that_wait_are_told_at_their_time(tmp_path: Path) -> None:
    """Within 100 ms of it; none reaches the engine afterwards (B16)."""
    tenants = {"t": {"limits": {"max_concurrency": 1}}}
    async with limited(tmp_path, tenants, ADMISSION__QUEUE_TIMEOUT_S="1") as stack, AsyncExitStack() as held:
        stack.core.automatic = False
        first = await opened(stack, held)
        waiting = [asyncio.create_task(ask(stack)) for _ in range(200)]
        await settle()
        await stack.pass_s(0.9)
        assert stack.queued() == 200
        await stack.pass_s(0.2)
        assert stack.queued() == 0
        assert {(await answering).status for answering in waiting} == {429}
        stack.core.emit(3, finish="length")
        await first.body()
        await settle()
        assert len(stack.core.arrived) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_the_queue_never_reaches_the_engine(tmp_path: Path, stream: bool) -> None:
    """Its place is given up at once; its outcome is cancelled; those behind it move up (B16)."""
    async with (
        limited(tmp_path, {"t": {"limits": {"max_concurrency": 1}}}) as stack,
        AsyncExitStack() as held,
    ):
        stack.core.automatic = False
        first = await opened(stack, held)
        leaving = await opened(stack, held, stream=stream)
        behind = await opened(stack, held)
        assert stack.queued() == 2
        leaving.leave()
        await leaving.ended()
        await settle()
        assert stack.queued() == 1
        assert not leaving.has_begun
        assert stack.records[-1].outcome is Outcome.CANCELLED
        stack.core.emit(3, finish="length")
        await first.body()
        await settle()
        assert len(stack.core.arrived) == 2
        stack.core.emit(3, finish="length")
        await behind.body()


@pytest.mark.parametrize(
    "fault", [RuntimeError("a fault"), ValueError("a ticket is not queued"), KeyError("x")]
)
@pytest.mark.parametrize("where", ["check", "enter"])
async def test_fault_of_admission_itself_is_a_500(tmp_path: Path, fault: Exception, where: str) -> None:
    """Whatever its type: never the client's mistake, never a 429; the next request is served (B16)."""
    async with limited(tmp_path, {"t": {"limits": {"requests_per_minute": 5}}}) as stack:
        admission = stack.gateway.admission
        assert admission is not None
        with pytest.MonkeyPatch.context() as patch:

            def broken(*args: object) -> None:
                raise fault

            patch.setattr(admission._turns, where, broken)
            for stream in (False, True):
                answer = await ask(stack, completion(stream=stream))
                assert answer.status == 500, answer.content
                assert "ticket" not in error_of(answer)["message"]
                assert stack.records[-1].outcome is Outcome.FAILED
        assert (await ask(stack)).headers["x-ratelimit-remaining-requests"] == "4"


# B10, B16: the end


@pytest.mark.parametrize("cause", ["drain", "dead engine"])
async def test_who_waits_at_the_end_is_told_at_once(tmp_path: Path, cause: str) -> None:
    """503 with a time; at a drain what runs may finish (B10)."""
    async with (
        limited(tmp_path, {"t": {"limits": {"max_concurrency": 1}}}) as stack,
        AsyncExitStack() as held,
    ):
        stack.core.automatic = False
        running = await opened(stack, held)
        stack.core.emit()
        await settle()
        queued = [await opened(stack, held, stream=stream) for stream in (True, False)]
        if cause == "drain":
            stack.gateway.health.drain()
        else:
            stack.core.die()
            stack.gateway.health.down("the engine has ended")
        stack.gateway._close_admission()
        for exchange in queued:
            await exchange.ended()
            assert exchange.status == 503
            assert int(exchange.headers["retry-after"]) >= 1
            assert exchange.headers["connection"] == "close"
        if cause == "drain":
            stack.core.emit(2, finish="length")
            assert b"[DONE]" in await running.body()
        else:
            assert b"[DONE]" not in await running.body()
        assert stack.app.in_flight == 0


# B24: usage in streams


def events(answer: Exchange) -> list[dict[str, Any]]:
    """The events of a stream, less its end."""
    lines = [line.removeprefix("data: ") for line in answer.content.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_comes_once_and_only_where_asked_for(
    tmp_path: Path, path: str, asked: dict[str, bool] | None
) -> None:
    """Last before the end and without choices; one finish reason; the same id in all (B24)."""
    async with limited(tmp_path, {"t": {}}) as stack:
        body = {**(chat() if path == CHAT else completion()), "stream": True}
        answer = await stack.fetch(
            "POST", path, T, json=body | ({} if asked is None else {"stream_options": asked})
        )
        told = events(answer)
        with_usage = [event for event in told if event.get("usage")]
        if asked == {"include_usage": True}:
            assert with_usage == told[-1:]
            assert told.pop()["choices"] == []
        else:
            assert with_usage == []
        assert all(len(event["choices"]) == 1 for event in told)
        assert [e["choices"][0]["finish_reason"] for e in told].count("length") == 1
        assert len({(event["id"], event["created"], event["model"]) for event in told}) == 1
        if path == CHAT:
            assert told[0]["choices"][0]["delta"]["role"] == "assistant"
        refused = await stack.fetch("POST", path, T, json={**body, "stream": False, "stream_options": {}})
        assert refused.status in (200, 400)  # an empty one asks for nothing
        asks = {"stream": False, "stream_options": {"include_usage": True}}
        assert (await stack.fetch("POST", path, T, json=body | asks)).status == 400


# B35: a refusal eats nothing else

ROOMY = {
    "requests_per_minute": 50,
    "tokens_per_minute": 5000,
    "max_queued": 2,
    "max_concurrency": 1,
    "max_prompt_tokens": 100,
}


async def by_auth(stack: LimitedStack, held: AsyncExitStack) -> Exchange:
    return await ask(stack, key="fg-nobody")


async def by_model(stack: LimitedStack, held: AsyncExitStack) -> Exchange:
    return await ask(stack, completion(model="another"))


async def by_validation(stack: LimitedStack, held: AsyncExitStack) -> Exchange:
    return await ask(stack, completion(temperature=-1))


async def by_a_late_validation(stack: LimitedStack, held: AsyncExitStack) -> Exchange:
    stack.core.refuse = ValueError("top_k is too large for this engine")
    answer = await ask(stack)
    stack.core.refuse = None
    return answer


async def by_size(stack: LimitedStack, held: AsyncExitStack) -> Exchange:
    return await ask(stack, completion(prompt=list(range(400, 501))))


async def by_deadline(stack: LimitedStack, held: AsyncExitStack) -> Exchange:
    return await ask(stack, headers=[("X-Request-Deadline", "soon")])


async def by_queue_full(stack: LimitedStack, held: AsyncExitStack) -> Exchange:
    stack.core.automatic = False
    for _ in range(3):
        await opened(stack, held)
    return await ask(stack)


async def by_queue_timeout(stack: LimitedStack, held: AsyncExitStack) -> Exchange:
    stack.core.automatic = False
    await opened(stack, held)
    answering = asyncio.create_task(ask(stack, headers=[("X-Request-Deadline", "1")]))
    await settle()
    await stack.pass_s(1)
    return await answering


REFUSALS: dict[str, tuple[int, Callable[[LimitedStack, AsyncExitStack], Awaitable[Exchange]]]] = {
    "auth": (401, by_auth),
    "model": (404, by_model),
    "validation": (400, by_validation),
    "late validation": (400, by_a_late_validation),
    "size": (400, by_size),
    "deadline": (400, by_deadline),
    "queue full": (429, by_queue_full),
    "queue timeout": (429, by_queue_timeout),
}


@pytest.mark.parametrize("cause", REFUSALS)
async def test_refusal_by_one_limit_eats_no_other(tmp_path: Path, cause: str) -> None:
    """All is there again when what ran has ended without a token (B35)."""
    status, refuse = REFUSALS[cause]
    async with limited(tmp_path, {"t": {"limits": ROOMY}}) as stack:
        async with AsyncExitStack() as held:
            answer = await refuse(stack, held)
            assert answer.status == status, answer.content
            running = stack.running()
        await settle()
        stack.core.automatic = True
        assert running in ({}, {"t": 1})
        await stack.pass_s(60)  # of a client that left, the prompt was computed
        headers = (await ask(stack)).headers
        assert headers["x-ratelimit-remaining-requests"] == "49"
        assert headers["x-ratelimit-remaining-tokens"] == str(5000 - 6)


async def test_refused_request_is_not_one_of_the_minutes(tmp_path: Path) -> None:
    """A runs, B is refused by concurrency, A ends, C is admitted and D is one too many (B35)."""
    limits = {"requests_per_minute": 2, "max_concurrency": 1, "max_queued": 0}
    async with limited(tmp_path, {"t": {"limits": limits}}) as stack, AsyncExitStack() as held:
        stack.core.automatic = False
        a = await opened(stack, held)
        b = await ask(stack)
        assert (b.status, error_of(b)["code"]) == (429, "concurrency_limit_exceeded")
        assert b.headers["x-ratelimit-remaining-requests"] == "1"
        stack.core.emit(3, finish="length")
        await a.body()
        stack.core.automatic = True
        c = await ask(stack)
        assert (c.status, c.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        d = await ask(stack)
        assert (d.status, error_of(d)["code"]) == (429, "requests_limit_exceeded")


# B48: headers


async def test_every_answer_tells_what_is_left(tmp_path: Path) -> None:
    """Stream, whole, 400, 429; falls by one for each that is admitted, never below none (B48)."""
    limits = {"requests_per_minute": 3, "tokens_per_minute": 600}
    async with limited(tmp_path, {"t": {"limits": limits}, "free": {}}) as stack:
        bodies = [completion(stream=True), completion(), chat(stream=True)]
        for body, status in (
            (completion(max_tokens="many"), 400),
            (completion(temperature=-1), 400),
            (completion(model="another"), 404),
            (completion(max_tokens=700), 400),
        ):
            answer = await ask(stack, body)
            assert answer.status == status, answer.content
            assert_told(answer, requests=3)
        for remaining, body in zip((2, 1, 0), bodies, strict=True):
            path = CHAT if "messages" in body else COMPLETIONS
            answer = await stack.fetch("POST", path, T, json=body)
            assert answer.status == 200
            assert_told(answer, requests=remaining)
        for stream in (False, True):
            answer = await ask(stack, completion(stream=stream))
            assert answer.status == 429
            assert_told(answer, requests=0)
            reset_s = int(answer.headers["x-ratelimit-reset-requests"].removesuffix("s"))
            assert 1 <= int(answer.headers["retry-after"]) <= reset_s
        answer = await ask(stack, key=key_of("free"))
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def assert_told(answer: Exchange, *, requests: int) -> None:
    """All six headers, well formed."""
    headers = answer.headers
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-limit-tokens"] == "600"
    assert headers["x-ratelimit-remaining-requests"] == str(requests)
    assert 0 <= int(headers["x-ratelimit-remaining-tokens"]) <= 600
    for kind in ("requests", "tokens"):
        assert headers[f"x-ratelimit-reset-{kind}"].removesuffix("s").isdigit()


async def test_tokens_left_show_the_reservation_when_a_stream_begins(tmp_path: Path) -> None:
    """The headers go out before it is known what it will use (B48)."""
    async with limited(tmp_path, {"t": {"limits": {"tokens_per_minute": 600}}}) as stack:
        answer = await ask(stack, completion(stream=True, max_tokens=50))
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(600 - 53)


# B50: replicas


async def test_replicas_without_a_store_share_the_limit_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes, told of each other: thirty requests in turns, ten admitted; the log says so (B50)."""
    tenants = {"t": {"limits": {"requests_per_minute": 10}}}
    statuses = []
    with caplog.at_level(logging.INFO):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            async with limited(tmp_path / name, tenants, ADMISSION__REPLICAS="2") as stack:
                statuses += [(await ask(stack)).status for _ in range(15)]
    assert statuses.count(200) == 10
    assert any("per replica" in line.getMessage() for line in caplog.records)


# Deadlines


@pytest.mark.parametrize("text", ["soon", "", "-1", "0", "nan", "inf", "1e9", "0x10"])
async def test_malformed_deadline_is_the_clients_mistake(tmp_path: Path, text: str) -> None:
    """400 with the header's name and what it may be."""
    async with limited(tmp_path, {"t": {}}) as stack:
        answer = await ask(stack, headers=[("X-Request-Deadline", text)])
        assert answer.status == 400
        assert error_of(answer)["param"] == "x-request-deadline"
        assert "seconds" in error_of(answer)["message"]
        assert stack.core.arrived == []


async def test_hopeless_deadline_is_refused_before_waiting(tmp_path: Path) -> None:
    """503 with a measured time; the same request without a deadline waits."""
    tenants: dict[str, dict[str, Any]] = {"t": {}, "light": {}}
    async with limited(tmp_path, tenants, ENGINE__MAX_NUM_SEQS="2") as stack, AsyncExitStack() as held:
        admission = stack.gateway.admission
        assert admission is not None
        stack.core.automatic = False
        for at_s in range(20):
            admission.on_signals(EngineSignals(0, 1000 + at_s / 10, 2, 0, 0.0, 0, 2, 0))
        for _ in range(12):
            await opened(stack, held, max_tokens=200)
        soon = [("X-Request-Deadline", "0.5")]
        answer = await ask(stack, headers=soon)
        assert (answer.status, error_of(answer)["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        light = await held.enter_async_context(
            stack.request("POST", COMPLETIONS, key_of("light"), json=completion(), headers=soon)
        )
        await settle()
        assert not light.has_begun, "within its share: it waits, whatever the others have queued"


async def test_queued_client_hears_its_place_if_it_asks(tmp_path: Path) -> None:
    """On its answer, streams included."""
    async with (
        limited(tmp_path, {"t": {"limits": {"max_concurrency": 1}}}) as stack,
        AsyncExitStack() as held,
    ):
        stack.core.automatic = False
        first = await opened(stack, held)
        ahead = await opened(stack, held)
        asks = [("X-Fairgate-Queue", "1")]
        second = await held.enter_async_context(
            stack.request("POST", CHAT, T, json=chat(stream=True), headers=asks)
        )
        await settle()
        await stack.pass_s(2.5)
        for exchange in (first, ahead, second):
            stack.core.emit(3, finish="length")
            await exchange.body()
            await settle()
        assert second.headers["x-fairgate-position"] == "1"
        assert second.headers["x-fairgate-wait"] == "2.500"
        assert "x-fairgate-position" not in ahead.headers


# B27: tenants that change


async def test_removed_tenants_queue_is_refused_and_its_running_request_ends(tmp_path: Path) -> None:
    """403 at once for who waits (B27)."""
    tenants = {"t": {"limits": {"max_concurrency": 1}}, "globex": {}}
    async with limited(tmp_path, tenants) as stack, AsyncExitStack() as held:
        stack.core.automatic = False
        running = await opened(stack, held)
        queued = [await opened(stack, held, stream=stream) for stream in (True, False)]
        await stack.reload(globex={})
        for exchange in queued:
            await exchange.ended()
            assert exchange.status == 403
            assert error_of(exchange)["code"] == "tenant_removed"
        stack.core.emit(3, finish="length")
        assert b"[DONE]" in await running.body()
        assert (await ask(stack)).status == 401


async def test_new_limits_hold_at_once(tmp_path: Path) -> None:
    """More concurrency lets the queue in; a lower rate is met by the next request (B27)."""
    tenants = {"t": {"limits": {"max_concurrency": 1, "requests_per_minute": 100}}}
    async with limited(tmp_path, tenants) as stack, AsyncExitStack() as held:
        stack.core.automatic = False
        for _ in range(4):
            await opened(stack, held)
        assert len(stack.core.arrived) == 1
        await stack.reload(t={"limits": {"max_concurrency": 3, "requests_per_minute": 4}})
        await settle()
        assert len(stack.core.arrived) == 3
        answer = await ask(stack)
        assert (answer.status, error_of(answer)["code"]) == (429, "requests_limit_exceeded")


async def test_request_closed_while_it_waits_never_reaches_the_engine(tmp_path: Path) -> None:
    """Its client is gone and its Record closed, though its task still waits for the turn."""
    async with limited(tmp_path, {"t": {"limits": {"max_concurrency": 1}}}) as stack:
        stack.core.automatic = False
        assert stack.gateway.admission is not None
        from app.core.record import Demand, Key, Principal, Record, current_record

        holder = Record("h", "POST", CHAT, 0.0, Principal(Key("k"), stack.gateway.tenants.book.tenants["t"]))
        share = await stack.gateway.admission.admit(holder, Demand(1, 1))
        record = Record("r", "POST", CHAT, 0.0, holder.principal)
        token = current_record.set(record)
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import SamplingParams

        async def generate() -> None:
            async for _ in stack.gateway._gate.generate(tokens_input([1, 2]), SamplingParams(), "x"):
                pass

        waiting = asyncio.create_task(generate())
        await settle()
        record.release()
        record.close(1.0, client_left=True)
        share.release()
        await settle()
        current_record.reset(token)
        assert stack.core.arrived == []
        assert stack.running() == {}
        with pytest.raises(Exception, match="background"):
            await waiting
