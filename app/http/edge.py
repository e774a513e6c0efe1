"""The outermost layer: opens the Record of each HTTP request, and closes it.

Owns the Record from its first moment to its last: its request id, its place in ``current_record``, the last
release, and the observers, who are told once. Called by the server for every request; calls auth, and through
it the application. What the client hears meanwhile is ``answer.py``'s.

What always holds: the Record decides the outcome, not the exception that arrives here (stream
handlers swallow exceptions), and `Record.release` runs in the edge's ``finally`` (a generator's
own ``finally`` may wait for garbage collection when the client is gone).
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from typing import TYPE_CHECKING

from ..core.errors import Outcome, Rejected
from ..core.record import Record, current_record
from .answer import REQUEST_ID, Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from ..core.observer import Observer

log = logging.getLogger(__name__)

_WELL_FORMED_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")


class Edge:
    """ASGI application around the whole gateway.

    Args:
        app: The next layer (auth).
        observers: Told once per request, after everything is released.
        clock: Monotonic seconds.
        max_body_bytes: A request body above it is answered 413 without being read whole.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        observers: Iterable[Observer],
        clock: Callable[[], float],
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._observers = tuple(observers)
        self._clock = clock
        # Mutable state
        self._in_flight: set[Record] = set()
        self._emptied = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Edge {len(self._in_flight)} in flight>"

    @property
    def in_flight(self) -> int:
        """Requests whose Record is open."""
        return len(self._in_flight)

    async def wait_idle(self) -> None:
        """Return when no request is in flight."""
        while self._in_flight:
            self._emptied.clear()
            await self._emptied.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Websockets are refused by the server's configuration, the lifespan is the server's own.
            raise RuntimeError(f"{scope['type']} is not served")
        record = self._open(scope)
        answer = Answer(record, receive, send, max_body_bytes=self._max_body_bytes)
        token = current_record.set(record)
        task = asyncio.current_task()
        record.on_cut = lambda: answer.cut(task)
        try:
            answer.check_length(scope["headers"])
            await self._app(scope, answer.receive, answer)
            await answer.finish()
        except Rejected as rejection:
            record.reject(rejection)
            await answer.finish()
        except Exception as fault:
            if record.rejection is None:
                record.fail(fault)
            await answer.finish()
        except BaseException as cut:
            if not answer.client_left:
                record.fail(cut)  # the server ends this request's task before it has an answer
                raise
        finally:
            current_record.reset(token)
            self._close(record, client_left=answer.client_left)

    def _open(self, scope: Scope) -> Record:
        request_id = _take_request_id(scope)
        record = Record(id=request_id, method=scope["method"], path=scope["path"], opened_s=self._clock())
        self._in_flight.add(record)
        return record

    def _close(self, record: Record, *, client_left: bool) -> None:
        self._in_flight.discard(record)
        record.release()
        record.close(self._clock(), client_left=client_left)
        if record.outcome is Outcome.FAILED:
            # Once, here: vLLM's handlers swallow what they cannot answer.
            log.error("request %s failed", record.id, exc_info=record.failure)
        for observer in self._observers:
            try:
                observer.closed(record)
            except Exception:
                log.exception("an observer failed on request %s", record.id)
        if not self._in_flight:
            self._emptied.set()


def _take_request_id(scope: Scope) -> str:
    """The client's ``X-Request-Id`` if it is well-formed, else a new one; the application sees the same.

    vLLM makes its response ids from this header, so one id names the request everywhere.
    """
    headers = scope["headers"]
    sent = [value for name, value in headers if name == REQUEST_ID]
    chosen = sent[0] if len(sent) == 1 and _WELL_FORMED_ID.match(sent[0]) else uuid.uuid4().hex.encode()
    scope["headers"] = [(n, v) for n, v in headers if n != REQUEST_ID] + [(REQUEST_ID, chosen)]
    return bytes(chosen).decode("ascii")
