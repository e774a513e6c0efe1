"""What is served under which path, with auth around it: the allow-list, CORS, documentation (B25)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest
from fastapi import FastAPI

from app.core.errors import Outcome
from app.http.app import DOCS_ROUTES, SERVED_ROUTES, new_served_app, restrict
from app.http.ops import OPEN_ROUTES, OPS_ROUTES

from ..support.stack import ACME, OPERATOR, Stack, chat, opened, settings_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CLOSED = frozenset(
    {
        "/docs/oauth2-redirect",
        "/generative_scoring",
        "/health",
        "/inference/v1/abort_requests",
        "/inference/v1/generate",
        "/invocations",
        "/is_scaling_elastic_ep",
        "/kv_event_sources",
        "/load",
        "/metrics",
        "/ping",
        "/scale_elastic_ep",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages/render",
        "/v1/realtime",
        "/v1/responses/render",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/systemone",
        "/v2/embed",
        "/version",
    }
)
"""What vLLM mounts and we take off: engine control, other protocols' forms, stored and split requests."""


def routes(app: FastAPI) -> dict[str, frozenset[str]]:
    """Methods by path."""
    found: dict[str, frozenset[str]] = {}
    for route in app.router.routes:
        path = str(getattr(route, "path", ""))
        found[path] = found.get(path, frozenset()) | frozenset(getattr(route, "methods", None) or ())
    return found


async def test_every_route_of_vllms_is_allowed_or_known_as_closed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the model can do. A release that mounts something new fails here: read it, then list it."""
    from vllm.entrypoints.launchers.api_server.routers import register_api_routers
    from vllm.entrypoints.pooling import factories
    from vllm.tasks import SupportedTask

    monkeypatch.setattr(factories, "enable_scoring_api", lambda tasks, config: True)
    app = new_served_app(root_path="", docs=True)
    app.state.args = stack.served.state.args
    register_api_routers(app.state.args, app, get_args(SupportedTask), stack.engine.model_config)
    assert set(restrict(app)) == CLOSED
    assert set(routes(app)) == SERVED_ROUTES | DOCS_ROUTES


async def test_nothing_that_is_served_lies_in_the_open(stack: Stack) -> None:
    """Every path, every method, without a key: 401, and no work for the engine."""
    for path in (*routes(stack.served), *OPS_ROUTES - OPEN_ROUTES):
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            answer = await stack.fetch(method, path, None, json=chat())
            assert answer.status == 401, (method, path)
    assert {record.outcome for record in stack.records} == {Outcome.UNAUTHENTICATED}
    assert stack.core.arrived == []


@pytest.mark.parametrize(
    "path",
    [
        "//v1/chat/completions",
        "/v1/../v1/chat/completions",
        "/livez/../v1/chat/completions",
        "/V1/chat/completions",
        "/v1/chat/completions/",
        "%2fv1/chat/completions",
        "/livez/",
        "//livez",
        "/LIVEZ",
        "/docs",
        "/openapi.json",
        "/redoc",
        "/metrics",
        "/metrics/",
        "/gw/v1/models",
        "/nowhere",
        "",
        "*",
    ],
)
async def test_variants_of_a_path_need_a_key(stack: Stack, path: str) -> None:
    """A guard that reads a path otherwise than the router does would let one through."""
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        answer = await stack.fetch(
            method, path, None, json=chat(), headers=[("X-Forwarded-Prefix", "/livez")]
        )
        assert answer.status == 401
    assert stack.core.arrived == []


async def test_variants_of_a_path_are_no_routes(stack: Stack) -> None:
    """With a key they are not there: no redirect, no second name for a route."""
    for path in ("//v1/models", "/V1/models", "/v1/models/", "/v1/../v1/models", "/redoc"):
        answer = await stack.fetch("GET", path)
        assert answer.status == 404, path


async def test_root_path_moves_no_guard(stack: Stack) -> None:
    """Behind a proxy's prefix the same paths are open and closed, without it too."""
    for prefix in ("", "/gw"):
        options: dict[str, Any] = {"root_path": "/gw", "json": chat()}
        assert (await stack.fetch("GET", f"{prefix}/livez", None, root_path="/gw")).status == 200
        path = f"{prefix}/v1/chat/completions"
        assert (await stack.fetch("POST", path, None, **options)).status == 401
        assert (await stack.fetch("POST", path, **options)).status == 200
        assert (await stack.fetch("GET", f"{prefix}/metrics", root_path="/gw")).status == 403


