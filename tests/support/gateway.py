"""`Gateway`: ``fairgate serve`` as a process of its own, on a real engine, with tenants made for it.

Owns the process from its first line to its last: its directory, its port, its settings file, its tenants,
and what it printed. Used by ``tests/real``. Everything waits with a bound, and what a process has left
behind is found by its directory and ended, whatever the test did.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.tenants.edit import new_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

MODEL = "tiny"
ALIAS = "tiny-alias"
"""Two names of one model: a tenant may be allowed one of them."""
TOKEN = "hf_sentinel0123456789abcdefghijk"
"""The hub's token: nobody but the environment may ever show it."""

READY_S = 240
"""Most seconds from start to ready: 20 to 30 on two idle cores, more where others work too."""
_COMMAND = Path(sys.executable).with_name("fairgate")
_POLL_S = 0.05
_TAIL_LINES = 60

_TENANTS = {
    "umbrella": "",
    "narrow": f"    models: [{ALIAS}]\n",
    "outsider": "    models: [some-other-model]\n",
    "sharing-one": "    flags: [shared_prefix_cache]\n",
    "sharing-two": "    flags: [shared_prefix_cache]\n",
}
"""Beside acme, which comes by ``fairgate keys create`` as in life."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One answer of a gateway that is starting."""

    route: str
    status: int
    retry_after: str | None
    took_s: float


