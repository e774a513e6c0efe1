"""A client in messages: drives an ASGI application step by step, without sockets and without sleeping.

Owns `request`, the exchange it opens, and `settle`. httpx's ASGITransport hands over a response when its
body is complete; hold-back, streams and clients that leave need each message by itself. The messages and
their order are uvicorn's (its httptools protocol): a disconnect is told once the client is gone or the
response is complete, and what is sent after that goes nowhere without an error.
"""

from __future__ import annotations

import asyncio
import json as json_module
import time
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from starlette.types import ASGIApp, Message, Scope

    Headers = Iterable[tuple[str, str]]

PATIENCE_S = 20.0
"""Seconds until a message that does not come fails the test. No test that passes waits for it."""


async def settle() -> None:
    """Return when every other task waits for something that only the test can bring.

    trio's ``wait_all_tasks_blocked``, for asyncio's own loop: when this task runs and nothing else is ready
    to, all the others wait. Timers and threads are not waited for; the stack under test uses neither on a
    request's way.
    """
    ready: deque[object] = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    quiet = 0
    while quiet < 3:  # a callback through the selector takes one more turn
        await asyncio.sleep(0)
        quiet = 0 if ready else quiet + 1


async def eventually(reached: Callable[[], bool]) -> None:
    """Return when this holds: for what the loop's selector and other threads bring, as signals."""
    async with asyncio.timeout(PATIENCE_S):
        while not reached():
            # A loop that never rests can keep the GIL from a thread; its own clock may be the test's.
            time.sleep(0.0005)  # noqa: ASYNC251
            await asyncio.sleep(0)


class Exchange:
    """One request, its response as far as it has come, and the client's moves."""

    def __init__(self, app: ASGIApp, scope: Scope, body: Iterable[bytes]) -> None:
        self.messages: list[Message] = []
        """All that the application has sent, the very objects."""
        self.taken_bytes = 0
        """Of the request's body, what has been read."""
        self._body = deque(body)
        self._taken = 0
        self._news = asyncio.Event()
        self._gone = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._left = False
        self._complete = False
        self.task: asyncio.Task[None] = asyncio.ensure_future(self._run(app, scope))
        self.task.add_done_callback(lambda task: self._news.set())

    # The client's side

    async def start(self) -> Message:
        """The response's start."""
        await self._until(lambda: bool(self.messages))
        return self.messages[0]

    @property
    def has_begun(self) -> bool:
        """Whether anything has reached the client."""
        return bool(self.messages)

    async def chunk(self) -> bytes | None:
        """The next piece of the body that is not empty; ``None`` at its end."""
        while True:
            await self._until(lambda: len(self.messages) > self._taken + 1 or self._complete)
            if len(self.messages) <= self._taken + 1:
                return None
            self._taken += 1
            piece: bytes = self.messages[self._taken].get("body", b"")
            if piece:
                return piece

    async def body(self) -> bytes:
        """What remains of the body, to the end."""
        pieces = []
        while (piece := await self.chunk()) is not None:
            pieces.append(piece)
        await self.ended()
        return b"".join(pieces)

    async def json(self) -> Any:
        """The body, read."""
        return json_module.loads(await self.body())

    @property
    def json_content(self) -> Any:
        """The body as far as it has come, read."""
        return json_module.loads(self.content)

    async def ended(self) -> None:
        """Return when the application is done with the request, observers told."""
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE_S)

    def leave(self) -> None:
        """Close the connection. Blocked writes return, as uvicorn's do."""
        self._left = True
        self._gone.set()
        self._writable.set()

    def disappear(self) -> None:
        """Close the connection, and leave a blocked write blocked: the worst that a server can do."""
        self._left = True
        self._gone.set()

    def stop_reading(self) -> None:
        """Block the application's next write."""
        self._writable.clear()

    @property
    def content(self) -> bytes:
        """The body as far as it has come."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def status(self) -> int:
        """The status that has come."""
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        """The headers that have come; asserts that none came twice."""
        pairs = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in self.messages[0]["headers"]]
        assert len(pairs) == len(dict(pairs)), pairs
        return dict(pairs)

    # The application's side

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._gone.is_set():
            return {"type": "http.disconnect"}
        if self._body:
            piece = self._body.popleft()
            self.taken_bytes += len(piece)
            return {"type": "http.request", "body": piece, "more_body": bool(self._body)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._writable.wait()
        if self._left:
            return
        assert not self._complete, f"after the end of the response: {message}"
        assert bool(self.messages) == (message["type"] == "http.response.body"), message
        self.messages.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True
            self._gone.set()
        self._news.set()

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not reached() and not self.task.done():
                self._news.clear()
                await self._news.wait()
        if not reached():
            self.task.result()
            raise AssertionError("the application ended without what was waited for")


@asynccontextmanager
async def request(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    key: str | None = None,
    headers: Headers = (),
    json: Any = None,
    content: bytes | Iterable[bytes] | None = None,
    root_path: str = "",
) -> AsyncIterator[Exchange]:
    """Send a request; inside, the exchange goes on. Then the client leaves and the application must end.

    Args:
        app: The application.
        method: GET, POST…
        path: As it stands in the request line, decoded.
        key: Sent as a bearer token.
        headers: Further headers.
        json: A body, with its content type and length.
        content: A body as it is, or in pieces; without a length.
        root_path: As uvicorn sets it; part of ``path`` then.
    """
    sent = [(b"host", b"testserver")]
    pieces: Iterable[bytes] = (content or b"",) if isinstance(content, bytes | None) else content
    if json is not None:
        whole = json_module.dumps(json).encode()
        pieces = (whole,)
        sent += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(whole))]
    if key is not None:
        sent.append((b"authorization", b"Bearer " + key.encode()))
    sent += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode(),
        "root_path": root_path,
        "headers": sent,
        "client": ("203.0.113.7", 50000),
        "server": ("testserver", 80),
        "state": {},
    }
    exchange = Exchange(app, scope, pieces)
    try:
        yield exchange
    finally:
        exchange.leave()
        try:
            await exchange.ended()
        finally:
            exchange.task.cancel()


async def fetch(app: ASGIApp, method: str, path: str, **options: Any) -> Exchange:
    """Send a request and take the whole answer."""
    async with request(app, method, path, **options) as exchange:
        await exchange.body()
    return exchange
