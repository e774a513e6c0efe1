"""The engine's settings, and how vLLM is told of them.

Owns `EngineSettings`. ``engine/launch.py`` hands `to_flags` to vLLM's own parser, so that vLLM's checks
and conversions apply to our settings as to its own command line, and `child_environment` to the processes
that vLLM starts. May not import vllm.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .arguments import IDLE, REFUSED, RENAMED, Argument, arguments
from .findings import Judged, did_you_mean
from .values import Bytes, Count, Form, Index, JsonObject, LoraModules, Names, Port, Share, Text, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator


class LoraModule(BaseModel):
    """An adapter that is served beside the base model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Text
    path: Text
    base_model_name: Text | None = None


def _auto_length(value: object) -> object:
    """vLLM's ``-1`` and ``auto`` both ask for the longest context that fits the KV cache."""
    return "auto" if isinstance(value, str) and value.strip().lower() in ("-1", "auto") else value


Length = Annotated[
    Tokens | Literal["auto"],
    BeforeValidator(_auto_length),
    Form("tokens, 1 or more (32k is 32,000, 32K is 32,768), or auto: the longest that fits", "8192"),
]
Adapters = Annotated[
    tuple[LoraModule, ...],
    LoraModules,
    Form("name=path, comma-separated, or a JSON list of objects with name and path", "sql=/models/sql"),
]


