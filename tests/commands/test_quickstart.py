"""`make run`'s own part: the demo key and the greeting. That the demo answers is shown in tests/real."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from app.commands.quickstart import DEMO, demo_key, greeting, has_gpu
from app.engine.bundled import CHECKPOINT
from app.settings import load_settings

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def test_demo_key_is_made_once_and_kept_for_this_user(tmp_path: Path) -> None:
    """A second start greets with the same key; nobody else can read it."""
    tenants = tmp_path / "demo" / "tenants.yaml"
    key = demo_key(tenants)
    assert demo_key(tenants) == key
    assert key not in tenants.read_text(encoding="utf-8")
    assert tenants.with_name("demo.key").stat().st_mode & 0o777 == 0o600


def test_lost_tenants_file_gets_a_new_demo_key(tmp_path: Path) -> None:
    """A kept key that the gateway does not know would greet with a 401."""
    tenants = tmp_path / "tenants.yaml"
    first = demo_key(tenants)
    tenants.unlink()
    assert demo_key(tenants) != first
    assert tenants.is_file()


def test_greeting_can_be_pasted() -> None:
    """The shell reads the curl line as one command with a JSON body; Python compiles the rest."""
    text = greeting("http://127.0.0.1:8000", "smol", "fg-key")
    curl, sdk = text.partition("curl ")[2].split("\n\nor this into .venv/bin/python:\n\n")
    arguments = shlex.split(curl)
    assert json.loads(arguments[-1])["model"] == "smol"
    assert "Authorization: Bearer fg-key" in arguments
    compile(sdk, "greeting", "exec")


def test_greeting_shows_the_way_to_a_real_model_where_a_gpu_is() -> None:
    """Three lines, and only there."""
    assert "make install-cuda" not in greeting("http://h", "m", "k")
    lines = greeting("http://h", "m", "k", gpu=True).rstrip().splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["make", "export", ".venv-cuda/bin/fairgate"]


def test_gpu_is_what_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tool, or a tool without a device behind it (a container without the GPU), is no GPU."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_gpu()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho No devices were found\n")
    tool.chmod(0o755)
    assert not has_gpu()
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    assert has_gpu()


def test_demo_serves_the_bundled_model() -> None:
    """config/demo.env and the place where the checkpoint is made agree."""
    settings = load_settings({}, [ROOT / DEMO]).settings
    assert Path(settings.engine.model) == CHECKPOINT
