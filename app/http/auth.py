"""Who is asking: an ASGI layer that puts the principal on the Record, or refuses.

Owns `Auth`, the second layer, right inside the edge, which has set `current_record` and renders what is
raised here. Deny by default: what answers without a key is a list of exact paths, compared with the very
path that Starlette will route by. ``//v1/models``, ``/V1/models``, a trailing slash, a path that only
exists under a prefix of the client's choice: all need a key like any other.

Neither log lines nor messages ever hold a credential or a part of one; a key's id names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette._utils import get_route_path  # private, but the router's own: guard and router must agree

from ..core.errors import Outcome, Rejected
from ..core.record import current_record
from ..tenants import ANONYMOUS, KeyExpired

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from starlette.types import ASGIApp, Receive, Scope, Send

    from ..core.record import Principal
    from ..tenants import Tenants
    from .tokens import TokenVerifier

POLICY_VIOLATION = 1008
"""WebSocket close code (RFC 6455); before the handshake servers turn it into 403."""


class Auth:
    """Finds the principal of every request.

    Args:
        app: What to call for those who may pass.
        tenants: The book of the moment is asked at each request.
        open_routes: Paths that answer without a key, exact.
        operator_routes: Paths, with all below them, for operators only.
        shared_routes: Paths, with all below them, that an operator's key without a tenant opens beside
            the operators' own. The rest computes for a tenant, so somebody must pay.
        tokens: Accept signed tokens too.
        disabled: Everyone is `ANONYMOUS`, keys are not looked at.
        clock: The time, with a zone.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tenants: Tenants,
        open_routes: frozenset[str],
        operator_routes: frozenset[str],
        shared_routes: frozenset[str] = frozenset({"/v1/models"}),
        tokens: TokenVerifier | None,
        disabled: bool,
        clock: Callable[[], datetime],
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._open_routes = open_routes
        self._operator_routes = operator_routes
        self._shared_routes = shared_routes
        self._tokens = tokens
        self._disabled = disabled
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let pass, or raise the `Rejected` that the edge renders."""
        if scope["type"] == "websocket":  # none is served; a key does not change that
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "not offered"})
            return
        if scope["type"] == "http" and (path := get_route_path(scope)) not in self._open_routes:
            record = current_record.get()
            assert record is not None, "Auth must be mounted inside the edge, which opens the Record"
            try:
                record.principal = await self._principal(scope)
                self._check_role(record.principal, path)
            except Rejected as rejection:
                raise record.reject(rejection) from None
        await self._app(scope, receive, send)

    async def _principal(self, scope: Scope) -> Principal:
        if self._disabled:
            return ANONYMOUS
        token = _credential(scope)
        book = self._tenants.book
        try:
            principal = book.resolve(token, self._clock())
        except KeyExpired:
            raise _unauthenticated("This API key has expired.", error="invalid_token") from None
        if principal is None and self._tokens is not None and token.count(".") == 2:
            principal = await self._tokens.verify(token, book)
        if principal is None:
            raise _unauthenticated("Incorrect API key provided.", error="invalid_token")
        return principal

    def _check_role(self, principal: Principal, path: str) -> None:
        if _is_below(path, self._operator_routes):
            if not principal.is_operator:
                raise Rejected(
                    Outcome.FORBIDDEN,
                    "This page is for operators: it needs a key with the role 'operator'.",
                    code="operator_key_required",
                )
        elif principal.tenant is None and not _is_below(path, self._shared_routes):
            raise Rejected(
                Outcome.FORBIDDEN,
                "This is an operator's key without a tenant, so there is no account for the tokens. "
                "Use a tenant's key here.",
                code="tenant_key_required",
            )


def _credential(scope: Scope) -> str:
    """The one credential of a request, whichever header brings it."""
    found = set(_credentials(scope))
    if not found:
        raise _unauthenticated(
            "You didn't provide an API key. Send it in the header 'Authorization: Bearer YOUR_KEY' "
            "or 'x-api-key: YOUR_KEY'."
        )
    if len(found) > 1:  # a guess could charge the wrong tenant
        raise _unauthenticated(
            "The headers bring more than one API key, and they differ. "
            "Send one, in 'Authorization' or in 'x-api-key'."
        )
    return found.pop()


def _credentials(scope: Scope) -> Iterator[str]:
    for name, value in scope["headers"]:
        text = value.decode("utf-8", "replace").strip()
        if name == b"authorization":
            scheme, _, text = text.partition(" ")
            text = text.strip() if scheme.lower() == "bearer" else ""
        elif name != b"x-api-key":
            continue
        if text:
            yield text


def _unauthenticated(message: str, *, error: str | None = None) -> Rejected:
    # RFC 6750: no error code where no credential came.
    challenge = f'Bearer error="{error}"' if error else "Bearer"
    return Rejected(
        Outcome.UNAUTHENTICATED, message, code="invalid_api_key", headers={"www-authenticate": challenge}
    )


def _is_below(path: str, routes: frozenset[str]) -> bool:
    return any(path == route or path.startswith(f"{route}/") for route in routes)
