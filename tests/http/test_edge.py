"""The outermost layer around tiny applications: ids, hold-back, refusals, the last release (B01, B06)."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from app.core.errors import Outcome, Rejected
from app.core.record import Record, current_record
from app.http.edge import Edge

from ..support.asgi import fetch, request, settle
from ..support.clock import FakeClock
from ..support.stack import Watcher

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REFUSAL = Rejected(Outcome.RATE_LIMITED, "60 requests a minute are used up.", retry_after_s=7)
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


def body(text: bytes, *, more: bool = False) -> Message:
    """A piece of a body."""
    return {"type": "http.response.body", "body": text, "more_body": more}


def opened() -> Record:
    """The Record of the request that the calling application answers."""
    record = current_record.get()
    assert record is not None
    return record


class Held:
    """Something held for a request; counts how often it is given back."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        """Count."""
        self.released += 1


class Rig:
    """An edge around an application, with an observer and a clock."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int = 1000) -> None:
        self.watcher = Watcher()
        self.clock = FakeClock()
        self.edge = Edge(app, observers=[self.watcher], clock=self.clock, max_body_bytes=max_body_bytes)

    @property
    def record(self) -> Record:
        """Of the one request; asserts that the observer was told once and that nothing is in flight."""
        assert self.edge.in_flight == 0
        (record,) = self.watcher.records
        return record


def saying(*messages: Message) -> ASGIApp:
    """An application that is admitted and sends these."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        opened().decide(0.0)
        for message in messages:
            await send(message)

    return app


# Ids


@pytest.mark.parametrize("sent", ["a", "req-1.2:3_4", "A" * 128])
async def test_well_formed_request_id_is_kept(sent: str) -> None:
    """The client's id names the request in the answer and on the Record."""
    rig = Rig(saying(START, body(b"x")))
    answer = await fetch(rig.edge, "GET", "/", headers=[("X-Request-Id", sent)])
    assert answer.headers["x-request-id"] == rig.record.id == sent


@pytest.mark.parametrize(
    "sent", [["a b"], ["-a"], [""], ["A" * 129], ["a\x00"], ["a\n"], ["ä"], ["one", "two"], ["same", "same"]]
)
async def test_malformed_or_doubled_request_id_is_replaced(sent: list[str]) -> None:
    """What could break a log line or name two requests is not taken, and the application sees the new id."""
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        await send(START)
        await send(body(b"x"))

    rig = Rig(app)
    answer = await fetch(rig.edge, "GET", "/", headers=[("X-Request-Id", value) for value in sent])
    chosen = answer.headers["x-request-id"]
    assert chosen not in sent
    assert len(chosen) == 32
    assert seen == [chosen.encode()]
    assert rig.record.id == chosen


async def test_applications_own_request_id_is_not_sent_twice() -> None:
    """vLLM answers with an id header of its own where it is told to."""
    start = {**START, "headers": [(b"X-Request-Id", b"theirs")]}
    answer = await fetch(Rig(saying(start, body(b""))).edge, "GET", "/", headers=[("X-Request-Id", "mine")])
    assert answer.headers == {"x-request-id": "mine"}


# Hold-back


async def test_nothing_is_sent_before_the_decision() -> None:
    """Not the start, not events that come before the engine is asked."""
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(body(b"first", more=True))
        await go.wait()
        opened().decide(0.0)
        await send(body(b"second", more=True))
        await send(body(b""))

    async with request(Rig(app).edge, "POST", "/") as exchange:
        await settle()
        assert not exchange.has_begun
        go.set()
        assert [await exchange.chunk() for _ in range(3)] == [b"first", b"second", None]


