"""Starting and ending servers, on small processes that stand for them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

import pytest
import yaml

from loadtests.cpu import descendants, read_stat
from loadtests.servers import EngineFlags, Launch, ServerFailed, Tenant, fairgate, free_port, running, stock

if TYPE_CHECKING:
    from pathlib import Path

# Answers any path, starts a child that ignores SIGTERM, and says so to nobody.
SERVER = """
import http.server, subprocess, sys
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", stubborn])
class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def launch(*command: str) -> Launch:
    """A server of that command, told its port last."""
    port = free_port()
    return Launch("small", (sys.executable, *command, str(port)), dict(os.environ), "/", port, "model", None)


def test_server_and_all_it_has_started_are_ended(tmp_path: Path) -> None:
    """Also a child that does not listen to signals, and when the block raises."""
    with contextlib.suppress(KeyboardInterrupt), running(launch("-c", SERVER), tmp_path) as target:
        children = descendants(target.pid)
        raise KeyboardInterrupt
    assert children
    deadline_s = time.monotonic() + 5
    while any(is_alive(stat.pid) for stat in children) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in [target.pid, *(stat.pid for stat in children)])


def is_alive(pid: int) -> bool:
    """Whether it is there, and not merely waiting for whoever adopted it to notice its end."""
    stat = read_stat(pid)
    if stat is None:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2][0] != "Z"


def test_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """Nobody should have to look for the reason."""
    failing = launch("-c", "import sys; print('no such model'); sys.exit(3)")
    with pytest.raises(ServerFailed, match=r"ended with 3(.|\n)*no such model"), running(failing, tmp_path):
        pass


def test_both_servers_get_the_same_engine_flags(tmp_path: Path) -> None:
    """Else the comparison is worth nothing."""
    flags = EngineFlags("tiny", 64, ("--enforce-eager",))
    for one in (stock(flags), fairgate(flags, [Tenant.new("a")], tmp_path)):
        command = " ".join(one.command)
        assert " ".join(flags.to_list()) in command


def test_callers_own_settings_do_not_reach_the_gateway(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is measured are the defaults."""
    monkeypatch.setenv("FAIRGATE_SERVER__ROOT_PATH", "/elsewhere")
    environment = fairgate(EngineFlags("tiny", 1), [Tenant.new("a")], tmp_path).environment
    assert {name for name in environment if name.startswith("FAIRGATE_")} == {
        "FAIRGATE_AUTH__TENANTS_FILE",
        "FAIRGATE_LOG__FORMAT",
    }


def test_tenants_file_is_one_that_the_gateway_takes(tmp_path: Path) -> None:
    """It holds hashes, and never a key."""
    from app.tenants import Tenants

    tenant = Tenant.new("acme")
    fairgate(EngineFlags("tiny", 1), [tenant], tmp_path)
    text = (tmp_path / "tenants.yaml").read_text()
    assert tenant.key not in text
    assert [entry["id"] for entry in yaml.safe_load(text)["tenants"]] == ["acme"]
    book = Tenants.open(tmp_path / "tenants.yaml", on_reload=lambda *_: None, need_key=True).book
    from datetime import UTC, datetime

    principal = book.resolve(tenant.key, datetime.now(UTC))
    assert principal is not None
    assert principal.tenant is not None
    assert principal.tenant.id == "acme"
