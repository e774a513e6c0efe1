"""The whole gateway over a fake engine: `app.server.Gateway`, built as the server builds it.

Owns `Stack`, with the settings and tenants that it stands on. Only the engine's process, the sockets and the
signals are missing; everything that a request meets is the real thing, vLLM's routers included.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from app.server import Gateway
from app.settings import load_settings
from app.tenants import digest_of

from .asgi import fetch, request, settle
from .tiny_model import tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from fastapi import FastAPI

    from app.core.record import Record
    from app.engine.launch import LoadedEngine
    from app.settings import Settings

    from .asgi import Exchange
    from .fake_engine import FakeCore, FakeEngine

MODEL = "tiny"
ACME, GLOBEX, NARROW, SHARED, SHARED_TOO, OPERATOR = (
    f"fg-{name}-0123456789abcdef" for name in ("acme", "globex", "narrow", "shared", "shared-too", "operator")
)
"""Keys of the tenants of the same names; `OPERATOR` belongs to none."""


def _tenant(id: str, key: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "keys": [{"id": f"k-{id}", "sha256": digest_of(key)}], **more}


TENANTS = {
    "tenants": [
        _tenant("acme", ACME),
        _tenant("globex", GLOBEX),
        _tenant("narrow", NARROW, models=["another-model"]),
        _tenant("shared", SHARED, flags=["shared_prefix_cache"]),
        _tenant("shared-too", SHARED_TOO, flags=["shared_prefix_cache"]),
    ],
    "operators": [{"id": "k-operator", "sha256": digest_of(OPERATOR)}],
}


def settings_in(directory: Path, **variables: str) -> Settings:
    """Settings over a tenants file in this directory; variables without their prefix."""
    file = directory / "tenants.yaml"
    file.write_text(yaml.safe_dump(TENANTS))
    given = {
        "ENGINE__MODEL": str(tiny_model()),
        "ENGINE__SERVED_MODEL_NAME": MODEL,
        "ENGINE__MAX_MODEL_LEN": "512",
        "ENGINE__ENFORCE_EAGER": "true",
        "AUTH__TENANTS_FILE": str(file),
        "AUTH__CACHE_SALT_SECRET": "a secret of the tests",
    }
    named = {f"FAIRGATE_{name}": value for name, value in (given | variables).items()}
    return load_settings(named, ()).settings


@cache
def _arguments(*flags: str) -> tuple[Any, Any]:
    """vLLM's arguments and configuration for these flags; seconds for the first, then shared."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from app.engine.launch import parse

    args = parse(list(flags))
    return args, AsyncEngineArgs.from_cli_args(args).create_engine_config()


@dataclass
class Watcher:
    """An `Observer` that keeps what it is told."""

    records: list[Record] = field(default_factory=list)

    def closed(self, record: Record) -> None:
        """Keep it."""
        self.records.append(record)


class Stack:
    """A gateway and its fake engine."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.registry = CollectorRegistry()
        self.gateway = Gateway(settings, self.registry)
        self.watcher = Watcher()
        self.gateway.edge._observers += (self.watcher,)
        self.app = self.gateway.edge
        self._engine: FakeEngine | None = None
        self.loaded: LoadedEngine

    @property
    def engine(self) -> FakeEngine:
        """The engine, once it has loaded."""
        assert self._engine is not None
        return self._engine

    @property
    def core(self) -> FakeCore:
        """What the engine computes with."""
        return self.engine.core

    @property
    def served(self) -> FastAPI:
        """The application that vLLM's routes are mounted on."""
        served = self.gateway.dispatch.served
        assert served is not None
        return served  # type: ignore[return-value]

    @property
    def records(self) -> list[Record]:
        """Of every request that has ended."""
        return self.watcher.records

    @property
    def record(self) -> Record:
        """Of the one request that has ended."""
        assert len(self.records) == 1, self.records
        return self.records[0]

    async def load(self) -> None:
        """The engine loads and makes its first token; vLLM's routes are mounted; the gateway is ready."""
        from app.engine import launch

        from .fake_engine import FakeCore, FakeEngine

        def start(args: Any, signals: Any) -> FakeEngine:
            self._engine = FakeEngine(config, FakeCore(), signals)
            return self._engine

        args, config = _arguments(*self.settings.engine.to_flags())
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(launch, "parse", return_value=args),
            mock.patch.object(launch, "_start", start),
        ):
            engine = await launch.load(self.settings.engine)
        self.core.arrived.clear()
        self.loaded = engine
        await self.gateway.open(engine)

    def running(self) -> dict[str, int]:
        """Sequences in the engine, by tenant."""
        assert self.gateway.admission is not None
        return dict(self.gateway.admission.snapshot().running)

    async def close(self) -> None:
        """End the engine's task, and look whether anything was left behind."""
        await settle()
        assert self.app.in_flight == 0
        if (admission := self.gateway.admission) is not None:
            admission.check_integrity()
            now = admission.snapshot()
            assert (dict(now.running), now.queued, now.reserved) == ({}, 0, 0)
        if self._engine is not None:
            await self._engine.close()
            assert not self._engine.output_processor.request_states

    # Requests

    def request(
        self, method: str, path: str, key: str | None = ACME, **options: Any
    ) -> AbstractAsyncContextManager[Exchange]:
        """Open an exchange, as acme unless another key is given."""
        return request(self.app, method, path, key=key, **options)

    async def fetch(self, method: str, path: str, key: str | None = ACME, **options: Any) -> Exchange:
        """The whole answer to a request."""
        return await fetch(self.app, method, path, key=key, **options)

    async def scrape(self) -> dict[tuple[str, ...], float]:
        """The metrics page: ``(name, *label values, labels in the alphabet's order)`` to value."""
        answer = await self.fetch("GET", "/metrics", OPERATOR)
        assert answer.status == 200
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.content.decode())
            for sample in family.samples
        }


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Stack]:
    """A ready stack; looked over at the end."""
    stack = Stack(settings)
    await stack.load()
    try:
        yield stack
    finally:
        await stack.close()


def chat(prompt: str = "Say something.", **more: Any) -> dict[str, Any]:
    """A chat completion's body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 3, **more}