async def test_whole_answer_goes_out_without_a_decision() -> None:
    """Routes that ask for nothing of the engine never decide."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(body(b"models"))

    rig = Rig(app)
    assert (await fetch(rig.edge, "GET", "/")).content == b"models"
    assert rig.record.outcome is Outcome.FINISHED


async def test_chunks_pass_untouched_after_the_decision() -> None:
    """The very message objects arrive: nothing is copied or wrapped for each token."""
    chunks = [body(b"%d" % index, more=True) for index in range(3)] + [body(b"")]
    answer = await fetch(Rig(saying(START, *chunks)).edge, "GET", "/")
    assert [id(message) for message in answer.messages[1:]] == [id(chunk) for chunk in chunks]


async def test_passing_a_chunk_adds_no_coroutine() -> None:
    """After the decision the application awaits the server's own ``send``."""
    awaited: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        opened().decide(0.0)
        await send(START)
        await send(body(b"a", more=True))
        passing: Any = send(body(b"b"))
        awaited.append(passing.cr_code.co_name)
        await passing

    await fetch(Rig(app).edge, "GET", "/")
    assert awaited == ["_send"]  # of tests.support.asgi.Exchange


async def test_answer_that_never_asks_is_cut() -> None:
    """A stream without a decision cannot pile up in memory: it is our fault, told as such."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        while True:
            await send(body(b"x", more=True))

    rig = Rig(app)
    assert (await fetch(rig.edge, "GET", "/")).status == 500
    assert rig.record.outcome is Outcome.FAILED


# Refusals


async def test_refusal_after_the_application_began_is_a_true_status() -> None:
    """vLLM's streams answer 200 first; the client sees 429 and JSON all the same."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(body(b"data: {}\n\n", more=True))
        opened().reject(REFUSAL)
        await send(body(b"data: error\n\n", more=True))
        await send(body(b"data: [DONE]\n\n", more=True))
        await send(body(b""))

    rig = Rig(app)
    answer = await fetch(rig.edge, "POST", "/")
    assert answer.status == 429
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["content-length"] == str(len(answer.content))
    assert json.loads(answer.content)["error"]["message"] == REFUSAL.message
    assert rig.record.outcome is Outcome.RATE_LIMITED


async def test_refusal_is_written_when_the_application_raises() -> None:
    """/v1/responses raises an error of its own out of its stream; the Record's refusal is the answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(body(b"data: {}\n\n", more=True))
        opened().reject(REFUSAL)
        raise RuntimeError("a validation error")

    rig = Rig(app)
    assert (await fetch(rig.edge, "POST", "/")).status == 429
    assert rig.record.outcome is Outcome.RATE_LIMITED


async def test_refusal_that_is_only_raised_counts_too() -> None:
    """From auth and dispatch."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise REFUSAL

    rig = Rig(app)
    assert (await fetch(rig.edge, "POST", "/")).status == 429
    assert rig.record.outcome is Outcome.RATE_LIMITED


async def test_first_refusal_stands() -> None:
    """What follows from a refusal does not replace it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        opened().reject(REFUSAL)
        raise opened().reject(Rejected(Outcome.INVALID, "a consequence"))

    assert (await fetch(Rig(app).edge, "POST", "/")).status == 429


async def test_retry_after_is_never_below_one() -> None:
    """Zero would be an invitation to hammer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise Rejected(Outcome.OVERLOADED, "busy", retry_after_s=0)

    assert (await fetch(Rig(app).edge, "POST", "/")).headers["retry-after"] == "1"


async def test_head_gets_headers_without_a_body() -> None:
    """A refusal of HEAD states the length and sends none of it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise REFUSAL

    answer = await fetch(Rig(app).edge, "HEAD", "/")
    assert answer.content == b""
    assert int(answer.headers["content-length"]) > 0


async def test_websocket_reaches_nothing() -> None:
    """None is served, whatever a server's configuration lets through."""
    rig = Rig(saying())
    with pytest.raises(RuntimeError, match="websocket is not served"):
        await rig.edge({"type": "websocket"}, None, None)  # type: ignore[arg-type]


# Faults


async def test_fault_before_anything_was_sent_is_a_500_without_its_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client gets the id, the log the traceback."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        raise ValueError("/secret/path")

    rig = Rig(app)
    answer = await fetch(rig.edge, "POST", "/")
    assert answer.status == 500
    assert b"secret" not in answer.content
    assert rig.record.outcome is Outcome.FAILED
    assert rig.record.id in caplog.text
    assert "/secret/path" in caplog.text


