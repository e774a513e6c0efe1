"""Who may pass: every path and header that could open the gateway by accident (B25, B38)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import pytest

from app.core.errors import Outcome, Rejected
from app.core.record import Key, Principal, Record, Role, Tenant, current_record
from app.http.auth import Auth
from app.tenants import ANONYMOUS, TenantBook, Tenants, digest_of

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from app.http.tokens import TokenVerifier

NOW = datetime(2026, 6, 1, tzinfo=UTC)
ACME = Tenant("acme")
BOOK = TenantBook(
    {"acme": ACME},
    {
        digest_of("fg-acme"): Principal(Key("k-acme"), ACME),
        digest_of("fg-old"): Principal(Key("k-old", expires_at=NOW), ACME),
        digest_of("fg-boss"): Principal(Key("k-boss", role=Role.OPERATOR), ACME),
        digest_of("fg-ops"): Principal(Key("k-ops", role=Role.OPERATOR)),
    },
)


@dataclass
class Outcomes:
    """What one call through the layer did."""

    record: Record
    reached: bool = False
    sent: list[Message] = field(default_factory=list)
    refused: Rejected | None = None


async def call(
    path: str,
    *headers: tuple[str, str],
    method: str = "GET",
    kind: str = "http",
    root_path: str = "",
    disabled: bool = False,
    tokens: TokenVerifier | None = None,
) -> Outcomes:
    """Drive the layer with plain ASGI messages, as the edge would."""
    seen = Outcomes(Record(id="r", method=method, path=path, opened_s=0.0))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.reached = True

    async def receive() -> Message:
        raise AssertionError("the layer reads no body")

    async def send(message: Message) -> None:
        seen.sent.append(message)

    layer = Auth(
        app,
        tenants=Tenants(None, BOOK, on_reload=lambda ok, problem: None),
        open_routes=frozenset({"/livez"}),
        operator_routes=frozenset({"/metrics", "/docs"}),
        shared_routes=frozenset({"/v1/models", "/usage"}),
        tokens=tokens,
        disabled=disabled,
        clock=lambda: NOW,
    )
    scope: dict[str, Any] = {"type": kind, "method": method, "path": path, "root_path": root_path}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in headers]
    token = current_record.set(seen.record)
    try:
        await layer(scope, receive, send)
    except Rejected as rejection:
        seen.refused = rejection
    finally:
        current_record.reset(token)
    # The edge trusts the Record: a refusal that is only raised could be swallowed.
    assert seen.record.rejection is seen.refused
    return seen


def bearer(key: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {key}")


async def test_open_route_answers_without_a_key() -> None:
    """Liveness is for those who have none; nobody is put on the Record."""
    seen = await call("/livez")
    assert seen.reached
    assert seen.record.principal is None


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/chat/completions",
        "//v1/chat/completions",
        "/v1/../v1/chat/completions",
        "/livez/../v1/models",
        "/V1/models",
        "/v1/models/",
        "%2fv1/models",
        "/livez/",
        "//livez",
        "/LIVEZ",
        "/livez;x",
        "/gw/livez",
        "/docs",
        "/openapi.json",
        "/metrics",
        "/a-route-that-someone-adds-tomorrow",
        "/",
        "",
    ],
)
async def test_every_other_path_needs_a_key(path: str, method: str) -> None:
    """B25: only the exact open paths are open, whatever the method."""
    seen = await call(path, ("X-Forwarded-Prefix", "/gw"), ("X-Forwarded-For", "127.0.0.1"), method=method)
    assert not seen.reached
    assert seen.refused is not None
    assert (seen.refused.status, seen.refused.code) == (401, "invalid_api_key")
    assert seen.refused.headers == {"www-authenticate": "Bearer"}


@pytest.mark.parametrize(
    ("path", "reached"),
    [("/gw/livez", True), ("/livez", True), ("/gw/gw/livez", False), ("/gwlivez", False), ("/gw", False)],
)
async def test_prefix_set_by_the_operator_is_seen_as_the_router_sees_it(path: str, reached: bool) -> None:
    """`root_path` comes from settings; a path that lacks it is routed as it is."""
    assert (await call(path, root_path="/gw")).reached is reached


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer fg-acme")],
        [("Authorization", "bearer   fg-acme ")],
        [("X-Api-Key", "fg-acme")],
        [("x-api-key", "fg-acme"), ("Authorization", "BEARER fg-acme")],
        [("Authorization", "Basic Zm9v"), ("x-api-key", "fg-acme")],
    ],
)
async def test_key_is_taken_from_either_header(headers: list[tuple[str, str]]) -> None:
    """OpenAI's clients send one, Anthropic's the other, some both."""
    seen = await call("/v1/chat/completions", *headers)
    assert seen.reached
    assert seen.record.tenant is ACME


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer ")],
        [("Authorization", "Bearer")],
        [("Authorization", "fg-acme")],
        [("Authorization", "Basic fg-acme")],
        [("x-api-key", "")],
        [("api-key", "fg-acme")],
        [("Cookie", "key=fg-acme")],
    ],
)
async def test_request_without_a_credential_is_told_how_to_send_one(headers: list[tuple[str, str]]) -> None:
    """The challenge carries no error then (RFC 6750)."""
    seen = await call("/v1/models", *headers)
    assert seen.refused is not None
    assert "x-api-key" in seen.refused.message
    assert seen.refused.headers == {"www-authenticate": "Bearer"}


async def test_wrong_key_is_refused_without_repeating_it() -> None:
    """B38: a near miss is a secret too."""
    seen = await call("/v1/models", bearer("fg-acm"))
    assert seen.refused is not None
    assert (seen.refused.outcome, seen.refused.status) == (Outcome.UNAUTHENTICATED, 401)
    assert "fg-" not in seen.refused.message
    assert seen.refused.headers == {"www-authenticate": 'Bearer error="invalid_token"'}


async def test_expired_key_is_told_to_be_expired() -> None:
    """So that its owner asks for a new one instead of searching for a typing error."""
    seen = await call("/v1/models", bearer("fg-old"))
    assert seen.refused is not None
    assert seen.refused.status == 401
    assert "expired" in seen.refused.message


async def test_two_different_keys_are_refused() -> None:
    """A guess could charge the wrong tenant."""
    for headers in (
        [bearer("fg-acme"), ("x-api-key", "fg-boss")],
        [bearer("fg-acme"), bearer("fg-boss")],
    ):
        seen = await call("/v1/models", *headers)
        assert seen.refused is not None
        assert seen.refused.status == 401
        assert "more than one" in seen.refused.message
        assert "fg-" not in seen.refused.message


async def test_credential_that_is_not_text_is_a_wrong_key() -> None:
    """Any bytes may stand in a header."""
    seen = await call("/v1/models", ("Authorization", "Bearer \udcff".encode("utf-8", "replace").decode()))
    assert seen.refused is not None
    assert seen.refused.status == 401


@pytest.mark.parametrize(
    ("key", "path", "status"),
    [
        ("fg-acme", "/v1/chat/completions", None),
        ("fg-acme", "/usage", None),
        ("fg-acme", "/metrics", 403),
        ("fg-acme", "/metrics/", 403),
        ("fg-acme", "/docs/oauth2-redirect", 403),
        ("fg-acme", "/docsify", None),
        ("fg-boss", "/metrics", None),
        ("fg-boss", "/v1/chat/completions", None),
        ("fg-ops", "/metrics", None),
        ("fg-ops", "/usage", None),
        ("fg-ops", "/v1/models", None),
        ("fg-ops", "/v1/models/base", None),
        ("fg-ops", "/v1/chat/completions", 403),
        ("fg-ops", "/tokenize", 403),
    ],
)
async def test_role_decides_what_a_key_opens(key: str, path: str, status: int | None) -> None:
    """Tenants do not reach the operators' pages, and tokens are computed for tenants only."""
    seen = await call(path, bearer(key))
    assert seen.reached is (status is None)
    assert (seen.refused.status if seen.refused else None) == status


