"""Every way in which a request can end, through the whole gateway (B01, B02, B06, B16, B30)."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from vllm.exceptions import VLLMValidationError

from app.core.errors import STATUS, Outcome

from .support.asgi import settle
from .support.stack import ACME, GLOBEX, MODEL, NARROW, OPERATOR, Stack, chat

if TYPE_CHECKING:
    from .support.asgi import Exchange

LATER = {
    Outcome.RATE_LIMITED,
    Outcome.TOKENS_LIMITED,
    Outcome.DAY_LIMITED,
    Outcome.CONCURRENCY_LIMITED,
    Outcome.QUEUE_FULL,
    Outcome.QUEUE_TIMEOUT,
    Outcome.OVERLOADED,
    Outcome.TOO_LARGE,
}
"""Endings that admission brings; it passes all, at present. Each leaves this list with its test."""

STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(stream=True, max_tokens=5),
    "/v1/completions": {"model": MODEL, "prompt": "Say", "max_tokens": 5, "stream": True},
    "/v1/responses": {
        "model": MODEL,
        "input": "Say",
        "max_output_tokens": 5,
        "stream": True,
        "store": False,
    },
    "/v1/messages": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say"}],
        "max_tokens": 5,
        "stream": True,
    },
}
streams = pytest.mark.parametrize("path", STREAMS)


def whole(path: str) -> dict[str, Any]:
    """The same request, not streamed."""
    return {**STREAMS[path], "stream": False}


async def assert_serves(stack: Stack) -> None:
    """The next request of the same tenant is served at once, and nothing is held."""
    await settle()
    assert stack.app.in_flight == 0
    assert stack.running() == {}
    assert not stack.core.running
    stack.core.automatic, stack.core.refuse = True, None
    answer = await stack.fetch("POST", "/v1/chat/completions", json=chat())
    assert answer.status == 200, answer.content
    assert stack.records[-1].outcome is Outcome.FINISHED


async def ends_finished(stack: Stack) -> None:
    await stack.fetch("POST", "/v1/chat/completions", json=chat())


async def ends_cancelled(stack: Stack) -> None:
    stack.core.automatic = False
    async with stack.request("POST", "/v1/chat/completions", json=chat()):
        await settle()


async def ends_failed(stack: Stack) -> None:
    stack.core.refuse = RuntimeError("a fault")
    await stack.fetch("POST", "/v1/chat/completions", json=chat())


async def ends_invalid(stack: Stack) -> None:
    await stack.fetch(
        "POST", "/v1/chat/completions", content=b"{", headers=[("Content-Type", "application/json")]
    )


async def ends_unauthenticated(stack: Stack) -> None:
    await stack.fetch("POST", "/v1/chat/completions", None, json=chat())


async def ends_forbidden(stack: Stack) -> None:
    await stack.fetch("POST", "/v1/chat/completions", NARROW, json=chat())


async def ends_draining(stack: Stack) -> None:
    stack.gateway.health.drain()
    await stack.fetch("POST", "/v1/chat/completions", json=chat())


async def ends_engine_down(stack: Stack) -> None:
    stack.core.die()
    await settle()
    await stack.fetch("POST", "/v1/chat/completions", json=chat())


async def ends_loading(stack: Stack) -> None:
    stack.gateway.health.__init__()  # type: ignore[misc]
    await stack.fetch("POST", "/v1/chat/completions", json=chat())


ENDINGS = {
    Outcome.FINISHED: ends_finished,
    Outcome.CANCELLED: ends_cancelled,
    Outcome.FAILED: ends_failed,
    Outcome.INVALID: ends_invalid,
    Outcome.UNAUTHENTICATED: ends_unauthenticated,
    Outcome.FORBIDDEN: ends_forbidden,
    Outcome.DRAINING: ends_draining,
    Outcome.ENGINE_DOWN: ends_engine_down,
    Outcome.LOADING: ends_loading,
}


def test_every_outcome_has_its_test() -> None:
    """A new ending comes with a test, or stands among those of later."""
    assert set(ENDINGS) | LATER == set(Outcome)
    assert not set(ENDINGS) & LATER


@pytest.mark.parametrize("outcome", ENDINGS)
async def test_request_ends_so(stack: Stack, outcome: Outcome) -> None:
    """With its outcome on the Record and in the counter, and its usual status on the wire."""
    await ENDINGS[outcome](stack)
    record = stack.record
    assert record.outcome is outcome
    assert record.held == []
    if outcome in STATUS:
        assert record.status == STATUS[outcome]
    tenant = record.tenant.id if record.tenant else "none"
    page = stack.registry.get_sample_value(
        "fairgate_requests_total", {"tenant": tenant, "outcome": outcome.value}
    )
    assert page == 1


# The client leaves


@streams
@pytest.mark.parametrize("tokens", [0, 1, 4])
async def test_stream_whose_client_leaves_is_aborted_once(stack: Stack, path: str, tokens: int) -> None:
    """Before the first token, after it, late: charged for what was computed."""
    stack.core.automatic = False
    async with stack.request("POST", path, json=STREAMS[path]) as exchange:
        await settle()
        for _ in range(tokens):
            stack.core.emit()
            await settle()
        assert stack.running() == {"acme": 1}
        exchange.leave()
        await exchange.ended()
        assert stack.running() == {}
        await settle()
    assert stack.core.aborted == ["fairgate-0"]
    assert stack.record.outcome is Outcome.CANCELLED
    assert stack.record.usage.completion_tokens == tokens
    assert stack.record.usage.prompt_tokens == len(stack.core.last.prompt_token_ids or ())
    await assert_serves(stack)


@streams
async def test_client_that_leaves_unread_answer_is_charged_for_all_that_was_computed(
    stack: Stack, path: str
) -> None:
    """The server is blocked in a write, the engine goes on; a generator's own finally would never run."""
    stack.core.automatic = False
    async with stack.request("POST", path, json=STREAMS[path]) as exchange:
        await settle()
        stack.core.emit()
        await exchange.chunk()
        exchange.stop_reading()
        for _ in range(3):
            stack.core.emit()
            await settle()
        exchange.disappear()
        await exchange.ended()
        await settle()
    assert stack.core.aborted == ["fairgate-0"]
    assert stack.record.outcome is Outcome.CANCELLED
    assert stack.record.usage.completion_tokens == 4
    await assert_serves(stack)


