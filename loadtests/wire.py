"""One HTTP connection of the load client: sends a chat request, counts the events of its stream.

Owns `Connection` and `Answer`. Used by ``client``. Written on asyncio's protocols and httptools rather
than on a client library, because the client shares the machine with what it measures: an event costs
it a search for a few bytes, and no JSON is read while a window is open.

What is counted: one ``data: {`` is one event (a quote inside JSON text is escaped, so no model's text can
look like one). The first event of a chat stream holds the role, the last the usage: neither is a token.
A server may put several tokens into one event, so the usage says how many an event stands for. Times are
``time.monotonic``: uvloop's own clock counts whole milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass, field
from typing import cast

import httptools

_EVENT = b'data: {"'
_EVENT_END = b"\n\n"
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_ERROR = b'data: {"error"'


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat request. Generates exactly ``max_tokens``, greedily."""

    prompt: str
    max_tokens: int
    stream: bool = True

    def body(self, model: str) -> bytes:
        """The JSON text."""
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body).encode()


@dataclass(slots=True)
class Answer:
    """What came back, by the client's clock (monotonic seconds)."""

    sent_s: float
    status: int = 0
    tokens: int = 0
    """As the server's usage says."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When events with tokens came, and how many at once. Empty if not streamed."""
    ended_s: float = 0.0
    error: str | None = None
    """The body, where it is not an answer."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; of an answer that is not streamed, to its end."""
        return (self.arrivals[0][0] if self.arrivals else self.ended_s) - self.sent_s

    def events_between(self, start_s: float, end_s: float) -> int:
        """Events with tokens that came in ``[start_s, end_s)``."""
        return sum(count for at_s, count in self.arrivals if start_s <= at_s < end_s)

    def tokens_between(self, start_s: float, end_s: float) -> float:
        """Tokens that came in ``[start_s, end_s)``, each event taken for as many as another."""
        events = sum(count for _, count in self.arrivals)
        return self.events_between(start_s, end_s) * self.tokens / events if events else 0.0


class _ClosedIdle(ConnectionError):
    """The server closed a kept connection before it saw the request."""


class Connection(asyncio.Protocol):
    """A kept-alive connection: one request at a time."""

    def __init__(self, host: str, port: int, key: str | None) -> None:
        self._host = host
        self._port = port
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
            "content-type: application/json\r\n" + (f"authorization: Bearer {key}\r\n" if key else "")
        )
        # Mutable state: the connection, and the answer that is coming in
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer(0.0)
        self._ended: asyncio.Future[None] | None = None
        self._closed: type[ConnectionError] = ConnectionError
        self._is_stream = False
        self._is_begun = False
        self._rest = b""
        self._tail = b""

    async def ask(self, ask: Ask, model: str, *, timeout_s: float) -> Answer:
        """Send a request and wait for the whole answer; an error status is an answer too.

        A kept connection may be closed by the server for having idled, just as a request is sent: where
        not a byte has come back, it is sent once more on a new one (RFC 9110, 9.2.2). Its time still
        counts from the first sending.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
            ConnectionError: The server closed the connection, or cannot be reached.
        """
        body = ask.body(model)
        request = f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._answer = answer = Answer(time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                if self._transport is not None:
                    with contextlib.suppress(_ClosedIdle):
                        await self._exchange(request, ask, closed=_ClosedIdle)
                        return answer
                await self._exchange(request, ask, closed=ConnectionError)
        except BaseException:
            self.close()
            raise
        return answer

    async def _exchange(self, request: bytes, ask: Ask, *, closed: type[ConnectionError]) -> None:
        """Send it; raises ``closed`` where the connection ends before a byte has come back."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            await loop.create_connection(lambda: self, self._host, self._port)
        assert self._transport is not None
        self._ended, self._closed = loop.create_future(), closed
        self._is_stream, self._is_begun, self._rest, self._tail = ask.stream, False, b"", b""
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        """Close it; the next `ask` opens it anew."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._closed = ConnectionError
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(self._closed("the server closed the connection"))

    # httptools' callbacks

    def on_body(self, data: bytes) -> None:
        """One HTTP chunk, or a part of one."""
        data = self._rest + data
        if not self._is_stream or not data.endswith(_EVENT_END):
            self._rest = data
            return
        self._rest = b""
        self._tail = self._tail[-1024:] + data
        count = data.count(_EVENT)
        if not self._is_begun and count:
            self._is_begun = True
            count -= 1  # the role
        if count:
            self._answer.arrivals.append((time.monotonic(), count))

    def on_message_complete(self) -> None:
        """The answer is whole: read what it says of itself."""
        answer = self._answer
        answer.ended_s = time.monotonic()
        answer.status = self._parser.get_status_code()
        end = self._tail + self._rest
        usage = _TOKENS.findall(end)
        if answer.status != 200 or _ERROR in end or not usage:
            answer.error = end.decode(errors="replace")[-1000:]
        else:
            answer.tokens = int(usage[-1])
            _drop_last_event(answer.arrivals)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


def _drop_last_event(arrivals: list[tuple[float, int]]) -> None:
    """Take off the event that held the usage."""
    if arrivals:
        at_s, count = arrivals.pop()
        if count > 1:
            arrivals.append((at_s, count - 1))
