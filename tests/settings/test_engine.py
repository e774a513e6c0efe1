"""The engine's settings on their way to vLLM."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from app.settings import EngineSettings, LoraModule
from app.settings.arguments import IDLE, REFUSED, RENAMED, arguments


def flags_of(**settings: object) -> list[str]:
    """What vLLM's parser is given beyond the defaults."""
    flags = EngineSettings.model_validate({"model": "m"} | settings).to_flags()
    defaults = EngineSettings(model="m").to_flags()
    return [flag for flag in flags if flag not in defaults]


def test_production_defaults_are_always_told() -> None:
    """vLLM's own defaults depend on the device; ours do not."""
    flags = " ".join(EngineSettings(model="m").to_flags())
    assert "--model m" in flags
    assert "--max-num-seqs 256 --max-num-batched-tokens 4096" in flags
    assert "--gpu-memory-utilization 0.85" in flags


def test_what_is_unset_is_left_to_vllm() -> None:
    """No flag for ``None`` or an empty list."""
    flags = EngineSettings(model="m").to_flags()
    for flag in ("--quantization", "--served-model-name", "--enable-lora", "--no-enable-prefix-caching"):
        assert flag not in flags


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"seed": -3}, ["--seed=-3"]),
        ({"compilation_config": {"mode": 2}}, ["--compilation-config", '{"mode": 2}']),
        ({"served_model_name": ["a", "b"]}, ["--served-model-name", "a", "b"]),
        ({"extra": {"max-logprobs": 5}}, ["--max-logprobs", "5"]),
        ({"extra": {"async_scheduling": False}}, ["--no-async-scheduling"]),
        ({"extra": {"allowed_media_domains": ["a", "b"]}}, ["--allowed-media-domains", "a", "b"]),
        ({"lora_modules": "s=/s"}, ["--lora-modules", '{"name": "s", "path": "/s"}', "--enable-lora"]),
    ],
)
def test_setting_is_written_as_vllm_reads_it(settings: dict[str, object], flags: list[str]) -> None:
    """Switches have a ``--no-`` form, objects are JSON, lists are words."""
    assert flags_of(**settings) == flags


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"max_logprob": 5}, "Did you mean max_logprobs?"),
        ({"max_num_seqs": 5}, "FAIRGATE_ENGINE__MAX_NUM_SEQS"),
        ({"hf_token": "x"}, "FAIRGATE_ENGINE__TOKEN"),
        ({"port": 5}, "FAIRGATE_SERVER__PORT"),
        ({"scheduler_cls": "x"}, "its own scheduler"),
        ({"max_logprobs": "many"}, "must be a number"),
        ({"max_logprobs": True}, "not true or false"),
        ({"async_scheduling": "yes"}, "must be true or false"),
        ({"runner": "fast"}, "must be one of"),
    ],
)
def test_extra_argument_is_judged_by_name_and_value(extra: dict[str, object], words: str) -> None:
    """A mistyped argument would otherwise be found by vLLM, seconds later."""
    with pytest.raises(ValueError, match="extra") as caught:
        EngineSettings.model_validate({"model": "m", "extra": extra})
    assert words in str(caught.value)


def test_adapters_may_be_written_briefly_or_in_full() -> None:
    """``name=path``, or objects with a base model's name."""
    brief = EngineSettings.model_validate({"model": "m", "lora_modules": "a=/a,b=/b"})
    assert brief.lora_modules == (LoraModule(name="a", path="/a"), LoraModule(name="b", path="/b"))
    full = EngineSettings.model_validate(
        {"model": "m", "lora_modules": '[{"name": "a", "path": "/a", "base_model_name": "m"}]'}
    )
    assert full.lora_modules[0].base_model_name == "m"


def test_children_get_token_address_and_interface() -> None:
    """What libraries read from the environment, under each library's name."""
    engine = EngineSettings(
        model="m",
        token=SecretStr("t"),
        host_ip="10.0.0.1",
        network_interface="eth0",
        cpu_omp_threads_bind="0|1",
    )
    assert engine.child_environment() == {
        "HF_TOKEN": "t",
        "VLLM_HOST_IP": "10.0.0.1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    assert EngineSettings(model="m").child_environment() == {}


def test_every_argument_has_one_fate() -> None:
    """Ours, renamed, refused or idle: no name stands in two lists, and none is unknown to vLLM."""
    lists = [EngineSettings.own_arguments(), set(RENAMED), set(REFUSED), set(IDLE)]
    assert sum(len(one) for one in lists) == len(set().union(*lists))
    assert set().union(*lists) <= set(arguments())
