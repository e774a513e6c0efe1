"""Cases from the field that need no engine: what other gateways got wrong, over the whole stack.

B02 (middleware that hides a disconnect), B17 (error bodies), B27 (a revoked key), B28 (several workers), B38
(secrets in logs). Their other halves are in ``test_endings.py``, ``http/`` and ``real/``.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from app.core.errors import Outcome
from app.telemetry import logs
from app.tenants import digest_of

from .support.asgi import settle
from .support.stack import ACME, GLOBEX, MODEL, NARROW, OPERATOR, TENANTS, Stack, chat

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from .support.asgi import Exchange

APP = Path(__file__).parents[1] / "app"

# B02: a middleware of that kind hides the client's disconnect from vLLM's handlers


def test_no_middleware_stands_between_client_and_handlers() -> None:
    """No BaseHTTPMiddleware, no ``@app.middleware``, in any form."""
    for file in APP.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                    assert name not in {"BaseHTTPMiddleware", "middleware", "add_middleware"}, file


async def test_served_app_has_no_middleware_at_all(stack: Stack) -> None:
    """vLLM's routers bring one that adds a coroutine to each token."""
    assert stack.served.user_middleware == []


# B17: the form of every error

OPENAI_PATH, ANTHROPIC_PATH = "/v1/chat/completions", "/v1/messages"


async def _with_broken_engine(stack: Stack, path: str) -> Exchange:
    stack.core.refuse = KeyError("/root/secret.py", object())
    return await stack.fetch("POST", path, json=chat())


async def _with_dead_engine(stack: Stack, path: str) -> Exchange:
    stack.core.die()
    await settle()
    return await stack.fetch("POST", path, json=chat())


async def _while_draining(stack: Stack, path: str) -> Exchange:
    stack.gateway.health.drain()
    return await stack.fetch("POST", path, json=chat())


async def _while_loading(stack: Stack, path: str) -> Exchange:
    stack.gateway.dispatch.served = None
    return await stack.fetch("POST", path, json=chat())


def _sending(key: str | None = ACME, **options: Any) -> Callable[[Stack, str], Awaitable[Exchange]]:
    async def send(stack: Stack, path: str) -> Exchange:
        return await stack.fetch(options.get("method", "POST"), path, key, **rest)

    rest = {name: value for name, value in options.items() if name != "method"}
    return send


_AS_JSON = [("Content-Type", "application/json")]
ERRORS: dict[str, tuple[int, Callable[[Stack, str], Awaitable[Exchange]]]] = {
    "no key": (401, _sending(None, json=chat())),
    "wrong key": (401, _sending("fg-acme-0123456789abcdeX", json=chat())),
    "two keys": (401, _sending(json=chat(), headers=[("X-Api-Key", GLOBEX)])),
    "model not allowed": (403, _sending(NARROW, json=chat())),
    "operator's key": (403, _sending(OPERATOR, json=chat())),
    "unknown model": (404, _sending(json=chat(model="nobody's"))),
    "wrong method": (405, _sending(method="DELETE")),
    "body too large": (413, _sending(content=b"{}", headers=[("Content-Length", "99999999999")])),
    "no JSON": (400, _sending(content=b"{'a': 1}", headers=_AS_JSON)),
    "no body": (400, _sending(content=b"", headers=_AS_JSON)),
    "not text": (400, _sending(content=b"\xff\xfe{}", headers=_AS_JSON)),
    "nested too deep": (400, _sending(content=b'{"a":' + b"[" * 5000, headers=_AS_JSON)),
    "other content type": (400, _sending(content=b"<a/>", headers=[("Content-Type", "text/xml")])),
    "field missing": (400, _sending(json={"model": MODEL})),
    "field of another type": (400, _sending(json=chat(max_tokens="many"))),
    "field out of range": (400, _sending(json=chat(temperature=-3))),
    "too long": (400, _sending(json=chat("word " * 600))),
    "more than fits": (400, _sending(json=chat(max_tokens=100_000))),
    "broken engine": (500, _with_broken_engine),
    "dead engine": (503, _with_dead_engine),
    "draining": (503, _while_draining),
    "loading": (503, _while_loading),
}