@streams
async def test_whole_answer_whose_client_leaves_is_aborted_and_charged(stack: Stack, path: str) -> None:
    """Of an answer that is not streamed nobody has seen a token; the engine's count holds (B02)."""
    stack.core.automatic = False
    async with stack.request("POST", path, json=whole(path)) as exchange:
        await settle()
        for _ in range(3):
            stack.core.emit()
            await settle()
        exchange.leave()
        await exchange.ended()
        assert stack.running() == {}
        await settle()
    assert not exchange.has_begun
    assert stack.core.aborted == ["fairgate-0"]
    assert stack.record.outcome is Outcome.CANCELLED
    assert stack.record.usage.completion_tokens == 3
    await assert_serves(stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_every_sequence_of_a_request_is_aborted_and_charged(stack: Stack, stream: bool) -> None:
    """``n`` sequences are one request of ours; one of them had finished."""
    stack.core.automatic = False
    async with stack.request("POST", "/v1/chat/completions", json=chat(n=3, stream=stream)) as exchange:
        await settle()
        first, second, _ = stack.core.running
        assert stack.running() == {"acme": 3}
        stack.core.emit(2, request=first, finish="stop")
        stack.core.emit(3, request=second)
        await settle()
        exchange.leave()
        await exchange.ended()
        await settle()
    assert stack.core.aborted == ["fairgate-0"] * 2
    assert stack.record.usage.completion_tokens == 5
    await assert_serves(stack)


async def test_client_that_leaves_after_the_last_token_before_done_is_cancelled(stack: Stack) -> None:
    """The engine is done, so nothing is aborted; the client did not get it all."""
    stack.core.automatic = False
    async with stack.request(
        "POST", "/v1/chat/completions", json=STREAMS["/v1/chat/completions"]
    ) as exchange:
        await settle()
        stack.core.emit()
        await exchange.chunk()
        exchange.stop_reading()
        stack.core.emit(4, finish="length")
        await settle()
        exchange.disappear()
        await exchange.ended()
        await settle()
    assert stack.core.aborted == []
    assert stack.record.outcome is Outcome.CANCELLED
    assert stack.record.usage.completion_tokens == 5


async def test_client_that_leaves_behind_a_complete_answer_has_been_served(stack: Stack) -> None:
    """The disconnect that follows every response is none of ours."""
    await stack.fetch("POST", "/v1/chat/completions", json=chat())
    await stack.fetch("POST", "/v1/chat/completions", json=chat(stream=True))
    assert [record.outcome for record in stack.records] == [Outcome.FINISHED] * 2
    assert stack.core.aborted == []


async def test_client_that_leaves_while_it_sends_its_body_is_cancelled(stack: Stack) -> None:
    """Before anything is known of the request."""
    async with stack.request(
        "POST", "/v1/chat/completions", content=[], headers=[("Content-Type", "application/json")]
    ):
        await settle()
    assert stack.record.outcome is Outcome.CANCELLED
    assert stack.core.arrived == []


async def test_prompts_of_one_request_are_all_aborted(stack: Stack) -> None:
    """A list of prompts starts one engine request each."""
    stack.core.automatic = False
    body = {"model": MODEL, "prompt": ["One", "Two", "Three"], "max_tokens": 5, "stream": True}
    async with stack.request("POST", "/v1/completions", json=body) as exchange:
        await settle()
        for request in stack.core.running:
            stack.core.emit(request=request)
        await settle()
        assert stack.running() == {"acme": 3}
        exchange.leave()
        await exchange.ended()
        await settle()
    assert sorted(stack.core.aborted) == ["fairgate-0", "fairgate-1", "fairgate-2"]
    assert stack.record.usage.completion_tokens == 3
    await assert_serves(stack)


async def test_mass_of_clients_that_leave_together_leaves_nothing(stack: Stack) -> None:
    """Each is counted, with what was computed for it (B30)."""
    stack.core.automatic = False
    exchanges = [
        stack.request("POST", "/v1/chat/completions", key, json=chat(stream=True))
        for key in (ACME, GLOBEX) * 15
    ]
    opened = [await exchange.__aenter__() for exchange in exchanges]
    await settle()
    for request in stack.core.running:
        stack.core.emit(request=request)
    await settle()
    for exchange in opened:
        exchange.leave()
    for manager in exchanges:
        await manager.__aexit__(None, None, None)
    await settle()
    page = await stack.scrape()
    assert len(stack.core.aborted) == 30
    for tenant in ("acme", "globex"):
        assert page["fairgate_requests_total", "cancelled", tenant] == 15
        assert page["fairgate_tokens_total", "completion", tenant] == 15
        assert page["fairgate_tokens_total", "prompt", tenant] == 15 * len(
            stack.core.last.prompt_token_ids or ()
        )
    await assert_serves(stack)


# The engine fails


@streams
@pytest.mark.parametrize("stream", [True, False])
async def test_engine_that_dies_before_the_first_token_is_a_true_503(
    stack: Stack, path: str, stream: bool
) -> None:
    """With a time to come back, in the family's form."""
    stack.core.automatic = False
    async with stack.request("POST", path, json={**STREAMS[path], "stream": stream}) as exchange:
        await settle()
        stack.core.die()
        await exchange.ended()
    assert_refused(exchange, path, 503)
    assert int(exchange.headers["retry-after"]) >= 1
    assert stack.record.outcome is Outcome.ENGINE_DOWN


@streams
async def test_engine_that_dies_in_mid_stream_is_told_without_done(stack: Stack, path: str) -> None:
    """An error event, and no sign of a complete answer."""
    stack.core.automatic = False
    async with stack.request("POST", path, json=STREAMS[path]) as exchange:
        await settle()
        stack.core.emit(2)
        await settle()
        stack.core.die()
        await exchange.ended()
    assert_told_in_stream(exchange)
    assert stack.record.outcome is Outcome.FAILED
    assert stack.record.usage.completion_tokens == 2


@streams
async def test_engine_that_gives_a_request_up_in_mid_stream_is_told_without_done(
    stack: Stack, path: str
) -> None:
    """vLLM's finish reason ``error``; the others are served on."""
    stack.core.automatic = False
    async with stack.request("POST", path, json=STREAMS[path]) as exchange:
        await settle()
        stack.core.emit(2)
        await settle()
        stack.core.emit(1, finish="error")
        await exchange.ended()
    assert_told_in_stream(exchange)
    assert stack.record.outcome is Outcome.FAILED
    await assert_serves(stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_request_given_up_before_its_first_token_is_a_500(stack: Stack, stream: bool) -> None:
    """Nothing has gone out, so the status can be true."""
    stack.core.automatic = False
    async with stack.request("POST", "/v1/chat/completions", json=chat(stream=stream)) as exchange:
        await settle()
        stack.core.emit(0, finish="error")
        await exchange.ended()
    assert_refused(exchange, "/v1/chat/completions", 500)
    assert stack.record.outcome is Outcome.FAILED
    await assert_serves(stack)


@streams
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "status", "outcome"),
    [
        (RuntimeError("a fault at /secret/path"), 500, Outcome.FAILED),
        (ValueError("top_k is too large for this engine"), 400, Outcome.INVALID),
        (VLLMValidationError("no such thing", parameter="seed"), 400, Outcome.INVALID),
    ],
)
async def test_engine_that_refuses_at_the_call_is_a_true_status(
    stack: Stack, path: str, stream: bool, fault: Exception, status: int, outcome: Outcome
) -> None:
    """Also of a stream, which vLLM has begun to answer by then."""
    stack.core.refuse = fault
    answer = await stack.fetch("POST", path, json={**STREAMS[path], "stream": stream})
    assert_refused(answer, path, status)
    assert b"secret" not in answer.content
    assert stack.record.outcome is outcome
    await assert_serves(stack)


