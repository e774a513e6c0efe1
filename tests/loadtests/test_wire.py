"""The load client against a small server of scripted bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from typing import TYPE_CHECKING

import pytest

from loadtests.client import LoadFailed, Saturation, Target, alternate, load_client, saturate
from loadtests.servers import free_port
from loadtests.wire import Answer, Ask, Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

Script = list[bytes]
"""Written one after the other, with the loop's turns between them."""

END = b"0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(*events: object) -> bytes:
    """One HTTP chunk with some server-sent events."""
    lines = [
        one if isinstance(one, bytes) else json.dumps(one, separators=(",", ":")).encode() for one in events
    ]
    body = b"".join(b"data: %s\n\n" % line for line in lines)
    return b"%x\r\n%s\r\n" % (len(body), body)


def stream(texts: Sequence[Sequence[str]], tokens: int) -> Script:
    """A chat stream: role, a chunk of events for each list of texts, usage, end."""
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    words = [chunk(*({"choices": [{"delta": {"content": text}}]} for text in some)) for some in texts]
    usage = {"choices": [], "usage": {"completion_tokens": tokens}}
    return [HEAD, chunk(role), *words, chunk(usage), chunk(b"[DONE]"), END]


@contextlib.asynccontextmanager
async def serving(script: Callable[[bytes], Script]) -> AsyncIterator[int]:
    """A server that answers every request by the script for its body; gives its port.

    A script that does not end its answer is broken off.
    """
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                parts = script(await reader.readexactly(length))
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if not parts or (parts[0] == HEAD and parts[-1] != END):
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    await asyncio.gather(*(task for task in tasks if task))


async def ask(script: Script, request: Ask | None = None) -> Answer:
    """One request to a server with that script."""
    async with serving(lambda _: script) as port:
        connection = Connection("127.0.0.1", port, "key")
        answer = await connection.ask(request or Ask("hello", 3), "model", timeout_s=5)
        connection.close()
    return answer


async def test_events_are_counted_without_role_and_usage() -> None:
    """Three texts, three events."""
    answer = await ask(stream([["a"], ["b", "c"]], tokens=3))
    assert (answer.status, answer.error, answer.tokens) == (200, None, 3)
    assert answer.events_between(answer.sent_s, answer.ended_s + 1) == 3
    assert answer.sent_s < answer.sent_s + answer.ttft_s <= answer.ended_s


async def test_text_that_looks_like_an_event_is_none() -> None:
    """Quotes inside JSON text are escaped."""
    answer = await ask(stream([['data: {"id"'], ["b"]], tokens=2))
    assert answer.events_between(0, answer.ended_s + 1) == 2


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_count_does_not_depend_on_how_the_bytes_are_cut(size: int) -> None:
    """A read may end inside an event."""
    whole = b"".join(stream([["a"], ["b"], ["c"]], tokens=3))
    answer = await ask([whole[i : i + size] for i in range(0, len(whole), size)])
    assert (answer.events_between(0, answer.ended_s + 1), answer.tokens) == (3, 3)


async def test_usage_in_the_same_read_as_the_last_text_is_no_token() -> None:
    """Events that come at once are still told apart."""
    usage = {"choices": [], "usage": {"completion_tokens": 1}}
    role = {"choices": [{"delta": {"role": "assistant"}}]}
    answer = await ask([HEAD + chunk(role) + chunk({"choices": []}, usage, b"[DONE]") + END])
    assert answer.events_between(0, answer.ended_s + 1) == 1


async def test_whole_answer_has_its_time_to_the_end() -> None:
    """Not streamed: the first token comes with the last."""
    body = b'{"usage":{"prompt_tokens":5,"completion_tokens":3}}'
    answer = await ask([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)])
    assert (answer.tokens, answer.arrivals) == (3, [])
    assert answer.ttft_s == answer.ended_s - answer.sent_s


async def test_refusal_is_an_answer_with_its_words() -> None:
    """Scenarios with limits expect some."""
    body = b'{"error":{"code":"rate_limited"}}'
    answer = await ask([b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)])
    assert answer.status == 429
    assert answer.error is not None
    assert "rate_limited" in answer.error


async def test_error_inside_a_stream_is_an_error() -> None:
    """The status was 200 all the same."""
    answer = await ask([HEAD, chunk({"error": {"message": "boom"}}), chunk(b"[DONE]"), END])
    assert answer.error is not None
    assert "boom" in answer.error


