"""Our own routes: is it alive, is it ready, what does it count.

Owns what operators and their tools ask. Called through `Dispatch`; liveness and readiness are the
only routes that answer without a key, and neither waits for the engine or for other requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..core.errors import Outcome, Rejected
from ..core.health import Phase
from ..core.record import current_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from ..core.health import Health
    from ..core.record import Record

OPEN_ROUTES: frozenset[str] = frozenset({"/livez", "/readyz", "/health"})
"""Answered without a key. ``/health`` is readiness under the name that vLLM's probes use."""

OPERATOR_ROUTES: frozenset[str] = frozenset({"/metrics"})

USAGE_ROUTE = "/usage"
"""A tenant's own limits, use and place in the queue."""

OPS_ROUTES: frozenset[str] = OPEN_ROUTES | OPERATOR_ROUTES | {USAGE_ROUTE}


RETRY_LOADING_S = 5
RETRY_DRAINING_S = 10
RETRY_DOWN_S = 30


def ops_app(
    health: Health,
    *,
    scrape: Callable[[], tuple[bytes, str]],
    usage: Callable[[Record], dict[str, Any]],
) -> ASGIApp:
    """The application of our own routes.

    Args:
        health: Read at each probe.
        scrape: The metrics page and its content type.
        usage: What the tenant of a Record may know of itself.
    """

    async def livez(request: Request) -> Response:
        return _answer(health.is_live, health)

    async def readyz(request: Request) -> Response:
        return _answer(health.is_ready, health)

    async def metrics(request: Request) -> Response:
        page, content_type = scrape()
        return Response(page, headers={"content-type": content_type})

    async def own_usage(request: Request) -> Response:
        record = _record()
        try:
            return JSONResponse(usage(record))
        except Rejected as rejection:
            raise record.reject(rejection) from None  # noted, or Starlette's 500 would go out before it

    return Starlette(
        routes=[
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/health", readyz),
            Route("/metrics", metrics),
            Route(USAGE_ROUTE, own_usage),
        ]
    )


def not_now(health: Health) -> Rejected:
    """The refusal of a server that is not ready, by its phase."""
    if health.phase is Phase.LOADING:
        return Rejected(Outcome.LOADING, "The model is still loading.", retry_after_s=RETRY_LOADING_S)
    if health.phase is Phase.DRAINING:
        return Rejected(
            Outcome.DRAINING,
            "The server is shutting down and takes no new requests.",
            retry_after_s=RETRY_DRAINING_S,
            headers={"connection": "close"},
        )
    return Rejected(
        Outcome.ENGINE_DOWN,
        "The engine is down.",
        retry_after_s=RETRY_DOWN_S,
        headers={"connection": "close"},
    )


def _answer(ok: bool, health: Health) -> Response:
    if ok:
        return JSONResponse({"status": "ok", "phase": health.phase})
    raise _record().reject(not_now(health))


def _record() -> Record:
    record = current_record.get()
    assert record is not None, "the edge opens a Record for every request"
    return record