class Gateway:
    """A ``fairgate serve`` in a directory of its own.

    Args:
        home: An empty directory.
        model: The checkpoint's directory.
        settings: Further variables, without the prefix: ``{"ENGINE__SEED": "1"}``.
        port: Taken from the system if not given.
    """

    def __init__(
        self, home: Path, model: Path, settings: Mapping[str, str] | None = None, *, port: int | None = None
    ) -> None:
        self.home = home
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = home / "stderr.log"
        self.out_path = home / "stdout.log"
        self.sightings: list[Sighting] = []
        self.keys = self._make_tenants()
        self._write_settings(model, settings or {})
        self.process = self._spawn()

    def __repr__(self) -> str:
        return f"<Gateway pid {self.process.pid} at {self.url}>"

    @property
    def log(self) -> str:
        """What it has printed to standard error so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def last_line(self) -> str:
        """The last line on standard error."""
        return self.log.rstrip("\n").rpartition("\n")[2]

    def tail(self) -> str:
        """The end of the log, for a failed test's report."""
        return "\n".join(line[:500] for line in self.log.splitlines()[-_TAIL_LINES:])

    # The start

    def wait_listening(self, within_s: float = 120) -> None:
        """Until the port takes connections."""

        def accepts() -> bool:
            self._check_runs()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return True
            return False

        eventually(accepts, within_s)

    def wait_ready(self, within_s: float = READY_S) -> None:
        """Until it is ready; what it answers meanwhile is kept in `sightings`."""
        self.wait_listening()
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 1}
        with self.http(self.keys["acme"], timeout=10) as client:

            def is_ready() -> bool:
                try:
                    self._sight("/livez", lambda: client.get("/livez"))
                    self._sight("/v1/models", lambda: client.get("/v1/models"))
                    self._sight(
                        "/v1/chat/completions", lambda: client.post("/v1/chat/completions", json=chat)
                    )
                    return self._sight("/readyz", lambda: client.get("/readyz")).status == 200
                except httpx.TransportError:
                    self.exit_code(within_s=30)
                    self._check_runs()
                    raise

            eventually(is_ready, within_s, poll_s=0.5)

    def _sight(self, route: str, ask: Callable[[], httpx.Response]) -> Sighting:
        begun_s = time.monotonic()
        answer = ask()
        took_s = time.monotonic() - begun_s
        self.sightings.append(Sighting(route, answer.status_code, answer.headers.get("retry-after"), took_s))
        return self.sightings[-1]

    def _check_runs(self) -> None:
        if self.process.poll() is not None:
            raise AssertionError(f"the gateway ended with {self.process.returncode}:\n{self.tail()}")

    # While it runs

    def http(self, key: str | None = None, *, timeout: float = 60) -> httpx.Client:
        """A plain client with a key."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def post_blind(self, key: str, path: str, body: Mapping[str, Any]) -> socket.socket:
        """Send a request without waiting for its answer. Closing the socket is the client that vanishes."""
        content = json.dumps(body)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        sock = socket.create_connection(("127.0.0.1", self.port), 10)
        sock.sendall((head + content).encode())
        return sock

    def metrics(self) -> str:
        """The metrics page."""
        with self.http(self.keys["operator"], timeout=10) as client:
            return client.get("/metrics").raise_for_status().text

    def value(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        return value_in(self.metrics(), name, **labels)

    def wait_idle(self, within_s: float = 30) -> None:
        """Until the engine runs nothing and holds nothing."""
        eventually(lambda: is_idle(self.metrics()), within_s)

    def processes(self) -> dict[int, str]:
        """Every process of the gateway's that lives, with its title. They all share its directory."""
        return dict(_processes_in(self.home))

    def engine_core(self) -> int:
        """The process id of the engine core."""
        (pid,) = (pid for pid, title in self.processes().items() if title.startswith("VLLM::EngineCore"))
        return pid

    # The end

    def exit_code(self, within_s: float) -> int:
        """Wait for its end."""
        return self.process.wait(timeout=within_s)

    def end(self) -> None:
        """Ask it to end, then make sure of it. For fixtures: says nothing about how it ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)  # the second one hurries
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=20)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=10)

    # What it is started with

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("FAIRGATE_")}
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with self.log_path.open("wb") as log, self.out_path.open("wb") as out:
            return subprocess.Popen(
                [_COMMAND, "serve", "--env-file", self.home / "gateway.env"],
                cwd=self.home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                # A group of its own, for signals, but no session: Linux shares the CPU out by sessions, and
                # on two cores a spinning engine in another one keeps a client waiting for seconds.
                process_group=0,
            )

    def _write_settings(self, model: Path, settings: Mapping[str, str]) -> None:
        variables = {
            "SERVER__PORT": str(self.port),
            "AUTH__TENANTS_FILE": str(self._tenants_file),
            "ENGINE__MODEL": str(model),
            "ENGINE__TOKEN": TOKEN,
            "ENGINE__SERVED_MODEL_NAME": f"{MODEL},{ALIAS}",
            # Random weights have near ties, which bfloat16 decides by the size of the batch.
            "ENGINE__DTYPE": "float32",
            "ENGINE__ENFORCE_EAGER": "1",
            "ENGINE__KV_CACHE_MEMORY_BYTES": "64MiB",
            # Bound to cores, the workers of several engines on one machine would all take the first.
            "ENGINE__CPU_OMP_THREADS_BIND": "nobind",
            **settings,
        }
        lines = [f"FAIRGATE_{name}={text}\n" for name, text in variables.items()]
        (self.home / "gateway.env").write_text("".join(lines))

    @property
    def _tenants_file(self) -> Path:
        return self.home / "config" / "tenants.yaml"

    def _make_tenants(self) -> dict[str, str]:
        """The tenants file, and every tenant's key."""
        keys = {}
        lines = ["tenants:\n"]
        for tenant, options in _TENANTS.items():
            keys[tenant], digest = new_key()
            lines += [f"  - id: {tenant}\n", options]
            lines += ["    keys:\n", f"      - id: {tenant}-key\n", f"        sha256: {digest}\n"]
        keys["operator"], digest = new_key()
        lines += ["operators:\n", "  - id: operator-key\n", f"    sha256: {digest}\n"]
        self._tenants_file.parent.mkdir()
        self._tenants_file.write_text("".join(lines))
        made = subprocess.run(
            [_COMMAND, "keys", "create", "--tenant", "acme", "--create-tenant", "--file", self._tenants_file],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return keys | {"acme": made.stdout.strip()}


class Stream:
    """A streamed answer, read by a thread of the test's own pace; leaves by `close` like a lost client."""

    def __init__(self, gateway: Gateway, key: str, path: str, body: Mapping[str, Any]) -> None:
        self._stack = contextlib.ExitStack()
        client = self._stack.enter_context(gateway.http(key, timeout=120))
        self.response = self._stack.enter_context(client.stream("POST", path, json={**body, "stream": True}))
        self._lines = self.response.iter_lines()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_event(self) -> str:
        """The next event's data, or an empty text at the end."""
        return next(self.events(), "")

    def events(self) -> Iterator[str]:
        """The data of each event to come."""
        for line in self._lines:
            if line.startswith("data: "):
                yield line.removeprefix("data: ")

    def close(self) -> None:
        """Drop the connection."""
        self._stack.close()


def chat(content: str, **options: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **options}


def chunks(events: list[str]) -> list[Any]:
    """A complete stream's events as JSON; fails if it does not end with ``[DONE]``."""
    assert events[-1] == "[DONE]", events[-3:]
    return [json.loads(event) for event in events[:-1]]


def value_in(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels, on a page read before.

    Raises:
        LookupError: There is no such sample.
    """
    found = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    if not found:
        raise LookupError(f"no sample {name} {labels}")
    return sum(found)


def is_idle(page: str) -> bool:
    """Whether the engine, by its own gauges, runs nothing and holds nothing."""
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(value_in(page, gauge) == 0 for gauge in gauges)


def eventually(probe: Callable[[], T], within_s: float, *, poll_s: float = _POLL_S) -> T:
    """The probe's first answer that counts as true.

    Raises:
        AssertionError: There was none in time; with the last answer.
    """
    deadline_s = time.monotonic() + within_s
    while not (answer := probe()):
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {answer!r}"
        time.sleep(poll_s)
    return answer


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _processes_in(directory: Path) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended, or is a zombie, which has no directory
                if (entry / "cwd").readlink() == directory:
                    title = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    yield int(entry.name), title.decode(errors="replace").strip()
