"""What must hold in every process that vLLM starts, in real processes where it is about processes."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.engine import child

ROOT = Path(__file__).parents[2]

# A gateway that starts one child, says its pid, and lives on.
GATEWAY = """
import multiprocessing, os, sys, time
from app.engine import child
{patch}

def engine(pipe):
    {before}
    child.register()
    pipe.send((os.getpid(), os.getpgid(0)))
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine, args=(theirs,))
    process.start()
    print(*ours.recv(), os.getpgid(0), flush=True)
    {after}
    time.sleep(60)
"""


def gateway(tmp_path: Path, **code: str) -> tuple[subprocess.Popen[str], int, int]:
    """Start it: the process, its child's pid and the child's process group."""
    script = tmp_path / "gateway.py"
    script.write_text(GATEWAY.format(**{"patch": "", "before": "", "after": ""} | code))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    pid, group, parents_group = map(int, process.stdout.readline().split())
    assert parents_group != group
    return process, pid, group


def ends_within(pid: int, seconds: float) -> bool:
    """Whether the process is gone by then; it is not waited for a moment longer than it lives."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("patch", ["", "child._has_pidfd = lambda: False"], ids=["pidfd", "polling"])
def test_child_ends_with_a_parent_that_is_killed(tmp_path: Path, patch: str) -> None:
    """kill -9 leaves no chance to tidy up; within 2 s the memory is free again."""
    process, pid, _ = gateway(tmp_path, patch=patch)
    try:
        os.kill(pid, 0)
        process.kill()
        process.wait()
        assert ends_within(pid, 2)
    finally:
        process.kill()
        process.communicate()


def test_child_whose_parent_is_already_gone_ends(tmp_path: Path) -> None:
    """The parent died before the child came to look."""
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from app.engine import child
child.end_with(2 ** 22 - 1)
import time; time.sleep(30)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=20, check=False)
    assert ended.returncode == -signal.SIGKILL


def test_child_leaves_the_gateways_process_group(tmp_path: Path) -> None:
    """Ctrl-C and a supervisor's SIGTERM to the group reach the gateway alone: running streams can finish."""
    process, pid, group = gateway(tmp_path)
    try:
        assert group == pid
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert ends_within(pid, 2)


def test_nothing_is_done_in_the_gateway_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads the entry point there too."""

    def fail(*args: object) -> None:
        raise AssertionError("in the gateway")

    for name in ("end_with", "leave_process_group", "keep_first_error", "cure_seeded_split_prefill"):
        monkeypatch.setattr(child, name, fail)
    child.register()


# The first error of a failed start


def logged(handler: logging.Handler, message: str, error: BaseException | None) -> None:
    """What a logger does on ``log.exception``."""
    info = (type(error), error, None) if error else None
    handler.handle(logging.LogRecord("vllm", logging.ERROR, "", 0, message, (), info))


def test_first_error_stands(tmp_path: Path) -> None:
    """Whoever fails first writes it; what follows from it, in any process, does not replace it."""
    path = tmp_path / "first"
    assert child.read_first_error(path) is None
    core, worker = child._FirstError(path), child._FirstError(path)
    logged(core, "no exception, only words", None)
    assert child.read_first_error(path) is None
    logged(worker, "failed", ValueError("No available memory for the cache blocks."))
    logged(core, "EngineCore failed", RuntimeError("see root cause above"))
    assert child.read_first_error(path) == "ValueError: No available memory for the cache blocks."


def test_error_that_cannot_be_written_hurts_nothing(tmp_path: Path) -> None:
    """The gateway's directory is gone by then."""
    logged(child._FirstError(tmp_path / "gone" / "first"), "failed", ValueError("late"))


def test_failure_file_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child knows nothing else of the gateway; without it nothing is kept."""
    logger = logging.getLogger("vllm")
    handlers = logger.handlers[:]
    monkeypatch.delenv(child.CHILD_VARIABLE, raising=False)
    child.keep_first_error()
    assert logger.handlers == handlers
    monkeypatch.setenv(child.CHILD_VARIABLE, json.dumps({"failure_file": str(tmp_path / "first")}))
    try:
        child.keep_first_error()
        assert isinstance(logger.handlers[-1], child._FirstError)
    finally:
        logger.handlers[:] = handlers


# The seed cure


class Runner:
    """A model runner of three requests: the first and the last seeded, the last still in its prompt."""

    def __init__(self) -> None:
        self.generators = {0: torch.Generator().manual_seed(7), 2: torch.Generator().manual_seed(7)}
        self.input_batch = SimpleNamespace(generators=dict(self.generators), num_reqs=3)
        # Longer than the batch: rows of requests that are gone
        self.discard_request_mask = SimpleNamespace(np=[False, False, True, True])

    def sample(self, *, fail: bool = False) -> list[float]:
        """Draw from every generator, as sampling does."""
        drawn = [float(torch.rand(1, generator=g)) for g in self.input_batch.generators.values()]
        if fail:
            raise RuntimeError("no memory")
        return drawn

    def keep_books(self) -> dict[int, Any]:
        """What the bookkeeping sees; on CPU it would raise for each generator to be wound back."""
        return dict(self.input_batch.generators)


def test_request_that_only_prefilled_draws_again() -> None:
    """So that the text of a seed does not depend on how its prompt was split over steps."""
    runner = Runner()
    sample = child._rewinding(Runner.sample)
    (decoded, thrown_away), (decoded_next, first) = sample(runner), sample(runner)
    assert first == thrown_away
    assert decoded_next != decoded
    runner.discard_request_mask.np[2] = False
    assert sample(runner)[1] == first
    assert sample(runner)[1] != first


def test_bookkeeping_sees_no_generators_and_loses_none() -> None:
    """vLLM's rewinding is the one that ends a CPU worker."""
    runner = Runner()
    keep_books = child._without_offsets(Runner.keep_books)
    assert keep_books(runner) == {}
    assert runner.input_batch.generators == runner.generators


def test_bookkeeping_that_fails_loses_no_generator() -> None:
    """The next step samples as before."""

    def fail(runner: Runner) -> None:
        raise RuntimeError("broken")

    runner = Runner()
    with pytest.raises(RuntimeError, match="broken"):
        child._without_offsets(fail)(runner)
    assert runner.input_batch.generators == runner.generators


def test_batch_without_seeds_costs_nothing() -> None:
    """The mask is not even looked at."""
    runner = Runner()
    runner.input_batch.generators = {}
    runner.discard_request_mask = None  # type: ignore[assignment]
    assert child._rewinding(Runner.sample)(runner) == []


def test_cure_fits_the_pinned_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods that it wraps are there, and it wraps them once."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, books = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync
    monkeypatch.setattr(CPUModelRunner, "_sample", sample)
    monkeypatch.setattr(CPUModelRunner, "_bookkeeping_sync", books)
    monkeypatch.setattr(CPUModelRunner, "_fairgate_cured", False, raising=False)
    child.cure_seeded_split_prefill()
    child.cure_seeded_split_prefill()
    assert CPUModelRunner._sample.__wrapped__ is sample
    assert CPUModelRunner._bookkeeping_sync.__wrapped__ is books
