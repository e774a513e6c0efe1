"""Log lines: one form for all libraries, one line a request."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from app.core.errors import Outcome
from app.core.record import Record
from app.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _root_stays() -> Iterator[None]:
    """The process's own logging is put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """What was written, read."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_libraries_lines_are_json_too() -> None:
    """uvicorn's and vLLM's, with their extra fields and their tracebacks on one line."""
    stream = io.StringIO()
    logs.configure("info", "auto", stream)
    theirs = logging.getLogger("theirs")
    theirs.info("hello %s", "you", extra={"port": 8000})
    theirs.debug("too fine")
    try:
        raise ValueError("broken")
    except ValueError:
        theirs.exception("failed")
    hello, failed = lines(stream)
    assert hello["event"] == "hello you"
    assert (hello["level"], hello["logger"], hello["port"]) == ("info", "theirs", 8000)
    assert hello["timestamp"].endswith("Z")
    assert "ValueError: broken" in failed["exception"]


def test_people_get_columns() -> None:
    """Where they ask for them, or on a terminal."""
    stream = io.StringIO()
    logs.configure("info", "console", stream)
    logging.getLogger("theirs").info("hello")
    assert "hello" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_library_with_handlers_of_its_own_is_adopted() -> None:
    """vLLM brings one; its lines would come twice, or in another form."""
    stream, theirs = io.StringIO(), logging.getLogger("adopted")
    theirs.addHandler(logging.NullHandler())
    theirs.propagate = False
    logs.configure("info", "json", stream)
    logs.adopt("adopted")
    theirs.info("once")
    assert [line["event"] for line in lines(stream)] == ["once"]


def test_request_is_one_line_and_a_probe_is_none() -> None:
    """Times are seconds since the request was opened; what did not happen is null."""
    written: list[dict[str, Any]] = []
    log = logs.RequestLog(
        quiet_routes=frozenset({"/livez"}), log=lambda event, **fields: written.append(fields)
    )
    record = Record("r", "GET", "/v1/models", 10.0, route="/v1/models", status=401)
    record.outcome, record.closed_s = Outcome.UNAUTHENTICATED, 10.25
    log.closed(record)
    record.route = "/livez"
    log.closed(record)
    (line,) = written
    assert line["duration_s"] == 0.25
    assert line["ttft_s"] is line["wait_s"] is line["tenant"] is line["key"] is None
    assert (line["outcome"], line["status"]) == ("unauthenticated", 401)
