"""The command ``fairgate``, as a process and in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from app.__main__ import cli

if TYPE_CHECKING:
    from app.settings import Settings

ROOT = Path(__file__).parents[1]

WITHOUT_TORCH = """
import sys
from app.__main__ import main
try:
    main()
finally:
    assert not {"torch", "vllm", "transformers"} & set(sys.modules)
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without settings, in a directory without ``.env``."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("FAIRGATE_", "VLLM_")) or name == "WEB_CONCURRENCY":
            monkeypatch.delenv(name)
    return monkeypatch


def test_wrong_setting_ends_before_torch_is_imported(environ: pytest.MonkeyPatch) -> None:
    """Within 2 s on an idle machine; the bound leaves room for a loaded one."""
    environ.setenv("FAIRGATE_ENGINE__MAX_NUM_SEQS", "abc")
    environ.setenv("PYTHONPATH", str(ROOT))
    started_s = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "serve", "--", "org/model", "-tp", "2"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert time.monotonic() - started_s < 5
    assert ended.returncode == 2, ended.stderr
    assert "FAIRGATE_ENGINE__MAX_NUM_SEQS='abc'" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_check_prints_values_and_origins(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From default, environment, file and flag; secrets masked."""
    environ.setenv("FAIRGATE_ENGINE__TOKEN", "s3cr3t")
    profile = tmp_path / "profile.env"
    profile.write_text("FAIRGATE_ENGINE__MODEL=org/model\n")
    result = CliRunner().invoke(
        cli, ["check", "--env-file", str(profile), "--json", "--", "--max-num-seqs", "64"]
    )
    assert result.exit_code == 0
    assert "s3cr3t" not in result.output
    settings = json.loads(result.stdout)["settings"]
    assert settings["FAIRGATE_ENGINE__MODEL"] == {"value": "org/model", "origin": f"{profile}:1"}
    assert settings["FAIRGATE_ENGINE__TOKEN"] == {"value": "********", "origin": "environment"}
    assert settings["FAIRGATE_ENGINE__MAX_NUM_SEQS"] == {"value": "64", "origin": "flag --max-num-seqs"}
    assert settings["FAIRGATE_SERVER__PORT"] == {"value": "8000", "origin": "default"}


def test_check_says_what_was_ignored_and_then_ok(environ: pytest.MonkeyPatch) -> None:
    """A table for people, the notices below it."""
    environ.setenv("FAIRGATE_PORT", "tcp://10.0.0.7:8000")
    result = CliRunner().invoke(cli, ["check", "[odd]/model"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any(
        line.split() == ["FAIRGATE_ENGINE__MODEL", "[odd]/model", "model", "argument"] for line in lines
    )
    assert "Kubernetes" in result.stdout
    assert lines[-1] == "OK"


def test_check_of_wrong_settings_exits_with_2(environ: pytest.MonkeyPatch) -> None:
    """The findings go to standard error."""
    result = CliRunner().invoke(cli, ["check", "m", "--max-num-seq", "3"])
    assert result.exit_code == 2
    assert "Did you mean --max-num-seqs?" in result.stderr


def test_serve_gets_the_settings_and_a_cleaned_environment(environ: pytest.MonkeyPatch) -> None:
    """What would mislead vLLM is gone before it is imported."""
    seen: list[Settings] = []
    stand_in = ModuleType("app.commands.serve")
    stand_in.serve = seen.append  # type: ignore[attr-defined]
    environ.setitem(sys.modules, "app.commands.serve", stand_in)
    environ.setenv("VLLM_PORT", "tcp://10.0.0.7:8000")
    environ.setenv("VLLM_HOST_IP", "10.0.0.9")
    environ.setenv("FAIRGATE_ENGINE__HOST_IP", "10.0.0.1")
    result = CliRunner().invoke(cli, ["serve", "org/model", "--port", "9000"])
    assert result.exit_code == 0, result.output
    assert seen[0].server.port == 9000
    assert "VLLM_PORT" not in os.environ
    assert os.environ["VLLM_HOST_IP"] == "10.0.0.1"
    assert "VLLM_PORT" in result.stderr


def test_version_is_printed() -> None:
    """Alone, without settings."""
    result = CliRunner().invoke(cli, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip()
