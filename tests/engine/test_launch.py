"""The start of the engine as far as no engine is needed: environment, flags, reasons of a failure."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from app.engine import launch
from app.engine.child import CHILD_VARIABLE
from app.engine.launch import LoadError

from ..support.stack import Stack, settings_in

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start sets ends with its test."""
    for name in ("VLLM_PLUGINS", "VLLM_NO_USAGE_STATS", "VLLM_WORKER_MULTIPROC_METHOD", CHILD_VARIABLE):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),
        ("", "fairgate"),
        ("theirs", "theirs,fairgate"),
        ("fairgate", "fairgate"),
        ("a,fairgate,b", "a,fairgate,b"),
        ("fairgates", "fairgates,fairgate"),
    ],
)
def test_own_plugin_is_never_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str | None
) -> None:
    """Unset loads all; a choice of the operator's is extended, or no child would end with its parent."""
    if before is not None:
        monkeypatch.setenv("VLLM_PLUGINS", before)
    launch.prepare_environment(tmp_path / "first")
    assert os.environ.get("VLLM_PLUGINS") == after


def test_children_get_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure file, spawned and not forked, no reports to elsewhere unless the operator wants them."""
    launch.prepare_environment(tmp_path / "first")
    assert json.loads(os.environ[CHILD_VARIABLE]) == {"failure_file": str(tmp_path / "first")}
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    launch.prepare_environment(tmp_path / "first")
    assert os.environ["VLLM_NO_USAGE_STATS"] == "0"


def test_missing_entry_point_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that was never installed would start engines that outlive it."""
    monkeypatch.setattr(launch, "entry_points", lambda group: [])
    with pytest.raises(LoadError, match="pip install -e"):
        launch.prepare_environment(tmp_path / "first")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["--dtype", "float7"], "float7"),
        (["--max-num-seqs", "many"], "max-num-seqs"),
    ],
)
def test_flag_that_vllm_refuses_is_told_in_its_words(flags: list[str], words: str) -> None:
    """argparse would print and exit."""
    with pytest.raises(LoadError, match=words):
        launch.parse(["m", *flags])


def test_cached_tokens_are_always_reported() -> None:
    """How a tenant sees what the prefix cache saved it."""
    assert launch.parse(["m"]).enable_prompt_tokens_details is True


async def test_failed_load_says_the_engines_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's first error where there is one, else what reached us; not "see root cause above"."""

    def start(args: Any, signals: Any) -> None:
        first = json.loads(os.environ[CHILD_VARIABLE])["failure_file"]
        with open(first, "x") as file:
            file.write("ValueError: the KV cache is too small")
        raise RuntimeError("see root cause above")

    settings = settings_in(tmp_path).engine
    monkeypatch.setattr(launch, "_start", start)
    with pytest.raises(LoadError) as caught:
        await launch.load(settings)
    assert str(caught.value) == "ValueError: the KV cache is too small"

    def exits(args: Any, signals: Any) -> None:
        raise SystemExit("no such model")

    monkeypatch.setattr(launch, "_start", exits)
    with pytest.raises(LoadError, match="no such model"):
        await launch.load(settings)


async def test_engine_whose_first_token_fails_is_not_ready(
    loading: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded weights are not enough; the engine is ended."""
    ended: list[float | None] = []

    async def fails(*args: object) -> None:
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(launch, "_first_output", fails)
    monkeypatch.setattr(
        "tests.support.fake_engine.FakeEngine.shutdown", lambda self, timeout=None: ended.append(timeout)
    )
    with pytest.raises(LoadError, match="illegal instruction"):
        await loading.load()
    assert ended == [0]
    assert not loading.gateway.health.is_ready


async def test_facts_are_the_engines_own(loading: Stack) -> None:
    """As resolved by vLLM, not as asked for."""
    await loading.load()
    facts = loading.loaded.facts
    assert facts.served_names == ("tiny",)
    assert facts.max_model_len == 512
    assert facts.tasks == ("generate",)
    assert facts.slots == 256
    assert facts.batched_tokens == 4096
    assert facts.ranks == 1
    assert facts.load_s >= 0
    assert loading.loaded.death is None
    loading.core.die()
    assert loading.loaded.death