async def test_connection_that_breaks_off_raises() -> None:
    """And the next request opens a new one."""
    scripts = iter([[HEAD, b"5\r\nda"], stream([["a"]], tokens=1)])
    async with serving(lambda _: next(scripts)) as port:
        connection = Connection("127.0.0.1", port, None)
        with pytest.raises(ConnectionError):
            await connection.ask(Ask("hello", 1), "model", timeout_s=5)
        assert (await connection.ask(Ask("hello", 1), "model", timeout_s=5)).tokens == 1
        connection.close()


async def test_request_on_a_connection_that_had_idled_out_is_sent_again() -> None:
    """The server closed it for idling, just as the request was sent: nobody's failure."""
    scripts = iter([stream([["a"]], tokens=1), [], stream([["a"]], tokens=1)])
    async with serving(lambda _: next(scripts)) as port:
        with contextlib.closing(Connection("127.0.0.1", port, None)) as connection:
            for _ in range(2):
                assert (await connection.ask(Ask("hello", 1), "model", timeout_s=5)).tokens == 1


def test_tokens_of_a_window_are_those_that_came_inside() -> None:
    """An event of an answer stands for as many tokens as any other of it."""
    answer = Answer(0.0, tokens=8, arrivals=[(1.0, 1), (2.0, 2), (3.0, 1)])
    assert answer.tokens_between(2.0, 3.0) == 4.0
    assert answer.tokens_between(4.0, 5.0) == 0.0
    assert Answer(0.0).tokens_between(0.0, 1.0) == 0.0


def asked_tokens(body: bytes) -> int:
    """What a request asks for."""
    return int(json.loads(body)["max_tokens"])


async def test_saturated_window_counts_what_came_inside_it() -> None:
    """All streams stay busy; the CPU is the given process's."""

    def script(body: bytes) -> Script:
        count = asked_tokens(body)
        return stream([["x"] for _ in range(count)], tokens=count)

    async with serving(script) as port:
        target = Target("127.0.0.1", port, "model", "key", os.getpid())
        window = await saturate(target, Saturation(streams=4, max_tokens=8, warm_up_s=0.05, seconds=0.2))
    assert window.tokens == window.events > 0
    assert window.tokens_per_event == 1
    assert 0.2 <= window.seconds < 2
    assert window.front_end_us > 0


async def test_lone_requests_go_to_each_server_in_turn() -> None:
    """Who comes first changes."""
    seen: list[str] = []

    def named(name: str) -> Callable[[bytes], Script]:
        def script(body: bytes) -> Script:
            seen.append(name)
            return stream([["x"]], tokens=asked_tokens(body))

        return script

    async with serving(named("a")) as a, serving(named("b")) as b:
        targets = [Target("127.0.0.1", port, "model", None, 0) for port in (a, b)]
        answers = await alternate(targets, [Ask("one", 1), Ask("two", 1)])
    assert seen == ["a", "b", "b", "a"]
    assert [len(both) for both in answers] == [2, 2]


async def test_answer_that_is_cut_short_fails_the_run() -> None:
    """Fewer tokens than were asked for would look like speed."""
    async with serving(lambda _: stream([["x"]], tokens=1)) as port:
        with pytest.raises(LoadFailed, match="1 of 2 tokens"):
            await alternate([Target("127.0.0.1", port, "model", None, 0)], [Ask("one", 2)])


def test_many_streams_that_fail_are_told_as_one_failure() -> None:
    """From the client's process comes one sentence, not 64 tracebacks."""
    nobody = Target("127.0.0.1", free_port(), "model", None, os.getpid())
    load = Saturation(streams=3, max_tokens=1, warm_up_s=0, seconds=0.1)
    with load_client() as client, pytest.raises(LoadFailed, match="3 of the streams failed, the first with"):
        client.saturate(nobody, load, timeout_s=20)


def test_client_that_hangs_is_given_up_and_ended() -> None:
    """The time that a scenario may take is kept, whatever a server does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Target("127.0.0.1", silent.getsockname()[1], "model", None, os.getpid())
        started_s = time.monotonic()
        with load_client() as client, pytest.raises(LoadFailed, match="not done after 1 s"):
            client.alternate([target], [Ask("one", 1)], timeout_s=1)
    assert time.monotonic() - started_s < 20
