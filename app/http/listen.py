"""The sockets: how uvicorn listens for the gateway, and the port for scrapers.

Owns what lies between the network and the edge. Called by ``server.py``, before anything heavy starts.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn
from prometheus_client import REGISTRY, start_http_server

from ..core.errors import StartError
from .app import Cors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp

    from ..settings import MetricsSettings, ServerSettings

_CUT_S = 2
"""Seconds that uvicorn gets to end what the drain has left over."""


class Server(uvicorn.Server):
    """uvicorn, without its own signal handling."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Signals are the gateway's."""
        return contextlib.nullcontext()


def with_cors(app: ASGIApp, server: ServerSettings) -> ASGIApp:
    """CORS around auth, so that a preflight needs no key; nothing where it is off."""
    if not server.cors_allow_origins and server.cors_allow_origin_regex is None:
        return app
    return Cors(
        app,
        allow_origins=server.cors_allow_origins,
        allow_origin_regex=server.cors_allow_origin_regex,
        allow_methods=("GET", "POST"),
        allow_headers=server.cors_allow_headers,
        expose_headers=("x-request-id", "retry-after"),
    )


def uvicorn_config(app: ASGIApp, server: ServerSettings) -> uvicorn.Config:
    """uvicorn's settings. No websockets, no lifespan protocol, no access log: the edge has its own line."""
    password = server.ssl_keyfile_password
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=server.root_path,
        proxy_headers=server.proxy_headers,
        forwarded_allow_ips=list(server.forwarded_allow_ips),
        timeout_keep_alive=server.timeout_keep_alive_s,
        timeout_graceful_shutdown=_CUT_S,
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
        ssl_keyfile_password=password.get_secret_value() if password else None,
        ssl_ca_certs=str(server.ssl_ca_certs) if server.ssl_ca_certs else None,
    )


@contextlib.contextmanager
def listener(server: ServerSettings) -> Iterator[socket.socket]:
    """The listening socket, bound before anything heavy is started."""
    host, port = server.host, server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port} (FAIRGATE_SERVER__PORT): {error}") from error
    with sock:
        yield sock


@contextlib.contextmanager
def scraped(metrics: MetricsSettings) -> Iterator[None]:
    """The metrics on a port of their own, without a key, where one is set."""
    if metrics.port is None:
        yield
        return
    try:
        scraper, _ = start_http_server(metrics.port, metrics.host, registry=REGISTRY)
    except OSError as error:
        raise StartError(f"cannot listen on FAIRGATE_METRICS__PORT={metrics.port}: {error}") from error
    try:
        yield
    finally:
        scraper.shutdown()