@pytest.mark.parametrize("path", [OPENAI_PATH, ANTHROPIC_PATH])
@pytest.mark.parametrize("error", ERRORS)
async def test_every_error_has_its_familys_form(stack: Stack, error: str, path: str) -> None:
    """Strict body, JSON, a request id, a status of the right class, and nothing of the inside."""
    status, cause = ERRORS[error]
    answer = await cause(stack, path)
    assert answer.status == status, answer.content
    assert answer.headers["content-type"] == "application/json"
    body = answer.json_content
    if path == ANTHROPIC_PATH:
        assert body["type"] == "error"
        assert body["request_id"] == answer.headers["x-request-id"]
        assert set(body) == {"type", "error", "request_id"}
        assert set(body["error"]) == {"type", "message"}
        told = body["error"]
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        told = body["error"]
        assert isinstance(told["code"], str)
        assert told["param"] is None or isinstance(told["param"], str)
    assert isinstance(told["type"], str)
    assert_tells_nothing(told["message"])
    if status == 401:
        assert answer.headers["www-authenticate"].startswith("Bearer")
    if status == 405:
        assert "POST" in answer.headers["allow"]
    if status == 503:
        assert int(answer.headers["retry-after"]) >= 1


async def test_unknown_path_has_openais_form(stack: Stack) -> None:
    """404, whatever Starlette's router says."""
    answer = await stack.fetch("GET", "/v1/nothing")
    assert answer.status == 404
    assert set(answer.json_content["error"]) == {"message", "type", "param", "code"}
    assert_tells_nothing(answer.json_content["error"]["message"])


def assert_tells_nothing(message: object) -> None:
    """Words for a client: no repr, no traceback, no path of the host, no library's name or address."""
    assert isinstance(message, str)
    assert message
    for inside in (r"Traceback", r"<[a-z_.]+ object", r"File \"", r"\.py\b", r"/root", r"/usr", r"/tmp"):
        assert not re.search(inside, message), message
    for inside in ("pydantic", "Error(", "{'", "https://errors", "vllm"):
        assert inside not in message, message


# B27: keys and tenants that change while requests run


async def test_revoked_key_is_refused_at_once_and_its_running_request_finishes(stack: Stack) -> None:
    """And stays refused when that request has ended: nothing writes the old state back."""
    stack.core.automatic = False
    file = stack.settings.auth.tenants_file
    async with stack.request("POST", "/v1/chat/completions", json=chat()) as running:
        await settle()
        kept = [entry for entry in TENANTS["tenants"] if entry["id"] != "acme"]
        file.write_text(yaml.safe_dump({**TENANTS, "tenants": kept}))
        assert await stack.gateway.tenants.reload()
        assert (await stack.fetch("POST", "/v1/chat/completions", json=chat())).status == 401
        stack.core.emit(2, finish="stop")
        await running.body()
        assert running.status == 200
    assert stack.records[-1].usage.completion_tokens == 2
    assert stack.records[-1].tenant is not None
    assert (await stack.fetch("POST", "/v1/chat/completions", json=chat())).status == 401
    stack.core.automatic = True
    assert (await stack.fetch("POST", "/v1/chat/completions", GLOBEX, json=chat())).status == 200
    page = await stack.scrape()
    assert not [name for name in page if "acme" in name], "series of a removed tenant end"
    assert page["fairgate_requests_total", "finished", "other"] == 1


async def test_broken_tenants_file_keeps_the_old_state_and_is_counted(stack: Stack) -> None:
    """A syntax error locks nobody out and lets nobody in."""
    stack.settings.auth.tenants_file.write_text("tenants: [")
    assert not await stack.gateway.tenants.reload()
    assert (await stack.fetch("POST", "/v1/chat/completions", json=chat())).status == 200
    assert (await stack.scrape())["fairgate_config_reloads_total", "failed"] == 1


async def test_new_key_opens_after_a_reload(stack: Stack) -> None:
    """Without a restart."""
    new = {"id": "new", "keys": [{"id": "k-new", "sha256": digest_of("fg-new")}]}
    stack.settings.auth.tenants_file.write_text(
        yaml.safe_dump({**TENANTS, "tenants": [*TENANTS["tenants"], new]})
    )
    assert (await stack.fetch("POST", "/v1/chat/completions", "fg-new", json=chat())).status == 401
    assert await stack.gateway.tenants.reload()
    assert (await stack.fetch("POST", "/v1/chat/completions", "fg-new", json=chat())).status == 200
    assert (await stack.scrape())["fairgate_requests_total", "finished", "new"] == 1