async def test_fault_of_the_front_end_under_running_requests_fails_them(stack: Stack) -> None:
    """vLLM passes it to every running request; none hangs."""
    stack.core.automatic = False
    async with stack.request("POST", "/v1/chat/completions", json=chat(stream=True)) as begun:
        await settle()
        stack.core.emit()
        async with stack.request("POST", "/v1/chat/completions", GLOBEX, json=chat()) as waiting:
            await settle()
            stack.core.break_down(RuntimeError("cannot decode"))
            await begun.ended()
            await waiting.ended()
    assert_told_in_stream(begun)
    assert_refused(waiting, "/v1/chat/completions", 500)
    assert [record.outcome for record in stack.records] == [Outcome.FAILED] * 2


def assert_refused(answer: Exchange, path: str, status: int) -> None:
    """A true status and a whole JSON body in the family's form."""
    assert answer.status == status, answer.content
    assert answer.headers["content-type"] == "application/json"
    body = json.loads(answer.content)
    if path == "/v1/messages":
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}


def assert_told_in_stream(answer: Exchange) -> None:
    """Status 200 had gone out: the stream says what happened and ends without a sign of success."""
    assert answer.status == 200
    text = answer.content.decode()
    assert "error" in text
    assert "[DONE]" not in text
    assert "response.completed" not in text
    assert "message_stop" not in text
    assert not answer.messages[-1].get("more_body")


