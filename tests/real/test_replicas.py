"""B50: two gateways, each with its engine, on one Redis: one limit; and each by itself when it is lost."""

from __future__ import annotations

import socket
import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml

from tests.support.gateway import Gateway, chat, eventually
from tests.support.services import program
from tests.support.tiny_model import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RPM = 10


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Redis of this test's own: its address and its process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)
    try:
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()
        process.wait()


def test_two_gateways_on_one_store_admit_one_limit(
    tmp_path: Path, redis: tuple[str, subprocess.Popen[bytes]]
) -> None:
    """Thirty requests in turns: ten are admitted. Without the store each says so, and goes on by itself."""
    url, process = redis
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
    settings = {"ADMISSION__STORE": url, "ENGINE__MAX_MODEL_LEN": "512"}
    gateways = [Gateway(home, tiny_model(), settings) for home in homes]
    try:
        for gateway in gateways:
            _limit(gateway)
            gateway.wait_ready()
        _share_keys(gateways)
        key = gateways[0].keys["umbrella"]
        statuses = [_ask(gateways[i % 2], key) for i in range(30)]
        assert statuses.count(200) == RPM
        assert set(statuses) == {200, 429}
        assert [gateway.value("fairgate_store_up") for gateway in gateways] == [1, 1]
        process.kill()
        for gateway in gateways:
            # Fail open: within the second for which the last known level is believed, by their own count
            eventually(lambda one=gateway: _ask(one, key) == 200, 5)  # type: ignore[misc]
            eventually(lambda one=gateway: one.value("fairgate_store_up") == 0, 5)  # type: ignore[misc]
    finally:
        for gateway in gateways:
            gateway.end()


def _limit(gateway: Gateway) -> None:
    """Umbrella gets its limit, before the gateway has read the file or by its reload."""
    file = gateway.home / "config" / "tenants.yaml"
    document = yaml.safe_load(file.read_text())
    for tenant in document["tenants"]:
        if tenant["id"] == "umbrella":
            tenant["limits"] = {"requests_per_minute": RPM}
    file.write_text(yaml.safe_dump(document))


def _share_keys(gateways: list[Gateway]) -> None:
    """Replicas have one tenants file."""
    text = (gateways[0].home / "config" / "tenants.yaml").read_text()
    (gateways[1].home / "config" / "tenants.yaml").write_text(text)
    headers = {"authorization": f"Bearer {gateways[0].keys['umbrella']}"}
    eventually(lambda: httpx.get(f"{gateways[1].url}/v1/models", headers=headers).status_code == 200, 15)
    gateways[1].keys.update(gateways[0].keys)


def _ask(gateway: Gateway, key: str) -> int:
    with gateway.http(key) as client:
        return client.post("/v1/chat/completions", json=chat("hi", max_tokens=2)).status_code
