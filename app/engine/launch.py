"""From settings to a serving engine: flags, configuration, processes, first token, routes.

Owns the start and the end of vLLM in this process. ``server.py`` calls `load` once, off the event
loop's path, and `LoadedEngine.close` at the end. Importing this module imports vllm and torch (some
seconds), so the server does that after the port answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm import __version__ as vllm_version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.inputs.engine import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ..core.facts import EngineFacts
from .child import CHILD_VARIABLE, read_first_error
from .gate import EngineGate
from .llm import CountedLLM
from .routes import mount
from .signals import StepSignals

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from ..settings import EngineSettings
    from .gate import AdmissionSeam

_PLUGIN = "fairgate"
_QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"
_SHUTDOWN_S = 10.0
"""Seconds for the engine's processes to end; on two cores they take about 4."""


class LoadError(Exception):
    """The engine did not start. The message is the engine's own reason."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that has made its first token."""

    facts: EngineFacts
    signals: StepSignals
    _llm: Any
    _args: Namespace

    @property
    def death(self) -> str | None:
        """Why the engine is gone, or ``None`` while it lives."""
        return "the engine core has ended" if self._llm.errored else None

    async def mount(
        self,
        app: Any,
        *,
        admission: AdmissionSeam,
        salt_secret: bytes,
        clock: Callable[[], float],
    ) -> EngineGate:
        """Put vLLM's API, behind a new gate, on a FastAPI application."""
        gate = EngineGate(
            self._llm,
            admission=admission,
            served_names=self.facts.served_names,
            salt_secret=salt_secret,
            clock=clock,
            ranks=self.facts.ranks,
        )
        await mount(app, gate, self._args, self.facts.tasks)
        return gate

    async def close(self) -> None:
        """End the engine's processes. Bounded: what does not end in time is killed."""
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # or it logs the end that we ask for as a failure
        await asyncio.to_thread(self._llm.shutdown, timeout=_SHUTDOWN_S)


async def load(settings: EngineSettings, *, keep_alive_s: int | None = None) -> LoadedEngine:
    """Start the engine and let it make one token.

    Args:
        settings: The engine's.
        keep_alive_s: Seconds between comments that vLLM writes into a stream that has nothing to say yet.

    Raises:
        LoadError: With the engine's own reason.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fairgate-") as scratch:
        failure_file = Path(scratch) / "first-error"
        prepare_environment(failure_file)
        try:
            args = parse(settings.to_flags())
            if keep_alive_s is not None:
                args.sse_keep_alive_interval = keep_alive_s
            # In a thread: this takes from seconds to minutes, and the port answers meanwhile.
            signals = StepSignals(time.monotonic)
            llm = await asyncio.to_thread(_start, args, signals)
        except (Exception, SystemExit) as error:
            raise LoadError(_reason(error, failure_file)) from error
        try:
            tasks = await llm.get_supported_tasks()
            await _first_output(llm, tasks)
        except Exception as error:
            llm.shutdown(timeout=0)
            raise LoadError(_reason(error, failure_file)) from error
    facts = _facts(llm, args, tasks, time.monotonic() - started_s)
    return LoadedEngine(facts, signals, llm, args)


def _reason(error: BaseException, failure_file: Path) -> str:
    """What went wrong first, in one line: the last that an operator reads."""
    told = read_first_error(failure_file)
    if told is None and isinstance(error, ValidationError):
        told = "; ".join(str(found["msg"]).removeprefix("Value error, ") for found in error.errors())
    return " ".join((told or str(error)).split())


def prepare_environment(failure_file: Path) -> None:
    """Set what vLLM and its children read from the environment, settings apart (`Loaded.apply`).

    Raises:
        LoadError: The package's metadata is missing, so that no child would load `child.register`.
    """
    if not any(point.name == _PLUGIN for point in entry_points(group="vllm.general_plugins")):
        raise LoadError("fairgate is not installed in this environment (pip install -e .): no plug-in found")
    os.environ[CHILD_VARIABLE] = json.dumps({"failure_file": str(failure_file)})
    # fork would copy our event loop, sockets and threads into the engine
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # A host's usage is its operator's own affair; who wants vLLM's reports sets this to 0.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # multiprocessing's tracker outlives us by a moment, tidies up after a killed engine, and would have the
    # last word about it, where the reason of the end should stand.
    filters = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{filters},{_QUIET_TRACKER}" if filters else _QUIET_TRACKER
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and _PLUGIN not in chosen.split(","):
        os.environ["VLLM_PLUGINS"] = f"{chosen},{_PLUGIN}" if chosen else _PLUGIN


def parse(flags: list[str]) -> Namespace:
    """``vllm serve``'s own parser and checks over the flags.

    Raises:
        LoadError: With the parser's word.
    """
    parser = make_arg_parser(_Parser())
    args: Namespace = parser.parse_args(flags)
    validate_parsed_serve_args(args)
    try:
        validate_api_server_args(args)
    except KeyError as error:  # an unknown tool or reasoning parser; vLLM's message names the known ones
        raise LoadError(str(error.args[0])) from error
    # The engine's own waiting list, short as it is kept, goes by our order too
    args.scheduling_policy = "priority"
    # usage.prompt_tokens_details.cached_tokens is how a tenant sees what the prefix cache saved it
    args.enable_prompt_tokens_details = True
    return args


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """Raises where argparse would print and exit."""

    def error(self, message: str) -> None:
        raise LoadError(message)


def _start(args: Namespace, signals: StepSignals) -> CountedLLM:
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    llm: CountedLLM = CountedLLM.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        disable_log_stats=engine_args.disable_log_stats,
        stat_loggers=[signals.logger_of],
    )
    return llm


async def _first_output(llm: CountedLLM, tasks: tuple[str, ...]) -> None:
    """One real pass through the model: ready means that this has worked."""
    prompt = tokens_input([0])
    if "generate" in tasks:
        stream = llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True), "fairgate-first")
    else:
        task = llm.model_config.get_pooling_task(tasks)
        stream = llm.encode(prompt, PoolingParams(task=task), "fairgate-first")
    async for _ in stream:
        pass


def _facts(llm: CountedLLM, args: Namespace, tasks: tuple[str, ...], load_s: float) -> EngineFacts:
    config = llm.vllm_config
    cache, scheduler = config.cache_config, config.scheduler_config
    return EngineFacts(
        vllm_version=vllm_version,
        model=config.model_config.model,
        served_names=tuple(args.served_model_name or [args.model]),
        adapters=tuple(module.name for module in args.lora_modules or ()),
        tasks=tuple(tasks),
        max_model_len=config.model_config.max_model_len,
        slots=scheduler.max_num_seqs,
        batched_tokens=scheduler.max_num_batched_tokens,
        block_size=cache.block_size,
        kv_tokens=getattr(cache, "kv_cache_size_tokens", None) or 0,
        kv_dtype=str(cache.cache_dtype),
        ranks=config.parallel_config.data_parallel_size,
        load_s=load_s,
        steps_behind=2 if scheduler.async_scheduling else 1,
    )