# The counts add up


async def test_requests_in_are_the_sum_of_their_outcomes(stack: Stack) -> None:
    """Whatever happens; probes are no requests, and each is counted once (B30)."""
    sent = 0

    async def send(method: str, path: str, key: str | None, **options: Any) -> None:
        nonlocal sent
        sent += 1
        await stack.fetch(method, path, key, **options)

    for _ in range(2):
        await send("POST", "/v1/chat/completions", ACME, json=chat())
        await send("POST", "/v1/chat/completions", GLOBEX, json=chat(stream=True))
        await send("POST", "/v1/chat/completions", None, json=chat())
        await send("POST", "/v1/chat/completions", NARROW, json=chat())
        await send("POST", "/v1/chat/completions", OPERATOR, json=chat())
        await send("POST", "/v1/chat/completions", ACME, json={"messages": 1})
        await send("GET", "/nowhere", ACME)
        await send("GET", "/v1/models", ACME)
    await stack.fetch("GET", "/livez", None)
    await stack.fetch("GET", "/readyz", None)
    page = await stack.scrape()
    counted = {k[1:]: v for k, v in page.items() if k[0] == "fairgate_requests_total" and v}
    assert sum(counted.values()) == sent
    assert counted == {
        ("finished", "acme"): 4,
        ("finished", "globex"): 2,
        ("unauthenticated", "none"): 2,
        ("forbidden", "narrow"): 2,
        ("forbidden", "none"): 2,
        ("invalid", "acme"): 4,
    }


