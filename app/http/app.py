"""What is served under which path: our own routes, and those of vLLM's that stand on the allow-list.

Owns the allow-list, the application that vLLM's routers are mounted on, and `Dispatch`, the layer
behind auth that sends a request to the one or the other. Built by ``server.py``; the served
application arrives later, when the engine has loaded (Starlette freezes handlers and middleware at
the first call, so it is a second application, mounted then).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from ..core.errors import Outcome, Rejected
from ..core.record import current_record
from . import errors
from .ops import OPS_ROUTES, not_now

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ..core.health import Health
    from ..core.record import Record

SERVED_ROUTES: frozenset[str] = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/score",
        "/v1/score",
        "/classify",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    }
)
"""Of vLLM's routes, those that answer. The rest is taken off: what vLLM adds is closed until read."""

DEADLINE_HEADER = "x-request-deadline"
"""Seconds to the first token after which the client has no use for the answer."""
MOST_DEADLINE_S = 86_400
QUEUE_HEADER = "x-fairgate-queue"
"""Asks for ``x-fairgate-position`` and ``x-fairgate-wait`` on the answer."""

DOCS_ROUTES: frozenset[str] = frozenset({"/docs", "/openapi.json"})
"""FastAPI's own, over exactly the routes above."""


def new_served_app(*, root_path: str, docs: bool) -> FastAPI:
    """The application that vLLM's routers are mounted on."""
    return FastAPI(
        title="Fairgate",
        summary="The OpenAI-compatible API of this host's model.",
        root_path=root_path,
        docs_url="/docs" if docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if docs else None,
        # A path with a stray slash is another path: it is not there. No redirect past auth's exact match.
        redirect_slashes=False,
    )


def restrict(app: FastAPI) -> list[str]:
    """Take off every route that is not on the allow-list, and every middleware.

    vLLM's instrumentator would wrap ``send``: a coroutine more for each token, and counts that we have.

    Returns:
        The paths taken off.
    """
    allowed = SERVED_ROUTES | DOCS_ROUTES
    closed = [route for route in app.router.routes if _path(route) not in allowed or _is_websocket(route)]
    app.router.routes[:] = [route for route in app.router.routes if route not in closed]
    app.user_middleware.clear()
    return sorted({_path(route) for route in closed})


def explain_validation(app: FastAPI) -> None:
    """Answer a body that does not validate in our words, instead of vLLM's dump of pydantic's errors."""

    async def handler(request: Request, invalid: Exception) -> Response:
        assert isinstance(invalid, RequestValidationError)
        record = current_record.get()
        assert record is not None, "the edge opens a Record for every request"
        record.reject(errors.from_validation(invalid.errors()))
        return Response(status_code=400)  # the edge writes the refusal in its place

    app.add_exception_handler(RequestValidationError, handler)


class Dispatch:
    """The layer behind auth: ours, the model's, or "not now".

    Args:
        ops: Our own routes.
        health: The phase; API routes answer only while it is READY.
    """

    def __init__(self, ops: ASGIApp, health: Health) -> None:
        self._ops = ops
        self._health = health
        self.served: ASGIApp | None = None
        """Set once, when the engine has loaded."""
        self.show_limits: Callable[[Record], None] | None = None
        """Puts on an answer how its tenant stands with its limits, whatever the answer will be."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = current_record.get()
        assert record is not None, "the edge opens a Record for every request"
        path = get_route_path(scope)
        if path in OPS_ROUTES:
            record.route = path
            await self._ops(scope, receive, send)
            return
        if path in SERVED_ROUTES or path in DOCS_ROUTES:
            record.route = path
        if self.served is None or not self._health.is_ready:
            raise record.reject(not_now(self._health))
        if self.show_limits is not None:
            self.show_limits(record)
        _read_wishes(record, scope)
        await self.served(scope, receive, send)


def _read_wishes(record: Record, scope: Scope) -> None:
    """What a client may ask of admission by header: a deadline, and to hear how it stood in the queue.

    Raises:
        Rejected: 400, the deadline is no number of seconds.
    """
    headers = Headers(scope=scope)
    record.tells_queue = QUEUE_HEADER in headers
    text = headers.get(DEADLINE_HEADER)
    if text is None:
        return
    try:
        deadline_s = float(text)
    except ValueError:
        deadline_s = 0.0
    if not 0 < deadline_s <= MOST_DEADLINE_S:  # false for NaN too
        raise record.reject(
            Rejected(
                Outcome.INVALID,
                f"{DEADLINE_HEADER} must be a number of seconds above 0, {MOST_DEADLINE_S} at most.",
                code="invalid_request",
                param=DEADLINE_HEADER,
            )
        )
    record.deadline_s = deadline_s


class Cors(CORSMiddleware):
    """Starlette's CORS, without its wrapper around each chunk: the edge adds the headers instead.

    Stands outside auth, so that a preflight needs no key.
    """

    async def simple_response(
        self, scope: Scope, receive: Receive, send: Send, request_headers: Headers
    ) -> None:
        """Compute the headers once, put them on the Record, and step aside."""
        record = current_record.get()
        assert record is not None, "the edge opens a Record for every request"

        async def keep(message: Message) -> None:
            record.headers.update(message["headers"])

        await self.send({"type": "http.response.start", "headers": []}, keep, request_headers)
        await self.app(scope, receive, send)


def _path(route: BaseRoute) -> str:
    return str(getattr(route, "path", ""))


def _is_websocket(route: BaseRoute) -> bool:
    return not getattr(route, "methods", None)
