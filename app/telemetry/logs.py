"""Log lines: JSON for machines, columns for people, one line a request.

Owns the logging configuration of the process (structlog over the standard library, so that
uvicorn's and vLLM's lines look the same) and `RequestLog`, told of each ended request by the edge.
A key or a prompt never reaches a line: the Record holds neither.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Literal, TextIO

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core.record import Record

Format = Literal["auto", "json", "console"]


def configure(level: str, format: Format, stream: TextIO | None = None) -> None:
    """Set up the root logger. Called once, by ``fairgate serve``.

    Args:
        level: Least level written.
        format: ``auto`` is columns on a terminal, JSON elsewhere.
        stream: Standard error by default.
    """
    stream = stream or sys.stderr
    shared: list[structlog.types.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
    ]
    is_console = format == "console" or (format == "auto" and stream.isatty())
    renderer: list[structlog.types.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
        if is_console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It tells of every change in the tenants file's directory; of a change in the file we tell.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def adopt(name: str) -> None:
    """Let a library that brought handlers of its own write through ours."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True


class RequestLog:
    """An `Observer`: one line for each ended request, probes apart.

    Args:
        quiet_routes: Probes.
        log: Takes the event and its fields.
    """

    def __init__(self, *, quiet_routes: frozenset[str], log: Callable[..., object] | None = None) -> None:
        self._quiet_routes = quiet_routes
        self._log = log or structlog.stdlib.get_logger("fairgate.request").info

    def closed(self, record: Record) -> None:
        """Write the line."""
        if record.route in self._quiet_routes or record.outcome is None:
            return
        self._log(
            "request",
            id=record.id,
            tenant=record.tenant.id if record.tenant else None,
            key=record.principal.key.id if record.principal else None,
            route=record.route,
            model=record.model,
            outcome=record.outcome.value,
            status=record.status,
            prompt_tokens=record.usage.prompt_tokens,
            cached_tokens=record.usage.cached_tokens,
            completion_tokens=record.usage.completion_tokens,
            wait_s=_since(record.opened_s, record.decided_s),
            ttft_s=_since(record.opened_s, record.first_token_s),
            duration_s=_since(record.opened_s, record.closed_s),
        )


def _since(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round(end_s - start_s, 4)
