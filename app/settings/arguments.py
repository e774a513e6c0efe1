"""vLLM's own arguments: which exist, and what Fairgate does with those of its front end.

Reads the list that ``engine/arguments.py`` generates, so that a name is judged without importing vLLM.
``engine.py`` judges ``extra`` by it, ``flags.py`` the flags of ``fairgate serve``. An argument is one of:

- an engine setting of the same name, or ``RENAMED`` to one of our settings;
- ``REFUSED``, because it would break a promise of the gateway;
- ``IDLE``: accepted so that a deployment moves over, without effect, and a notice says so;
- anything else: handed to vLLM as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of ``vllm serve``."""

    name: str
    flags: tuple[str, ...]
    kind: Literal["switch", "flag", "value", "optional", "list"]
    """``switch`` has a ``--no-`` form, ``flag`` has none, neither takes a value."""
    type: Literal["int", "float", "text"]
    group: str
    default: str
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """Its usual spelling."""
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def takes_value(self) -> bool:
        """Whether a value follows it."""
        return self.kind not in ("switch", "flag")

    def objection(self, value: object) -> str | None:
        """What a value should have been, or ``None`` if nothing speaks against it."""
        if not self.takes_value:
            return None if isinstance(value, bool) else "must be true or false"
        if isinstance(value, bool | dict | list | None):
            # A list or an object is read by vLLM's own types; true and false only mean something to switches.
            return "takes a value, not true or false" if isinstance(value, bool) else None
        if self.choices and str(value) not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        return None if self._reads(str(value)) else f"must be a number ({self.type})"

    def _reads(self, text: str) -> bool:
        try:
            {"int": int, "float": float, "text": str}[self.type](text)
        except ValueError:
            return False
        return True


@cache
def arguments() -> Mapping[str, Argument]:
    """Every argument of ``vllm serve``, by name."""
    text = resources.files(__package__).joinpath("engine_arguments.json").read_text(encoding="utf-8")
    return {entry["name"]: _argument(**entry) for entry in json.loads(text)["arguments"]}


def _argument(flags: list[str], choices: list[str], **plain: Any) -> Argument:
    return Argument(flags=tuple(flags), choices=tuple(choices), **plain)


@cache
def arguments_by_flag() -> Mapping[str, Argument]:
    """The same by every spelling: long, short and negated."""
    return {flag: argument for argument in arguments().values() for flag in argument.flags}


RENAMED: Mapping[str, str] = {
    "hf_token": "FAIRGATE_ENGINE__TOKEN",
    "host": "FAIRGATE_SERVER__HOST",
    "port": "FAIRGATE_SERVER__PORT",
    "root_path": "FAIRGATE_SERVER__ROOT_PATH",
    "ssl_certfile": "FAIRGATE_SERVER__SSL_CERTFILE",
    "ssl_keyfile": "FAIRGATE_SERVER__SSL_KEYFILE",
    "ssl_ca_certs": "FAIRGATE_SERVER__SSL_CA_CERTS",
    "allowed_origins": "FAIRGATE_SERVER__CORS_ALLOW_ORIGINS",
    "allowed_headers": "FAIRGATE_SERVER__CORS_ALLOW_HEADERS",
    "disable_fastapi_docs": "FAIRGATE_SERVER__DOCS",
    "shutdown_timeout": "FAIRGATE_SERVER__DRAIN_TIMEOUT_S",
    "log_level": "FAIRGATE_LOG__LEVEL",
    "uvicorn_log_level": "FAIRGATE_LOG__LEVEL",
}
"""Arguments that are settings of ours under another name."""

_KEYS = "every tenant has keys of its own: fairgate keys create --tenant NAME"
_SCHEDULER = "Fairgate brings its own scheduler, which orders the batch by the tenants' shares"
_SOCKET = "Fairgate listens on FAIRGATE_SERVER__HOST and FAIRGATE_SERVER__PORT only"
_ONE_PROCESS = "one engine has one gateway process; replicas are separate processes behind a balancer"
_TLS = "not offered; put a TLS proxy before the gateway for it"
_ROUTES = "these routes would reach the engine past admission"

REFUSED: Mapping[str, str] = {
    "api_key": _KEYS,
    "api_server_count": _ONE_PROCESS,
    "data_parallel_external_lb": _ONE_PROCESS,
    "data_parallel_hybrid_lb": _ONE_PROCESS,
    "data_parallel_multi_port_external_lb": _ONE_PROCESS,
    "disable_log_stats": "admission decides by the scheduler's statistics",
    "enable_scale_out": _ROUTES,
    "enable_ssl_refresh": _TLS,
    "enable_tokenizer_info_endpoint": _ROUTES,
    "grpc": _SOCKET,
    "grpc_port": _SOCKET,
    "headless": "Fairgate is a front end; start such a node with vllm serve --headless, "
    "and the flags that fairgate check --json prints",
    "middleware": "nothing may stand between the socket and the engine",
    "scheduler_cls": _SCHEDULER,
    "scheduling_policy": _SCHEDULER,
    "ssl_cert_reqs": _TLS,
    "ssl_ciphers": _TLS,
    "tokens_only": _ROUTES,
    "uds": _SOCKET,
}
"""Arguments that would break a promise of the gateway, and why."""

_ACCESS_LOG = "Fairgate writes one line per request, and logs prompts only if FAIRGATE_LOG__PROMPTS is set"
_SUPERVISOR = "Fairgate runs no supervisor"

IDLE: Mapping[str, str] = {
    "allow_credentials": "keys travel in a header, not in a cookie",
    "allowed_methods": "each route allows its own methods",
    "data_parallel_supervisor_port": _SUPERVISOR,
    "disable_access_log_for_endpoints": _ACCESS_LOG,
    "disable_uvicorn_access_log": _ACCESS_LOG,
    "dp_supervisor_probe_failure_threshold": _SUPERVISOR,
    "dp_supervisor_probe_interval_s": _SUPERVISOR,
    "dp_supervisor_probe_timeout_s": _SUPERVISOR,
    "enable_log_outputs": _ACCESS_LOG,
    "enable_log_requests": _ACCESS_LOG,
    "enable_offline_docs": "the docs page is Fairgate's own",
    "enable_request_id_headers": "every response carries a request id",
    "enable_server_load_tracking": "/metrics shows the load",
    "h11_max_header_count": "Fairgate parses with httptools",
    "h11_max_incomplete_event_size": "Fairgate parses with httptools",
}
"""Arguments without effect here, and why."""
