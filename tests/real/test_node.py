"""The official Node client. `client.mjs` asks; its answers are checked here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.gateway import ALIAS, MODEL

if TYPE_CHECKING:
    from tests.support.gateway import Gateway

FOLDER = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def told(gateway: Gateway) -> dict[str, Any]:
    """What the client has seen, in one run."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing or not (FOLDER / "node_modules" / "openai").is_dir():
        notice = "the Node client is not installed: make test-services"
        if os.environ.get("CI"):
            pytest.fail(notice)
        pytest.skip(notice)
    run = subprocess.run(
        ["node", "client.mjs"],
        cwd=FOLDER,
        env={**os.environ, "BASE_URL": f"{gateway.url}/v1", "API_KEY": gateway.keys["acme"], "MODEL": MODEL},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


def test_chat(told: dict[str, Any]) -> None:
    """One answer."""
    assert told["chat"]["choices"][0]["message"]["role"] == "assistant"
    assert told["chat"]["usage"]["completion_tokens"] == 5


def test_stream(told: dict[str, Any]) -> None:
    """Deltas, and one usage at the end."""
    assert told["stream"]["text"]
    assert told["stream"]["usages"] == [5]
    assert told["stream"]["finish_reasons"] == ["length"]


def test_responses(told: dict[str, Any]) -> None:
    """Whole and streamed."""
    assert told["response"]["status"] == "incomplete"
    assert told["response_events"][0] == "response.created"
    assert told["response_events"][-1] in {"response.completed", "response.incomplete"}


def test_completion(told: dict[str, Any]) -> None:
    """A list of prompts."""
    assert [choice["index"] for choice in told["completion"]["choices"]] == [0, 1]


def test_models(told: dict[str, Any]) -> None:
    """The tenant's."""
    assert told["models"] == [MODEL, ALIAS]


@pytest.mark.parametrize(
    ("name", "kind", "status", "code", "param"),
    [
        ("bad_request", "BadRequestError", 400, "invalid_request", "temperature"),
        ("not_found", "NotFoundError", 404, "model_not_found", "model"),
        ("unauthenticated", "AuthenticationError", 401, "invalid_api_key", None),
    ],
)
def test_errors(
    told: dict[str, Any], name: str, kind: str, status: int, code: str, param: str | None
) -> None:
    """The client's own classes, with their fields."""
    error = told["errors"][name]
    assert (error["kind"], error["status"], error["code"], error["param"]) == (kind, status, code, param)
    assert error["message"]
    assert error["requestID"]