async def test_fault_in_mid_stream_ends_it_without_done() -> None:
    """The response ends, so that the client does not wait, and is not taken for complete."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        opened().decide(0.0)
        await send(START)
        await send(body(b"a", more=True))
        raise ValueError("broken")

    rig = Rig(app)
    answer = await fetch(rig.edge, "POST", "/")
    assert answer.content == b"a"
    assert not answer.messages[-1].get("more_body")
    assert rig.record.outcome is Outcome.FAILED


async def test_done_is_taken_out_of_a_stream_that_has_failed() -> None:
    """vLLM writes ``[DONE]`` behind its error event."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        opened().decide(0.0)
        await send(START)
        await send(body(b"data: 1\n\n", more=True))
        opened().fail(RuntimeError("dead"))
        await send(body(b"data: error\n\n", more=True))
        await send(body(b"data: [DONE]\n\n", more=True))
        await send(body(b""))

    rig = Rig(app)
    assert (await fetch(rig.edge, "POST", "/")).content == b"data: 1\n\ndata: error\n\n"
    assert rig.record.outcome is Outcome.FAILED


async def test_failure_before_the_release_is_a_true_500() -> None:
    """Also when the application has told it as an event under 200, and has been admitted."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        opened().decide(0.0)
        await send(START)
        opened().fail(RuntimeError("dead"))
        await send(body(b"data: error\n\n", more=True))
        await send(body(b"data: [DONE]\n\n", more=True))
        await send(body(b""))

    rig = Rig(app)
    answer = await fetch(rig.edge, "POST", "/")
    assert answer.status == 500
    assert json.loads(answer.content)["error"]["type"] == "server_error"
    assert rig.record.outcome is Outcome.FAILED


async def test_application_that_says_nothing_is_a_500() -> None:
    """The client is not left without an answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        return

    assert (await fetch(Rig(app).edge, "GET", "/")).status == 500


async def test_observer_that_raises_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The answer is out, the others are told, the request is no longer in flight (B06)."""

    class Broken:
        def closed(self, record: Record) -> None:
            raise RuntimeError("disk full")

    watcher = Watcher()
    edge = Edge(
        saying(START, body(b"x")), observers=[Broken(), watcher], clock=FakeClock(), max_body_bytes=10
    )
    assert (await fetch(edge, "GET", "/")).status == 200
    assert len(watcher.records) == 1
    assert edge.in_flight == 0
    assert "disk full" in caplog.text


# The body


async def test_body_above_the_limit_is_refused_by_its_length() -> None:
    """Before a byte of it is read, and before the application is called."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("called")

    rig = Rig(app)
    answer = await fetch(rig.edge, "POST", "/", content=b"x", headers=[("Content-Length", "1001")])
    assert answer.status == 413
    assert answer.taken_bytes == 0
    assert answer.headers["connection"] == "close"
    assert rig.record.outcome is Outcome.INVALID


async def test_body_without_a_length_is_read_up_to_the_limit() -> None:
    """A chunked body cannot fill the memory; an application that swallows the refusal changes nothing."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive()).get("more_body"):
                pass
        except Exception:
            await send({**START, "status": 400})
            await send(body(b"There was an error parsing the body"))

    rig = Rig(app)
    answer = await fetch(rig.edge, "POST", "/", content=[b"x" * 400] * 10)
    assert answer.status == 413
    assert answer.taken_bytes == 1200
    assert json.loads(answer.content)["error"]["code"] == "request_too_large"
    assert rig.record.outcome is Outcome.INVALID


async def test_body_at_the_limit_is_taken() -> None:
    """The bound is the most that is read, not the least that is refused."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send(START)
        await send(body(b"ok"))

    rig = Rig(app)
    answer = await fetch(
        rig.edge, "POST", "/", content=[b"x" * 500] * 2, headers=[("Content-Length", "1000")]
    )
    assert answer.status == 200


# The end


async def test_what_is_held_is_given_back_last_taken_first() -> None:
    """Once each, after the answer, before the observers are told."""
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def release(self) -> None:
            order.append(self.name)

    class Told:
        def closed(self, record: Record) -> None:
            order.append("told")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        opened().held += [Named("slot"), Named("run")]
        await send(START)
        await send(body(b"x"))

    await fetch(Edge(app, observers=[Told()], clock=FakeClock(), max_body_bytes=1), "GET", "/")
    assert order == ["run", "slot", "told"]