# B28: one process, one registry


# The command as it is, but for the gateway that it would run: one scrape instead.
SCRAPE = """
import uvloop
from app.commands.serve import serve
from app.settings import load_settings

def scrape(gateway):
    gateway.close()
    from prometheus_client import CollectorRegistry, values
    from app.telemetry.metrics import Metrics
    metrics = Metrics(CollectorRegistry(), tenants=["acme"], quiet_routes=frozenset())
    metrics.engine_is_up(True)
    page, _ = metrics.scrape()
    assert b"fairgate_engine_up 1.0" in page
    assert values.ValueClass is values.MutexValue, "values go through files"
    print("scraped")

uvloop.run = scrape
serve(load_settings({"FAIRGATE_ENGINE__MODEL": "m"}, ()).settings)
"""


@pytest.mark.parametrize("directory", ["missing", "stale"])
def test_multiprocess_directory_of_prometheus_is_not_used(tmp_path: Path, directory: str) -> None:
    """Neither does a missing one break ``/metrics``, nor do old numbers rise again."""
    place = tmp_path / directory
    if directory == "stale":
        place.mkdir()
        (place / "counter_1.db").write_bytes(b"\xff" * 64)
    before = sorted(place.iterdir()) if place.exists() else None
    ended = subprocess.run(
        [sys.executable, "-c", SCRAPE],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(place)},
        cwd=APP.parent,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "scraped" in ended.stdout
    assert (sorted(place.iterdir()) if place.exists() else None) == before


# B38: no secret and no prompt in what the gateway writes

PROMPT = "sentinel-prompt-7c1f"


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """All log lines at debug level, as the server writes them."""
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    logs.configure("debug", "json", stream)
    logs.adopt("vllm")
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


async def test_no_key_and_no_prompt_is_ever_written(written: io.StringIO, stack: Stack) -> None:
    """Log at debug level, metrics, error bodies; a traceback, and a key that is nearly right."""
    near_miss = ACME[:-1] + "X"
    sent = chat(PROMPT)
    answers = [
        await stack.fetch("POST", "/v1/chat/completions", json=sent),
        await stack.fetch("POST", "/v1/chat/completions", near_miss, json=sent),
        await stack.fetch(
            "POST", "/v1/chat/completions", None, json=sent, headers=[("X-Api-Key", near_miss)]
        ),
        await stack.fetch("POST", "/v1/chat/completions", json={**sent, "temperature": -1}),
        await stack.fetch("POST", "/v1/chat/completions", json={**sent, "messages": [{"role": 7}]}),
        await stack.fetch("POST", "/v1/messages", json=sent),
        await stack.fetch("GET", "/metrics", OPERATOR),
        await stack.fetch("GET", "/openapi.json", OPERATOR),
    ]
    stack.core.refuse = RuntimeError("a fault")
    for stream in (True, False):
        answers.append(await stack.fetch("POST", "/v1/chat/completions", json={**sent, "stream": stream}))
        assert answers[-1].status == 500
    stack.core.refuse = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack.engine, "generate", None)  # a fault in the gateway itself, with its traceback
        answers.append(await stack.fetch("POST", "/v1/chat/completions", json=sent))
        assert answers[-1].status == 500
    text = written.getvalue()
    assert "Traceback" in text
    assert "k-acme" in text
    for place in (text, *(answer.content.decode() for answer in answers[1:])):
        for secret in (ACME, near_miss, OPERATOR, digest_of(ACME), PROMPT, "a secret of the tests"):
            assert secret not in place


async def test_each_request_is_one_line(written: io.StringIO, stack: Stack) -> None:
    """Who, what, how it ended, how long; probes write none."""
    await stack.fetch("GET", "/livez", None)
    await stack.fetch("POST", "/v1/chat/completions", json=chat(), headers=[("X-Request-Id", "r-1")])
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    (line,) = [line for line in lines if line.get("logger") == "fairgate.request"]
    assert line["id"] == "r-1"
    assert line["tenant"] == "acme"
    assert line["outcome"] == Outcome.FINISHED
    assert line["completion_tokens"] == 3
    assert line["duration_s"] >= line["ttft_s"] >= line["wait_s"] >= 0