class EngineSettings(BaseModel):
    """The model and the engine that computes it. Unset (``None``) leaves the choice to vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[Text, Form("a directory, or a name on the hub", "Qwen/Qwen3-8B")] = Field(
        description="Model to serve: a directory, or a name on the hub. Required."
    )
    revision: Text | None = Field(None, description="Branch, tag or commit of the model on the hub.")
    token: SecretStr | None = Field(
        None, description="Token for the hub; unset leaves `HF_TOKEN`, or a login on the host, in force."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    served_model_name: Names = Field(
        (), description="Names that clients may call the model by; unset is the value of model."
    )
    dtype: Text = Field(
        "auto", description="Type of weights and activations: auto, bfloat16, float16 or float32."
    )
    quantization: Text | None = Field(
        None, description="Method by which the weights are quantised; unset reads it from the model."
    )
    tensor_parallel_size: Count = Field(1, description="GPUs that share each layer.")
    pipeline_parallel_size: Count = Field(1, description="Groups of GPUs that share out the layers.")
    data_parallel_size: Count = Field(1, description="Copies of the model that share out the requests.")
    distributed_executor_backend: Literal["mp", "ray", "uni"] | None = Field(
        None, description="How workers are started: mp (processes), ray, uni (in the engine's process)."
    )
    nnodes: Count = Field(1, description="Hosts that the engine spans.")
    node_rank: Index = Field(0, description="This host's number among them, from 0.")
    master_addr: Text | None = Field(None, description="Address of host 0; required with several hosts.")
    master_port: Port | None = Field(None, description="Port of host 0 where the hosts meet.")
    kv_cache_dtype: Text = Field("auto", description="Type of the KV cache; fp8 doubles its tokens.")
    block_size: Count | None = Field(None, description="Tokens per block of the KV cache.")
    gpu_memory_utilization: Share = Field(
        0.85, description="Share of each GPU's memory for weights, activations and KV cache, 0 to 1."
    )
    kv_cache_memory_bytes: Bytes | None = Field(
        None, description="Bytes of KV cache per GPU, or on a CPU host; overrides the share of memory."
    )
    max_model_len: Length | None = Field(
        None, description="Most tokens of a request, prompt and output; unset is the model's own limit."
    )
    max_num_seqs: Count = Field(256, description="Most sequences computed in a step.")
    max_num_batched_tokens: Tokens = Field(4096, description="Most tokens computed in a step.")
    enable_chunked_prefill: bool | None = Field(None, description="Split long prompts over steps.")
    enable_prefix_caching: bool | None = Field(None, description="Reuse the KV cache of equal prefixes.")
    enforce_eager: bool = Field(False, description="Neither compile nor capture graphs: starts faster.")
    compilation_config: JsonObject | None = Field(None, description="vLLM's compilation options, JSON.")
    lora_modules: Adapters = Field((), description="Adapters served beside the model: name=path, or JSON.")
    max_loras: Count | None = Field(None, description="Most adapters in one batch.")
    max_lora_rank: Count | None = Field(None, description="Largest rank of an adapter.")
    enable_auto_tool_choice: bool = Field(False, description="Let the model decide to call tools.")
    tool_call_parser: Text | None = Field(None, description="How the model writes its tool calls.")
    reasoning_parser: Text | None = Field(None, description="How the model marks its reasoning.")
    chat_template: Text | None = Field(None, description="Chat template: a file, or the template in a line.")
    cpu_omp_threads_bind: Text | None = Field(
        None, description="CPU cores of each rank, as `0-3|4-7` (`VLLM_CPU_OMP_THREADS_BIND`)."
    )
    host_ip: Text | None = Field(
        None, description="This host's address towards the other hosts (`VLLM_HOST_IP`)."
    )
    network_interface: Text | None = Field(
        None, description="Network interface towards the other hosts (for GLOO, NCCL and TP)."
    )
    seed: int | None = Field(None, description="Seed of the engine's random numbers.")
    extra: JsonObject = Field(
        {}, description="Any other engine argument of vLLM, as one JSON object of names and values."
    )

    @field_validator("dtype", "kv_cache_dtype", "max_lora_rank")
    @classmethod
    def _is_a_choice_of_vllm(cls, value: object, info: ValidationInfo) -> object:
        objection = arguments()[str(info.field_name)].objection(value)
        if objection:
            raise Judged(objection)
        return value

    @field_validator("extra")
    @classmethod
    def _names_arguments(cls, extra: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Judge every name; dashes are as good as underscores."""
        named = {name.removeprefix("--").replace("-", "_"): value for name, value in extra.items()}
        objections = [
            f"{name}: {why}" for name, value in named.items() if (why := cls._objection(name, value))
        ]
        if objections:
            raise Judged("; ".join(objections))
        return named

    @classmethod
    def _objection(cls, name: str, value: JsonValue) -> str | None:
        if name in cls.own_arguments() or name in RENAMED:
            variable = RENAMED.get(name, f"FAIRGATE_ENGINE__{name.upper()}")
            return f"is a setting of its own, {variable}"
        if name in REFUSED or name in IDLE:
            return REFUSED.get(name) or IDLE[name]
        if name not in arguments():
            return "is no argument of vLLM. " + did_you_mean(name, arguments(), "See vllm serve --help=all.")
        return arguments()[name].objection(value)

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError(
                "FAIRGATE_ENGINE__ENABLE_AUTO_TOOL_CHOICE needs FAIRGATE_ENGINE__TOOL_CALL_PARSER, "
                "for example hermes"
            )
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"FAIRGATE_ENGINE__NODE_RANK={self.node_rank} must be below "
                f"FAIRGATE_ENGINE__NNODES={self.nnodes}"
            )
        if self.nnodes > 1 and self.master_addr is None:
            raise ValueError("FAIRGATE_ENGINE__NNODES above 1 needs FAIRGATE_ENGINE__MASTER_ADDR")
        return self

    @classmethod
    def own_arguments(cls) -> frozenset[str]:
        """The settings that are arguments of vLLM by the same name."""
        return frozenset(cls.model_fields) & frozenset(arguments())

    def to_flags(self) -> list[str]:
        """These settings as ``vllm serve`` writes them, for vLLM's own parser.

        The token is not among them: vLLM logs the arguments that it is given.
        """
        return [word for name, value in self._arguments() for word in _words(arguments()[name], value)]

    def _arguments(self) -> Iterator[tuple[str, JsonValue]]:
        values = self.model_dump(mode="json", exclude_none=True, include=set(self.own_arguments()))
        # An adapter is always written as JSON: vLLM reads name=path only where the path has no comma.
        values["lora_modules"] = [json.dumps(module) for module in values["lora_modules"]]
        if self.lora_modules:
            values.setdefault("enable_lora", True)
        yield from (values | self.extra).items()

    def child_environment(self) -> dict[str, str]:
        """The settings that vLLM, and the libraries below it, read from their environment."""
        named = {
            "HF_TOKEN": self.token.get_secret_value() if self.token else None,
            "VLLM_CPU_OMP_THREADS_BIND": self.cpu_omp_threads_bind,
            "VLLM_HOST_IP": self.host_ip,
            "GLOO_SOCKET_IFNAME": self.network_interface,
            "NCCL_SOCKET_IFNAME": self.network_interface,
            "TP_SOCKET_IFNAME": self.network_interface,
        }
        return {name: value for name, value in named.items() if value is not None}


def _words(argument: Argument, value: JsonValue) -> list[str]:
    """One argument on the command line."""
    if value is None or value == []:
        return []
    if not argument.takes_value:
        negated = "--no-" + argument.flag.removeprefix("--")
        return [argument.flag] if value else [negated] * (argument.kind == "switch")
    if argument.kind == "list" and isinstance(value, list):
        return [argument.flag, *(str(item) for item in value)]
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    # A value that starts with a dash would be taken for a flag.
    return [f"{argument.flag}={text}"] if text.startswith("-") else [argument.flag, text]
