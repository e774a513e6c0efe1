"""What must hold in every process that vLLM starts: the engine core and its workers.

vLLM loads `register` in each of them (entry point ``vllm.general_plugins``), first thing after its
imports, whichever scheduler class runs. It also loads it in the gateway itself, where nothing is
done. Four cures, each for a fault of the pinned vLLM that was seen on a running engine:

1. A child ends with its parent. An engine core outlived its gateway by 40 minutes, with its memory.
2. A child leaves the gateway's process group, so that Ctrl-C and a group's SIGTERM reach the
   gateway alone and running streams can finish.
3. The first error of a failed start is written where the gateway finds it. vLLM tells the parent
   only "see root cause above".
4. On CPU, a seeded request whose prefill is split over steps ended the engine, and with it every
   tenant's request.

The gateway hands over what a child must know in one environment variable, `CHILD_VARIABLE`, since
values from ``.env`` files are in no child's environment.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

CHILD_VARIABLE = "_FAIRGATE_CHILD"
"""JSON: ``{"failure_file": path}``. The underscore keeps it apart from the settings' prefix."""

_WORKER_NAME = "VllmWorker"  # vllm/v1/executor/multiproc_executor.py names its processes so
_POLL_S = 0.2


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Idempotent; does nothing in the gateway."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    end_with(parent.pid)
    leave_process_group()
    keep_first_error()
    if multiprocessing.current_process().name.startswith(_WORKER_NAME):
        cure_seeded_split_prefill()


def end_with(parent_pid: int) -> None:
    """Kill this process as soon as its parent is gone, however the parent ended.

    A thread waits on the parent's pidfd. Not PDEATHSIG: that fires when the creating *thread* ends.
    SIGKILL, since a worker may sit in native code that handles no signal.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):  # the parent is already gone
            descriptor = os.pidfd_open(parent_pid)
            if os.getppid() == parent_pid:
                select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    def poll() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    # Some sandboxes forbid pidfd_open; their kernels still reparent orphans.
    threading.Thread(target=wait if _has_pidfd() else poll, name="fairgate-parent", daemon=True).start()


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def leave_process_group() -> None:
    """Put this process into a group of its own (a group leader already has one)."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)


def keep_first_error() -> None:
    """Write the first exception that vLLM logs in this process to the gateway's failure file."""
    path = json.loads(os.environ.get(CHILD_VARIABLE, "{}")).get("failure_file")
    if path:
        logging.getLogger("vllm").addHandler(_FirstError(Path(path)))


class _FirstError(logging.Handler):
    """Keeps the root cause: the process that failed first creates the file, the others find it there."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        with contextlib.suppress(OSError), self._path.open("x") as file:
            file.write(f"{type(error).__name__}: {error}")


def read_first_error(path: Path) -> str | None:
    """What a child wrote before it ended, if it did. Called by the gateway."""
    with contextlib.suppress(OSError):
        return path.read_text().strip() or None
    return None


def cure_seeded_split_prefill() -> None:
    """Rewind a seeded request's generator after a step that only prefilled, also on CPU.

    A step that computes a part of a prompt samples a token all the same and throws it away. vLLM
    then winds the request's generator back by an offset (``_bookkeeping_sync`` in
    vllm/v1/worker/gpu_model_runner.py), which a CPU generator has not: the worker raises and the
    engine ends. Here the state is taken before sampling and put back after it, so that the text of
    a seed does not depend on how its prompt was split.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if getattr(CPUModelRunner, "_fairgate_cured", False):
        return
    CPUModelRunner._sample = _rewinding(CPUModelRunner._sample)
    CPUModelRunner._bookkeeping_sync = _without_offsets(CPUModelRunner._bookkeeping_sync)
    CPUModelRunner._fairgate_cured = True


def _rewinding(sample: Any) -> Any:
    @functools.wraps(sample)
    def sample_and_rewind(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        saved = []
        if batch.generators:
            only_prefilled = runner.discard_request_mask.np[: batch.num_reqs]
            saved = [(g, g.get_state()) for i, g in batch.generators.items() if only_prefilled[i]]
        output = sample(runner, *args, **kwargs)
        for generator, state in saved:
            generator.set_state(state)
        return output

    return sample_and_rewind


def _without_offsets(bookkeeping: Any) -> Any:
    @functools.wraps(bookkeeping)
    def keep_books(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            batch.generators = generators

    return keep_books