async def test_refused_role_leaves_the_principal_on_the_record() -> None:
    """So that the log tells whose key it was."""
    seen = await call("/metrics", bearer("fg-acme"))
    assert seen.record.tenant is ACME
    assert seen.refused is not None
    assert seen.refused.outcome is Outcome.FORBIDDEN


@pytest.mark.parametrize("headers", [[], [bearer("fg-acme")]])
async def test_websocket_is_closed_before_its_handshake(headers: list[tuple[str, str]]) -> None:
    """None is offered, with a key or without."""
    seen = await call("/v1/realtime", *headers, kind="websocket")
    assert not seen.reached
    assert [(message["type"], message["code"]) for message in seen.sent] == [("websocket.close", 1008)]


async def test_lifespan_passes() -> None:
    """Start-up has no key."""
    assert (await call("", kind="lifespan")).reached


async def test_everyone_is_anonymous_where_authentication_is_off() -> None:
    """Also with a key that would be somebody's, and on the operators' pages."""
    for path in ("/v1/models", "/metrics", "/v1/chat/completions"):
        seen = await call(path, bearer("fg-acme"), disabled=True)
        assert seen.reached
        assert seen.record.principal is ANONYMOUS


class FakeTokens:
    """Knows one token; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def verify(self, token: str, book: TenantBook) -> Principal | None:
        self.asked.append(token)
        if token == "down.for.now":
            raise Rejected(Outcome.UNAUTHENTICATED, "issuer", status=503, retry_after_s=3)
        return Principal(Key("jwt"), book.by_id("acme")) if token == "good.to.ken" else None


@pytest.mark.parametrize(
    ("token", "status", "asked"),
    [
        ("good.to.ken", None, 1),
        ("bad.to.ken", 401, 1),
        ("down.for.now", 503, 1),
        ("fg-acme", None, 0),
        ("x.y", 401, 0),
    ],
)
async def test_signed_token_is_tried_when_it_looks_like_one(
    token: str, status: int | None, asked: int
) -> None:
    """Three parts, and no key of ours; its own refusals are noted on the Record too."""
    tokens = FakeTokens()
    seen = await call("/v1/models", bearer(token), tokens=cast("TokenVerifier", tokens))
    assert (seen.refused.status if seen.refused else None) == status
    assert len(tokens.asked) == asked
    assert (seen.record.tenant is ACME) is (status is None)


async def test_missing_record_is_a_fault_of_ours() -> None:
    """Without the edge nothing would render the refusal or end the request."""
    layer = Auth(
        None,  # type: ignore[arg-type]
        tenants=Tenants(None, BOOK, on_reload=lambda ok, problem: None),
        open_routes=frozenset(),
        operator_routes=frozenset(),
        tokens=None,
        disabled=True,
        clock=lambda: NOW,
    )
    with pytest.raises(AssertionError, match="inside the edge"):
        await layer({"type": "http", "path": "/", "headers": []}, None, None)  # type: ignore[arg-type]