async def test_route_that_is_added_is_denied(stack: Stack) -> None:
    """By default: it needs a key even if somebody mounts it after the allow-list was applied."""
    hits: list[str] = []

    @stack.served.get("/added")
    async def added() -> str:
        hits.append("hit")
        return "open"

    assert (await stack.fetch("GET", "/added", None)).status == 401
    assert hits == []


def test_route_that_is_mounted_is_taken_off() -> None:
    """Unless it stands on the list: routes, sub-applications, websockets under a listed path."""
    app = new_served_app(root_path="", docs=True)
    app.mount("/admin", FastAPI())
    app.add_api_route("/v1/models", lambda: None)
    app.add_api_route("/added", lambda: None)
    app.add_api_websocket_route("/v1/responses", lambda: None)
    closed = restrict(app)
    assert {"/admin", "/added", "/v1/responses"} <= set(closed)
    assert set(routes(app)) == {"/v1/models", *DOCS_ROUTES}


@pytest.mark.parametrize("path", ["/metrics", "/docs", "/openapi.json"])
async def test_tenants_key_opens_no_page_of_the_operators(stack: Stack, path: str) -> None:
    """403 for a tenant, 200 for an operator."""
    assert (await stack.fetch("GET", path, ACME)).status == 403
    assert (await stack.fetch("GET", path, OPERATOR)).status == 200


async def test_operators_key_generates_nothing(stack: Stack) -> None:
    """There is no account for the tokens."""
    assert (await stack.fetch("POST", "/v1/chat/completions", OPERATOR, json=chat())).status == 403
    assert stack.core.arrived == []


async def test_docs_show_exactly_what_is_served(stack: Stack) -> None:
    """No route of vLLM's that is closed."""
    answer = await stack.fetch("GET", "/openapi.json", OPERATOR)
    assert set(answer.json_content["paths"]) == set(routes(stack.served)) - DOCS_ROUTES


async def test_docs_can_be_switched_off(tmp_path: Path) -> None:
    """They are then no route."""
    async with opened(settings_in(tmp_path, SERVER__DOCS="false")) as stack:
        assert (await stack.fetch("GET", "/docs", OPERATOR)).status == 404
        assert (await stack.fetch("GET", "/openapi.json", OPERATOR)).status == 404


async def test_unknown_route_labels_no_metric(stack: Stack) -> None:
    """A route is a known path, never the client's text."""
    await stack.fetch("GET", "/clients-text")
    assert stack.record.route == "other"
    await stack.fetch("GET", "/v1/models")
    assert stack.records[-1].route == "/v1/models"


# CORS


@pytest.fixture
async def with_cors(tmp_path: Path) -> AsyncIterator[Stack]:
    """A gateway that one origin's pages may call."""
    settings = settings_in(tmp_path, SERVER__CORS_ALLOW_ORIGINS='["https://chat.example.com"]')
    async with opened(settings) as stack:
        yield stack


ORIGIN = ("Origin", "https://chat.example.com")
PREFLIGHT = [ORIGIN, ("Access-Control-Request-Method", "POST")]


async def test_preflight_needs_no_key(with_cors: Stack) -> None:
    """Browsers send none with it."""
    answer = await with_cors.fetch("OPTIONS", "/v1/chat/completions", None, headers=PREFLIGHT)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN[1]
    assert "x-request-id" in answer.headers


async def test_preflight_of_another_origin_is_refused(with_cors: Stack) -> None:
    """And says no origin."""
    headers = [("Origin", "https://evil.example.com"), PREFLIGHT[1]]
    answer = await with_cors.fetch("OPTIONS", "/v1/chat/completions", None, headers=headers)
    assert answer.status == 400
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_says_its_origin(with_cors: Stack, stream: bool) -> None:
    """Streams too, and the headers that a page may read."""
    answer = await with_cors.fetch("POST", "/v1/chat/completions", json=chat(stream=stream), headers=[ORIGIN])
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN[1]
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


async def test_refusal_says_its_origin_too(with_cors: Stack) -> None:
    """Otherwise a page sees a network error instead of a 401."""
    answer = await with_cors.fetch("POST", "/v1/chat/completions", None, json=chat(), headers=[ORIGIN])
    assert answer.status == 401
    assert answer.headers["access-control-allow-origin"] == ORIGIN[1]


async def test_cors_is_off_by_default(stack: Stack) -> None:
    """A preflight is then a request without a key."""
    answer = await stack.fetch("OPTIONS", "/v1/chat/completions", None, headers=PREFLIGHT)
    assert answer.status == 401
    answer = await stack.fetch("GET", "/v1/models", headers=[ORIGIN])
    assert not [name for name in answer.headers if name.startswith("access-control")]
