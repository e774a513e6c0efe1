"""`Answer`: one response on its way out, held back until the gate has decided.

Made by the edge for each request; it is the ``send`` and the ``receive`` that the application sees. Owns
what is true of every answer: the request id, errors in the family's form, refusals that stay refusals even
when the application has begun to answer.

Why hold back: vLLM's stream handlers answer 200 before they ask the engine, and write what then
goes wrong as an event into the stream. So the first messages are kept until the gate has
decided (`Record.decide`), or until a whole body has come without a decision. Starlette's gzip
responder keeps a response start in the same way. After that, chunks pass through a plain function
call: no coroutine is added per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import Outcome, Rejected
from . import errors

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Iterable

    from starlette.types import Message, Receive, Send

    from ..core.record import Record

REQUEST_ID = b"x-request-id"
_STREAM_DONE = b"data: [DONE]\n\n"
# At most so much is kept before the decision: a few events of a stream, or one whole answer.
_HELD_MESSAGES = 64


class Answer:
    """One response on its way out, and what is known of the client meanwhile.

    It is the ``send`` that the application sees. Three states, each a method that takes a message:
    `_hold` until the decision, `_pass` after it, `_pass_failed` once the engine has failed under a
    stream that has begun.
    """

    def __init__(self, record: Record, receive: Receive, send: Send, *, max_body_bytes: int) -> None:
        self.client_left = False
        self._max_body_bytes = max_body_bytes
        self._record = record
        self._receive = receive
        self._send = send
        # Mutable state: which method takes the next message, what is held, whether the last has gone
        self._body_bytes = 0
        self._take: Callable[[Message], Awaitable[None]] = self._hold
        self._held: list[Message] = []
        self._decided = False
        self._complete = False
        self._is_event_stream = False
        record.on_decision = self._on_decision
        record.on_failure = self._on_failure

    def __call__(self, message: Message) -> Awaitable[None]:
        return self._take(message)

    async def receive(self) -> Message:
        """The application's ``receive``; notes a client that leaves before the answer is complete."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._body_bytes += len(message.get("body", b""))
            if self._body_bytes > self._max_body_bytes:
                raise self._record.reject(self._body_too_large())
        elif not self._complete:
            self.client_left = True
        return message

    def cut(self, task: asyncio.Task[None] | None) -> None:
        """The client has stopped reading: it counts as gone, and the request's task ends."""
        if not self._complete and task is not None:
            self.client_left = True
            task.cancel()

    def check_length(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a body by its stated length, before a byte of it is read.

        Raises:
            Rejected: 413.
        """
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_body_bytes:
                raise self._record.reject(self._body_too_large())

    def _body_too_large(self) -> Rejected:
        return Rejected(
            Outcome.INVALID,
            f"The request body is larger than {self._max_body_bytes} bytes, the most that is read.",
            code="request_too_large",
            status=413,
            headers={"connection": "close"},
        )

    async def finish(self) -> None:
        """The application is done: let out what is held, or write the refusal in its place."""
        if self._record.status is None and not self.client_left:
            await self._flush()
        elif not self._complete and not self.client_left:
            # Begun, then broken off (the application raised in mid-stream): say so and end it, so
            # that no client takes it for complete.
            self._record.fail(self._record.failure or RuntimeError("the answer broke off"))
            told = b""
            if self._is_event_stream:
                told = errors.event(errors.failed(), path=self._record.path, request_id=self._record.id)
            await self._send({"type": "http.response.body", "body": told, "more_body": False})

    def _on_decision(self) -> None:
        self._decided = True

    def _on_failure(self) -> None:
        if self._take == self._pass:
            self._take = self._pass_failed

    def _pass(self, message: Message) -> Awaitable[None]:
        if not message.get("more_body", False):
            self._complete = True
        return self._send(message)

    async def _pass_failed(self, message: Message) -> None:
        if message.get("body") == _STREAM_DONE:
            message = {**message, "body": b""}
        await self._pass(message)

    async def _hold(self, message: Message) -> None:
        if self._record.rejection is not None or self.client_left:
            return  # whatever the application still says: the refusal is the answer, or nobody hears it
        self._held.append(message)
        if len(self._held) > _HELD_MESSAGES:
            raise RuntimeError("the application answers without asking the gate")
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        is_error = self._held[0]["status"] >= 400
        if last or (self._decided and not is_error and message["type"] == "http.response.body"):
            await self._flush()

    async def _flush(self) -> None:
        rejection = self._refusal()
        if rejection is not None:
            self._record.reject(rejection)
            await self._refuse(rejection)
            return
        start, *body = self._held
        self._held = []
        self._record.status = start["status"]
        headers = [(k, v) for k, v in start.get("headers", []) if k.lower() != REQUEST_ID]
        self._is_event_stream = any(
            k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers
        )
        await self._send({**start, "headers": headers + self._own_headers()})
        # The engine may have failed while that was on its way
        self._take = self._pass if self._record.failure is None else self._pass_failed
        for message in body:
            await self._take(message)

    def _refusal(self) -> Rejected | None:
        """What to answer instead of what is held, if anything."""
        if self._record.rejection is not None:
            return self._record.rejection
        if self._record.failure is not None or not self._held:
            return errors.failed()
        start, *body = self._held
        if start["status"] < 400:
            return None
        return errors.from_answer(start, b"".join(m.get("body", b"") for m in body))

    async def _refuse(self, rejection: Rejected) -> None:
        self._held = []
        self._record.status = rejection.status
        body = errors.render(rejection, path=self._record.path, request_id=self._record.id)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *((k.encode("latin-1"), v.encode("latin-1")) for k, v in rejection.headers.items()),
            *self._own_headers(),
        ]
        if rejection.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, rejection.retry_after_s)))
        await self._send({"type": "http.response.start", "status": rejection.status, "headers": headers})
        self._complete = True
        if self._record.method == "HEAD":
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._take = _drop

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        return [(REQUEST_ID, self._record.id.encode("ascii")), *self._record.headers.items()]


async def _drop(message: Message) -> None:
    """The refusal is out; the application may go on talking, to nobody."""
