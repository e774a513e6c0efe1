"""The process around the requests: start, signals, drain, and a death that is told (B10, B32)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from app import server
from app.core.errors import StartError
from app.core.health import Phase
from app.server import Gateway

from .support.asgi import eventually, settle
from .support.stack import OPERATOR, Stack, chat, settings_in

if TYPE_CHECKING:
    from pathlib import Path


async def ask(port: int, request: str) -> str:
    """An answer over a real socket, status line first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return answer


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_port_answers_while_the_engine_loads_and_a_signal_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Liveness 200, readiness 503, the API 503; no waiting for a load that nobody wants any more."""
    settings = settings_in(tmp_path, SERVER__PORT=str(free_port()))
    port, abandoned = settings.server.port, asyncio.Event()

    async def load_for_ever(settings: object) -> None:
        await asyncio.Event().wait()

    async def abandon(loading: asyncio.Task[object]) -> None:
        loading.cancel()
        abandoned.set()

    monkeypatch.setattr(server, "_load", load_for_ever)
    monkeypatch.setattr(server, "_abandon", abandon)
    monkeypatch.setattr(server, "REGISTRY", CollectorRegistry())
    gateway = Gateway(settings, CollectorRegistry())
    with gateway.signals():
        async with gateway.listening():
            loading = asyncio.create_task(gateway.load())
            assert (await ask(port, "GET /livez")).startswith("HTTP/1.1 200")
            ready = await ask(port, "GET /readyz")
            assert ready.startswith("HTTP/1.1 503")
            assert "retry-after: " in ready
            assert (await ask(port, "GET /v1/models")).startswith("HTTP/1.1 401")
            os.kill(os.getpid(), number)
            assert await loading is None
    assert abandoned.is_set()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await ask(port, "GET /livez")


async def test_taken_port_is_told_with_its_variable(tmp_path: Path) -> None:
    """Before anything heavy is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = settings_in(tmp_path, SERVER__PORT=str(taken.getsockname()[1]))
        with pytest.raises(StartError, match="FAIRGATE_SERVER__PORT"):
            async with Gateway(settings, CollectorRegistry()).listening():
                pass


async def test_drain_lets_running_requests_finish(stack: Stack) -> None:
    """New ones are refused with a time to come back; the process ends when the last is done."""
    stack.core.automatic = False
    gateway = stack.gateway
    async with stack.request("POST", "/v1/chat/completions", json=chat(stream=True)) as running:
        await settle()
        stack.core.emit()
        await running.chunk()
        with gateway.signals():
            ending = asyncio.create_task(gateway.until_stopped(stack.loaded))
            os.kill(os.getpid(), signal.SIGTERM)
            await eventually(lambda: gateway.health.phase is Phase.DRAINING)
            refused = await stack.fetch("POST", "/v1/chat/completions", json=chat())
            assert refused.status == 503
            assert (await stack.fetch("GET", "/livez", None)).status == 200
            assert not ending.done()
            stack.core.emit(2, finish="stop")
            await running.body()
            await ending
    assert running.content.endswith(b"data: [DONE]\n\n")


async def test_second_signal_hurries(stack: Stack) -> None:
    """What still runs then is cut off."""
    stack.core.automatic = False
    async with stack.request("POST", "/v1/chat/completions", json=chat(stream=True)):
        await settle()
        with stack.gateway.signals():
            ending = asyncio.create_task(stack.gateway.until_stopped(stack.loaded))
            os.kill(os.getpid(), signal.SIGTERM)
            await eventually(lambda: stack.gateway.health.phase is Phase.DRAINING)
            os.kill(os.getpid(), signal.SIGTERM)
            await ending


async def test_dead_engine_ends_the_server_with_its_reason(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with exit code 0, and not before its clients were told."""
    stack.core.die()
    await settle()
    with pytest.raises(StartError, match="engine core has ended"):
        await stack.gateway.until_stopped(stack.loaded)
    assert (await stack.fetch("GET", "/livez", None)).status == 503
    page = await stack.fetch("GET", "/metrics", OPERATOR)
    assert b"fairgate_engine_up 0.0" in page.content


async def test_hangup_reloads_the_tenants(stack: Stack) -> None:
    """SIGHUP, for those who do not trust file watching."""
    stack.settings.auth.tenants_file.write_text("tenants: [")
    with stack.gateway.signals():
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(
            lambda: (
                stack.registry.get_sample_value("fairgate_config_reloads_total", {"result": "failed"}) == 1
            )
        )


async def test_everyone_may_ask_where_auth_is_disabled(tmp_path: Path) -> None:
    """As one tenant, metrics included: said in the setting's own words."""
    stack = Stack(settings_in(tmp_path, AUTH__DISABLED="true"))
    await stack.load()
    assert (await stack.fetch("POST", "/v1/chat/completions", None, json=chat())).status == 200
    assert (await stack.fetch("GET", "/metrics", None)).status == 200
    await stack.close()
