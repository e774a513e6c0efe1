"""The gateway process: builds every object once, in the order a request meets them, and ends them.

Owns the two phases of the start and the one end. `serve` is called by ``fairgate serve``.

1. Before torch is imported: tenants, observers, edge, auth, our own routes. The port answers:
   liveness 200, readiness and the API 503.
2. Off the loop's path: the engine loads and makes one token. Then admission, gate and vLLM's routes
   are built, mounted, and opened.
3. SIGTERM: readiness 503, new requests refused while the listener still answers; what runs may
   finish, bounded; then the engine ends, and the process.

Signals are taken here and not by uvicorn, which raises a caught signal again when it is done:
nothing after it would run, and the engine would outlive its gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import multiprocessing
import secrets
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

from .admission.admission import Admission
from .core.errors import StartError
from .core.health import Health
from .http.app import DOCS_ROUTES, Dispatch, explain_validation, new_served_app, restrict
from .http.auth import Auth
from .http.edge import Edge
from .http.listen import Server, listener, scraped, uvicorn_config, with_cors
from .http.ops import OPEN_ROUTES, OPERATOR_ROUTES, not_now, ops_app
from .parts import open_store, open_tenants, policy_of, token_verifier
from .telemetry.logs import RequestLog, adopt
from .telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from prometheus_client import CollectorRegistry

    from .core.record import Record
    from .engine.launch import LoadedEngine
    from .settings import Settings

log = logging.getLogger(__name__)

_WATCH_S = 0.25
"""Seconds between looks at whether the engine lives."""
_LOOK_S = 1.0
"""Seconds between looks at which clients have stopped reading."""
_TELL_S = 5.0
"""Seconds that running requests get to tell their clients that the engine is gone."""


async def serve(settings: Settings) -> None:
    """Run the gateway until it is told to stop.

    Raises:
        StartError: The port is taken, the engine did not load, or it has ended.
        TenantsError: The tenants file cannot be used.
    """
    gateway = Gateway(settings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(gateway.close_store)  # last: also the requests that are cut off settle
        stack.enter_context(gateway.signals())
        await stack.enter_async_context(gateway.listening())
        engine = await gateway.load()
        if engine is None:
            return
        stack.push_async_callback(engine.close)
        await gateway.open(engine)
        stack.enter_context(gateway.cutting_stalled())
        # What the start has made lives as long as the process: no collection need look at it again.
        gc.collect()
        gc.freeze()
        await gateway.until_stopped(engine)


class Gateway:
    """Every object of the process, built once. Read `__init__` first: it is the way of a request."""

    def __init__(self, settings: Settings, registry: CollectorRegistry = REGISTRY) -> None:
        self._settings = settings
        self.health = Health()
        self.tenants = open_tenants(settings, self._on_reload)
        self.metrics = Metrics(registry, tenants=self.tenants.book.tenants, quiet_routes=OPEN_ROUTES)
        self.tenants.subscribe(lambda old, new: self.metrics.set_tenants(new.tenants))
        ops = ops_app(self.health, scrape=self.metrics.scrape, usage=self._usage)
        self.dispatch = Dispatch(ops, self.health)
        auth = Auth(
            self.dispatch,
            tenants=self.tenants,
            open_routes=OPEN_ROUTES,
            operator_routes=OPERATOR_ROUTES | DOCS_ROUTES,
            tokens=token_verifier(settings),
            disabled=settings.auth.disabled,
            clock=lambda: datetime.now(UTC),
        )
        self.edge = Edge(
            with_cors(auth, settings.server),
            observers=[self.metrics, RequestLog(quiet_routes=OPEN_ROUTES)],
            clock=time.monotonic,
            max_body_bytes=settings.server.max_body_bytes,
        )
        self.store = open_store(settings.admission, self.metrics.store_is_up)
        self.admission: Admission | None = None
        """Made when the engine has loaded, from its sizes."""
        # Mutable state: what the signals ask for
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop, a second one hurries; SIGHUP reloads the tenants."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            (self._hurry if self._stop.is_set() else self._stop).set()

        def reload() -> None:
            # Kept: the loop alone does not hold a task
            self._reloading = loop.create_task(self.tenants.reload())

        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Inside, the port answers and the tenants file is watched.

        Raises:
            StartError: The port cannot be had.
        """
        with listener(self._settings.server) as sock, scraped(self._settings.metrics):
            server = Server(uvicorn_config(self.edge, self._settings.server))
            serving = asyncio.create_task(server.serve(sockets=[sock]), name="uvicorn")
            watching = asyncio.create_task(self.tenants.watch(), name="tenants")
            try:
                yield
            finally:
                watching.cancel()
                server.should_exit = True
                await asyncio.gather(serving, watching, return_exceptions=True)

    async def load(self) -> LoadedEngine | None:
        """Load the engine; ``None`` if a signal comes first.

        Raises:
            StartError: With the engine's own reason.
        """
        loading = asyncio.create_task(_load(self._settings), name="load")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stop.is_set():
            await _abandon(loading)
            return None
        return loading.result()

    async def open(self, engine: LoadedEngine) -> None:
        """The model's routes answer from here on."""
        server = self._settings.server
        app = new_served_app(root_path=server.root_path, docs=server.docs)
        secret = self._settings.auth.cache_salt_secret
        admission = Admission(
            engine.facts, store=self.store, policy=policy_of(self._settings.admission), clock=time.monotonic
        )
        admission.on_tenants(self.tenants.book.tenants)
        self.tenants.subscribe(lambda old, new: admission.on_tenants(new.tenants))
        engine.signals.listener = admission.on_signals
        self.admission = admission
        self.metrics.watch(admission)
        self._gate = await engine.mount(
            app,
            admission=admission,
            salt_secret=secret.get_secret_value().encode() if secret else secrets.token_bytes(32),
            clock=time.monotonic,
        )
        adopt("vllm")
        restrict(app)
        explain_validation(app)
        self.dispatch.show_limits = admission.show_limits
        self.dispatch.served = app
        self.health.ready()
        self.metrics.engine_is_up(True)
        log.info("ready", extra={"listening": f"{server.host}:{server.port}", **asdict(engine.facts)})

    @contextlib.contextmanager
    def cutting_stalled(self) -> Iterator[None]:
        """Inside, also while it drains, clients that do not read are cut off."""

        async def cut() -> None:
            while True:
                await asyncio.sleep(_LOOK_S)
                self._gate.cut_stalled(self._settings.server.client_stall_s)

        task = asyncio.create_task(cut(), name="stalled")
        try:
            yield
        finally:
            task.cancel()

    async def until_stopped(self, engine: LoadedEngine) -> None:
        """Serve until a signal, then drain.

        Raises:
            StartError: The engine has ended first.
        """
        while not self._stop.is_set() and engine.death is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _WATCH_S)
        if engine.death is not None:
            self.health.down(engine.death)
            self.metrics.engine_is_up(False)
            self._close_admission()
            await self._idle(_TELL_S)
            raise StartError(engine.death)
        self.health.drain()
        self._close_admission()
        log.info("draining", extra={"in_flight": self.edge.in_flight})
        if not await self._idle(self._settings.server.drain_timeout_s):
            log.warning("cut off", extra={"in_flight": self.edge.in_flight})

    async def close_store(self) -> None:
        """Tell the store of everything that has ended, and give it back."""
        if self.admission is not None:
            await self.admission.settled()
        await self.store.close()

    def _close_admission(self) -> None:
        """Nobody waits for a turn any more: who queues is told at once, and may go elsewhere."""
        assert self.admission is not None, "the engine has loaded"
        self.admission.close(lambda: not_now(self.health))

    def _usage(self, record: Record) -> dict[str, Any]:
        if self.admission is None:
            raise not_now(self.health)
        return self.admission.usage(record)

    async def _idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight, the time is over, or a second signal hurries."""
        idle = asyncio.create_task(self.edge.wait_idle())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({idle, hurry}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        is_idle = idle.done()
        for task in (idle, hurry):
            task.cancel()
        return is_idle

    def _on_reload(self, ok: bool, problem: str | None) -> None:
        self.metrics.reloaded(ok)
        if ok:
            log.info("tenants reloaded")
        else:
            log.error("tenants not reloaded, the old state holds", extra={"problem": problem})


async def _load(settings: Settings) -> LoadedEngine:
    """Import vllm and start the engine; both off the loop, since both take their time."""
    launch = await asyncio.to_thread(importlib.import_module, "app.engine.launch")
    adopt("vllm")
    try:
        loaded: LoadedEngine = await launch.load(
            settings.engine, keep_alive_s=settings.admission.keep_alive_s
        )
    except launch.LoadError as error:
        raise StartError(f"the engine did not start: {error}") from error
    return loaded


async def _abandon(loading: asyncio.Task[LoadedEngine]) -> None:
    """End a load that is under way: without its processes, it fails soon."""
    while not loading.done():
        for child in multiprocessing.active_children():
            child.kill()
        await asyncio.wait({loading}, timeout=_WATCH_S)
    if not loading.cancelled() and loading.exception() is None:
        await loading.result().close()
