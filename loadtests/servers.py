"""The servers under test: each a process of its own, in a process group of its own, always ended.

Owns their start, their logs and their end. Called by the scenarios. Both kinds get the very same engine
flags, which `EngineFlags` makes. The stock server is vLLM's as ``vllm serve`` runs it (started by
module, since the CPU build has no such command), without fairgate's plug-in in its processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from .client import Target
from .cpu import Stat, descendants, read_stat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HOST = "127.0.0.1"
_START_S = 240.0
_STOP_S = 20.0
_POLL_S = 0.25


class ServerFailed(Exception):
    """A server did not start, or ended by itself. Holds the end of its log."""


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """What both servers tell their engine, as flags of ``vllm serve``.

    Args:
        model: Directory or name.
        slots: Most sequences in a batch.
        more: Further flags, as they are.
    """

    model: str
    slots: int
    more: tuple[str, ...] = ()
    served_name: str = "loadtest"

    def to_list(self) -> list[str]:
        """The flags."""
        named = ["--model", self.model, "--served-model-name", self.served_name]
        return [*named, "--max-num-seqs", str(self.slots), *self.more]

    def to_show(self) -> list[str]:
        """The flags as a report may show them: a model's directory by its last name."""
        return ["--model", Path(self.model).name, *self.to_list()[2:]]


TINY_FLAGS = (
    "--dtype=float32",
    "--max-model-len=2048",
    "--kv-cache-memory-bytes=268435456",
    "--enforce-eager",
)
"""For the tests' tiny model on a small machine."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the gateway under test, with a fresh key."""

    id: str
    key: str

    @classmethod
    def new(cls, id: str) -> Tenant:
        """With a random key."""
        return cls(id, f"fg-{secrets.token_urlsafe(32)}")


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kind of server is started."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    ready_path: str
    port: int
    model: str
    key: str | None


def stock(flags: EngineFlags) -> Launch:
    """vLLM's own server with its defaults, but no access log: nobody shall win by logging."""
    port = free_port()
    module = "vllm.entrypoints.launchers.api_server.entry"
    place = ("--host", _HOST, "--port", str(port), "--disable-uvicorn-access-log")
    return Launch(
        name="stock",
        command=(sys.executable, "-m", module, *flags.to_list(), *place),
        # Set but empty: no plug-in is loaded.
        environment=_environment(VLLM_PLUGINS=""),
        ready_path="/health",
        port=port,
        model=flags.served_name,
        key=None,
    )


def fairgate(flags: EngineFlags, tenants: Sequence[Tenant], directory: Path) -> Launch:
    """The gateway with its defaults: keys, request log and metrics on.

    Args:
        flags: The engine's.
        tenants: Who may ask. The first one's key is the `Target`'s.
        directory: Where the tenants file is written.
    """
    port = free_port()
    file = directory / "tenants.yaml"
    file.write_text(yaml.safe_dump({"tenants": [_entry(tenant) for tenant in tenants]}))
    return Launch(
        name="fairgate",
        command=(
            *(sys.executable, "-m", "app", "serve", "--"),
            *(*flags.to_list(), "--host", _HOST, "--port", str(port)),
        ),
        environment=_environment(FAIRGATE_AUTH__TENANTS_FILE=str(file), FAIRGATE_LOG__FORMAT="json"),
        ready_path="/readyz",
        port=port,
        model=flags.served_name,
        key=tenants[0].key,
    )


@contextlib.contextmanager
def running(launch: Launch, directory: Path) -> Iterator[Target]:
    """Start the server, wait until it is ready; at the end stop it and all that it has started.

    Its log is ``directory/NAME.log``.

    Raises:
        ServerFailed: It did not get ready.
    """
    log = directory / f"{launch.name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            launch.command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=directory,  # no .env file of the caller's is read
            env=launch.environment,
            process_group=0,  # Ctrl-C is ours to pass on
        )
    patience_s = 0.0  # one that has not started has nothing to put in order
    try:
        _wait_ready(process, launch, log)
        patience_s = _STOP_S
        yield Target(_HOST, launch.port, launch.model, launch.key, process.pid)
        if process.poll() is not None:
            raise ServerFailed(_failure(launch, "ended under load", log))
    finally:
        _stop(process, patience_s)


def free_port() -> int:
    """A port that nobody listens on, just now."""
    with socket.socket() as sock:
        sock.bind((_HOST, 0))
        return int(sock.getsockname()[1])


def _environment(**more: str) -> dict[str, str]:
    """The caller's, without its settings for a gateway."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    return kept | {"VLLM_NO_USAGE_STATS": "1"} | more


def _entry(tenant: Tenant) -> dict[str, object]:
    digest = hashlib.sha256(tenant.key.encode()).hexdigest()
    return {"id": tenant.id, "keys": [{"id": f"{tenant.id}-1", "sha256": digest}]}


def _wait_ready(process: subprocess.Popen[bytes], launch: Launch, log: Path) -> None:
    end_s = time.monotonic() + _START_S
    url = f"http://{_HOST}:{launch.port}{launch.ready_path}"
    while True:
        if process.poll() is not None:
            raise ServerFailed(_failure(launch, f"ended with {process.returncode}", log))
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        if time.monotonic() > end_s:
            raise ServerFailed(_failure(launch, f"was not ready after {_START_S:.0f} s", log))
        time.sleep(_POLL_S)


def _failure(launch: Launch, what: str, log: Path) -> str:
    last = log.read_text(errors="replace").splitlines()[-15:]
    return f"the {launch.name} server {what}. The end of {log}:\n" + "\n".join(last)


def _stop(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """SIGTERM, some time, then SIGKILL to whatever is left of it, also where we are interrupted meanwhile."""
    started = descendants(process.pid)
    try:
        process.terminate()
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stat in started:
            _kill(stat)


def _kill(stat: Stat) -> None:
    """End a process that outlived its server, and no other that has got its number since."""
    now = read_stat(stat.pid)
    if now is not None and now.started == stat.started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stat.pid, signal.SIGKILL)