async def leave_while(place: str) -> tuple[Rig, Held]:
    """Have the client leave at some place of a stream; the application notices by `receive`, as Starlette."""
    held, waiting = Held(), asyncio.Event()

    async def stream(send: Send) -> None:
        opened().held.append(held)
        if place == "before the decision":
            await waiting.wait()
        opened().decide(0.0)
        await send(START)
        if place == "between headers and first chunk":
            await waiting.wait()
        await send(body(b"a", more=True))
        if place == "mid stream":
            await waiting.wait()
        await send(body(b"b", more=True))  # blocked here where the client does not read
        if place == "before [DONE]":
            await waiting.wait()
        await send(body(b"data: [DONE]\n\n", more=True))
        await send(body(b""))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        streaming = asyncio.create_task(stream(send))
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
        streaming.cancel()
        leaving.cancel()
        await asyncio.gather(streaming, leaving, return_exceptions=True)

    rig = Rig(app)
    async with request(rig.edge, "POST", "/") as exchange:
        if place == "blocked in send":
            exchange.stop_reading()
        await settle()
        exchange.disappear()
        await exchange.ended()
    return rig, held


@pytest.mark.parametrize(
    "place",
    [
        "before the decision",
        "between headers and first chunk",
        "mid stream",
        "before [DONE]",
        "blocked in send",
    ],
)
async def test_client_that_leaves_is_cancelled_and_gives_back_once(place: str) -> None:
    """Wherever in the answer it happens."""
    rig, held = await leave_while(place)
    assert rig.record.outcome is Outcome.CANCELLED
    assert held.released == 1


async def test_client_that_leaves_after_the_answer_is_not_cancelled() -> None:
    """The server tells a disconnect after every complete response."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        opened().decide(0.0)
        await send(START)
        await send(body(b"all"))
        assert (await receive())["type"] == "http.disconnect"

    rig = Rig(app)
    await fetch(rig.edge, "POST", "/")
    assert rig.record.outcome is Outcome.FINISHED


async def test_task_cancelled_twice_still_releases_and_tells() -> None:
    """The server cuts a connection off while the application handles a first cancellation."""
    held = Held()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        opened().held.append(held)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    rig = Rig(app)
    async with request(rig.edge, "POST", "/") as exchange:
        for _ in range(2):
            await settle()
            assert held.released == 0
            exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
        exchange.task = asyncio.create_task(asyncio.sleep(0))
    assert held.released == 1
    assert rig.record.outcome is not Outcome.FINISHED


async def test_answer_that_the_server_cuts_off_is_not_finished() -> None:
    """Its task is cancelled when the drain is over; the client saw half an answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        opened().decide(0.0)
        await send(START)
        await send(body(b"half", more=True))
        await asyncio.Event().wait()

    rig = Rig(app)
    async with request(rig.edge, "POST", "/") as exchange:
        await exchange.chunk()
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
        exchange.task = asyncio.create_task(asyncio.sleep(0))
    assert rig.record.outcome is Outcome.FAILED


async def test_wait_idle_returns_when_the_last_request_has_ended() -> None:
    """The drain waits for it."""
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await send(START)
        await send(body(b"x"))

    rig = Rig(app)
    await rig.edge.wait_idle()
    async with request(rig.edge, "GET", "/"), request(rig.edge, "GET", "/"):
        idle = asyncio.create_task(rig.edge.wait_idle())
        await settle()
        assert not idle.done()
        assert repr(rig.edge) == "<Edge 2 in flight>"
        go.set()
        await idle
    assert repr(rig.edge) == "<Edge 0 in flight>"


async def test_record_is_set_for_the_request_alone() -> None:
    """Nothing of one request is seen after it."""
    await fetch(Rig(saying(START, body(b"x"))).edge, "GET", "/")
    assert current_record.get() is None


async def test_times_are_taken_from_the_clock() -> None:
    """Opened and closed, monotonic seconds."""
    rig: Rig

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        rig.clock.advance(2.5)
        await send(START)
        await send(body(b"x"))

    rig = Rig(app)
    await fetch(rig.edge, "GET", "/")
    assert (rig.record.opened_s, rig.record.closed_s) == (1000.0, 1002.5)
