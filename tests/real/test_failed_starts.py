"""Starts that cannot work, or are called off: a bounded end, the reason last, nothing left behind."""

from __future__ import annotations

import re
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.gateway import Gateway, eventually
from tests.support.tiny_model import tiny_model

from .conftest import TEXT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextmanager
def starting(
    home: Path, model: Path, settings: Mapping[str, str] = TEXT, *, port: int | None = None
) -> Iterator[Gateway]:
    """A gateway that is not expected to become ready."""
    gateway = Gateway(home, model, settings, port=port)
    try:
        yield gateway
    finally:
        gateway.end()


def check_failed(gateway: Gateway, reason: str, *, within_s: float) -> None:
    """It ends by itself, not well, with the reason as the last line, and alone."""
    assert gateway.exit_code(within_s=within_s) not in {0, None}
    assert re.search(reason, gateway.last_line), gateway.tail()
    assert gateway.last_line.startswith("fairgate: ")
    eventually(lambda: not gateway.processes(), 5)


def test_port_in_use(tmp_path: Path) -> None:
    """Found out before the engine is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with starting(tmp_path, tiny_model(), port=port) as gateway:
            check_failed(gateway, rf"cannot listen on 127\.0\.0\.1:{port} .*in use", within_s=20)
            assert "vllm" not in gateway.log


def test_broken_model(tmp_path: Path) -> None:
    """A directory without a model: vLLM's own words."""
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with starting(tmp_path, broken) as gateway:
        check_failed(gateway, r"the engine did not start: .*model", within_s=120)


def test_kv_cache_too_small_for_the_context(tmp_path: Path) -> None:
    """The engine's process finds out; its reason reaches the last line, with both numbers."""
    settings = {**TEXT, "ENGINE__KV_CACHE_MEMORY_BYTES": "1MiB"}
    with starting(tmp_path, tiny_model(), settings) as gateway:
        check_failed(gateway, r"the engine did not start: .*(4096|4,096).*", within_s=180)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_loading(tmp_path: Path, number: signal.Signals) -> None:
    """Exit status 0, soon, and no engine that goes on loading for nobody."""
    with starting(tmp_path, tiny_model()) as gateway:
        eventually(lambda: any("spawn_main" in title for title in gateway.processes().values()), 60)
        gateway.process.send_signal(number)
        assert gateway.exit_code(within_s=10) == 0
        eventually(lambda: not gateway.processes(), 5)
