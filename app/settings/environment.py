"""Gathers variables from ``.env`` files and the environment, and judges every name.

Called by ``load.py``. What starts with ``FAIRGATE_`` must be a setting: a mistyped name would otherwise
change nothing and say nothing. Two things look like settings and are none: what Kubernetes injects for a
Service of our name, and what would start several gateways on one engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dotenv.parser import Binding, parse_stream

from .findings import Finding, did_you_mean
from .schema import PREFIX, variables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ENV_FILE = "FAIRGATE_ENV_FILE"
"""Names the files to read, comma-separated, where ``--env-file`` is not given."""

ENVIRONMENT = "environment"

_SERVICE_LINK = re.compile(
    r"(FAIRGATE|VLLM)(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
_SERVICE_PORT = re.compile(r"(FAIRGATE|VLLM)(_[A-Z0-9_]+)?_PORT")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")

_ENGINE_PREFIXES = (
    *("VLLM_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TP_"),
    *("OMP_", "KMP_", "MKL_", "TORCH", "PYTORCH_", "TRITON_", "RAY_", "OTEL_"),
)
"""Names in a file that vLLM, and the libraries below it, read from their environment."""

_ONE_PROCESS = "One engine has one gateway process; replicas are separate processes behind a balancer."
_GUNICORN_WORKERS = re.compile(r"(?:^|\s)(?:-w|--workers)[\s=]*(\d+)")


@dataclass(frozen=True, slots=True)
class Given:
    """A value as text, and where it was given."""

    text: str
    origin: str


@dataclass(slots=True)
class Gathered:
    """What the files and the environment say."""

    settings: dict[str, Given] = field(default_factory=dict)
    for_engine: dict[str, str] = field(default_factory=dict)
    """From files, for the engine's environment."""
    removed: set[str] = field(default_factory=set)
    """Names to take out of the engine's environment."""
    notices: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def files_to_read(environment: Mapping[str, str], named: Sequence[Path]) -> list[Path]:
    """The files of ``--env-file``, else of ``FAIRGATE_ENV_FILE``, else ``.env`` if there is one."""
    if named:
        return list(named)
    listed = [part.strip() for part in environment.get(ENV_FILE, "").split(",")]
    return [Path(part) for part in listed if part] or [path for path in [Path(".env")] if path.is_file()]


def gather(environment: Mapping[str, str], files: Sequence[Path]) -> Gathered:
    """Everything that is given, a later file before an earlier one, the environment before all files."""
    gathered = Gathered()
    given: dict[str, Given] = {}
    for path in files:
        given |= _read(path, gathered.findings)
    # Empty is unset: an empty variable does not hide a file's value.
    given |= {name: Given(text, ENVIRONMENT) for name, text in environment.items() if text.strip()}
    links: list[str] = []
    for name, value in given.items():
        if _is_service_link(name, value.text):
            links.append(name)
        else:
            _judge(name, value, gathered)
    _explain_links(links, gathered)
    return gathered


def _read(path: Path, findings: list[Finding]) -> dict[str, Given]:
    """A ``.env`` file. Values stand as they are written: nothing is interpolated."""
    try:
        with path.open(encoding="utf-8") as stream:
            bindings = list(parse_stream(stream))
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        findings.append(Finding(str(path), f"This settings file cannot be read: {reason}."))
        return {}
    given = {}
    for binding in bindings:
        origin = f"{path}:{_line_of(binding)}"
        if binding.error or (binding.key is not None and binding.value is None):
            # The line itself may hold a secret: only its number is told.
            findings.append(
                Finding(origin, "This line is not NAME=value.", remedy="A comment starts with #.")
            )
        elif binding.key is not None and binding.value:
            given[binding.key] = Given(binding.value, origin)
    return given


def _line_of(binding: Binding) -> int:
    """The line of its name: a binding holds the blank lines before it, too."""
    text = binding.original.string
    return binding.original.line + text[: len(text) - len(text.lstrip())].count("\n")


def _judge(name: str, value: Given, gathered: Gathered) -> None:
    """Put a name where it belongs."""
    if name in variables():
        gathered.settings[name] = Given(value.text.strip(), value.origin)
    elif name.upper().startswith(PREFIX):
        if not (name == ENV_FILE and value.origin == ENVIRONMENT):
            gathered.findings.append(_unknown(name, value))
    elif _starts_workers(name, value.text):
        gathered.findings.append(Finding(name, _ONE_PROCESS, value.text, value.origin, "Unset it, or set 1."))
    elif name == "PROMETHEUS_MULTIPROC_DIR":
        gathered.removed.add(name)
        gathered.notices.append(f"{name} is ignored: one process holds all metrics.")
    elif name == "VLLM_API_KEY":
        gathered.removed.add(name)
        gathered.notices.append(f"{name} is ignored: every tenant has keys of its own, fairgate keys create.")
    elif value.origin != ENVIRONMENT:
        if name.startswith(_ENGINE_PREFIXES):
            gathered.for_engine[name] = value.text
        else:
            gathered.notices.append(
                f"{name} ({value.origin}) is ignored: no setting, and not read by the engine."
            )


def _unknown(name: str, value: Given) -> Finding:
    # Its value is not shown: a mistyped secret is still a secret.
    remedy = did_you_mean(name.upper(), variables(), "fairgate check lists every setting.")
    return Finding(name, "There is no such setting.", origin=value.origin, remedy=remedy)


def _is_service_link(name: str, text: str) -> bool:
    """Whether Kubernetes injected it. Of a bare ``…_PORT`` only the value tells."""
    if name in variables():
        return False
    if _SERVICE_PORT.fullmatch(name) and _ADDRESS.match(text.strip()):
        return True
    return _SERVICE_LINK.fullmatch(name) is not None


def _explain_links(links: Sequence[str], gathered: Gathered) -> None:
    for prefix, fate in (
        ("FAIRGATE_", "They are ignored."),
        ("VLLM_", "They are taken out of the engine's environment: vLLM would read VLLM_PORT as its own."),
    ):
        names = sorted(name for name in links if name.startswith(prefix))
        if names:
            gathered.notices.append(
                f"{', '.join(names)}: injected by Kubernetes for a Service of that name. {fate} "
                "enableServiceLinks: false in the pod's spec stops it."
            )
    gathered.removed.update(links)


def _starts_workers(name: str, text: str) -> bool:
    """Whether a server under other rules would start several processes by it."""
    return any(count != "1" for count in _worker_counts(name, text))


def _worker_counts(name: str, text: str) -> Iterator[str]:
    if name in ("WEB_CONCURRENCY", "UVICORN_WORKERS"):
        yield text.strip()
    elif name == "GUNICORN_CMD_ARGS":
        yield from _GUNICORN_WORKERS.findall(text)