async def test_refused_request_leaves_nothing_in_flight(stack: Stack) -> None:
    """A refusal of one kind touches no other count, and no other tenant's (B35)."""
    stack.core.automatic = False
    async with stack.request("POST", "/v1/chat/completions", json=chat(stream=True)):
        await settle()
        before = stack.running()
        for key, body in ((None, chat()), (NARROW, chat()), (ACME, {"model": MODEL}), (ACME, chat(n=0))):
            answer = await stack.fetch("POST", "/v1/chat/completions", key, json=body)
            assert answer.status in (400, 401, 403)
            assert stack.running() == before
            assert stack.app.in_flight == 1
    await settle()


BROKEN: dict[str, tuple[dict[str, Any] | bytes, int]] = {
    "malformed JSON": (b'{"model": ', 400),
    "unknown model": (chat(model="nobody's"), 404),
    "unknown role": ({"model": MODEL, "messages": [{"role": 7, "content": "x"}]}, 400),
    "too long": (chat("word " * 600), 400),
    "n is 0": (chat(n=0), 400),
    "negative max_tokens": (chat(max_tokens=-1), 400),
    "no messages": ({"model": MODEL}, 400),
    "a list": (b"[]", 400),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_broken_request_leaves_its_tenant_served(stack: Stack, broken: str) -> None:
    """One after another; the next normal request is answered at once (B06)."""
    body, status = BROKEN[broken]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await stack.fetch(
        "POST", "/v1/chat/completions", content=content, headers=[("Content-Type", "application/json")]
    )
    assert_refused(answer, "/v1/chat/completions", status)
    assert stack.record.outcome is Outcome.INVALID
    assert stack.core.arrived == []
    await assert_serves(stack)


async def test_answer_that_cannot_be_written_as_json_is_a_500(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serialisation of a whole answer fails (B06)."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    def broken(*args: object, **kwargs: object) -> Any:
        raise RuntimeError("cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(ChatCompletionResponse, "model_dump", broken)
        answer = await stack.fetch("POST", "/v1/chat/completions", json=chat())
    assert_refused(answer, "/v1/chat/completions", 500)
    assert stack.record.outcome is Outcome.FAILED
    await assert_serves(stack)


async def test_two_tasks_of_one_stack_never_share_a_record(stack: Stack) -> None:
    """Many at once: each keeps its own tenant, id and counts."""
    answers = await asyncio.gather(
        *(
            stack.fetch(
                "POST",
                "/v1/chat/completions",
                key,
                json=chat(max_tokens=n),
                headers=[("X-Request-Id", f"r{n}")],
            )
            for n, key in enumerate((ACME, GLOBEX) * 10, 1)
        )
    )
    assert [answer.headers["x-request-id"] for answer in answers] == [f"r{n}" for n in range(1, 21)]
    for record in stack.records:
        number = int(record.id[1:])
        assert record.usage.completion_tokens == number
        assert record.tenant is not None
        assert record.tenant.id == ("acme" if number % 2 else "globex")
