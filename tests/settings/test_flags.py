"""Flags of ``vllm serve``: every spelling that vLLM reads, and the ones that a gateway cannot take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.settings import Loaded


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--max-num-seqs", "64"], "max_num_seqs", 64),
        (["--max_num_seqs=64"], "max_num_seqs", 64),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--enforce-eager"], "enforce_eager", True),
        (["--served-model-name", "a", "b", "--seed", "1"], "served_model_name", ("a", "b")),
        (["--seed", "-3"], "seed", -3),
        (["--max-model-len", "32k"], "max_model_len", 32_000),
        (["--max-model-len", "-1"], "max_model_len", "auto"),
        (["--device-memory-utilization=0.5"], "gpu_memory_utilization", 0.5),
        (["--compilation-config", '{"mode": 2}'], "compilation_config", {"mode": 2}),
        (
            ["-cc.mode=2", "-cc.a.b", "true"],
            "compilation_config",
            {"mode": 2, "a": {"b": True}},
        ),
        (["--max-num-seqs", "1", "--max-num-seqs", "2"], "max_num_seqs", 2),
        (["org/model"], "model", "org/model"),
        (["--model", "org/model"], "model", "org/model"),
    ],
)
def test_flag_becomes_the_engine_setting(
    load: Callable[..., Loaded], flags: list[str], name: str, value: object
) -> None:
    """However vLLM lets it be written."""
    assert getattr(load({}, *flags).settings.engine, name) == value


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        (["--max-logprobs", "5"], {"max_logprobs": "5"}),
        (["-O3"], {"optimization_level": "3"}),
        (["-O", "2"], {"optimization_level": "2"}),
        (["--async-scheduling"], {"async_scheduling": True}),
        (["--kv-transfer-config.a.b+", "x,y"], {"kv_transfer_config": {"a": {"b": ["x", "y"]}}}),
        (["--kv-transfer-config.size", "80g"], {"kv_transfer_config": {"size": 80_000_000_000}}),
    ],
)
def test_other_flag_goes_to_extra(
    load: Callable[..., Loaded], flags: list[str], extra: dict[str, object]
) -> None:
    """Arguments that are no setting of ours reach vLLM all the same."""
    assert load({}, *flags).settings.engine.extra == extra


def test_flag_wins_over_the_environment(load: Callable[..., Loaded]) -> None:
    """Also inside ``extra``, argument by argument."""
    environment = {
        "FAIRGATE_ENGINE__MAX_NUM_SEQS": "8",
        "FAIRGATE_ENGINE__EXTRA": '{"max-logprobs": 1, "runner": "generate"}',
    }
    loaded = load(environment, "--max-num-seqs=64", "--max-logprobs=5")
    assert loaded.settings.engine.max_num_seqs == 64
    assert loaded.settings.engine.extra == {"max_logprobs": "5", "runner": "generate"}
    assert loaded.origins["FAIRGATE_ENGINE__MAX_NUM_SEQS"] == "flag --max-num-seqs"


def test_front_end_flags_become_server_settings(load: Callable[..., Loaded]) -> None:
    """A present deployment keeps its port, its root path, its origins."""
    flags = ["--host=0.0.0.0", "--port", "9000", "--root-path=/llm", "--disable-fastapi-docs"]
    flags += ["--allowed-origins", '["https://a.example"]', "--uvicorn-log-level=warning"]
    settings = load({}, *flags, "--shutdown-timeout=9").settings
    server = settings.server
    assert (server.host, server.port, server.root_path) == ("0.0.0.0", 9000, "/llm")
    assert server.cors_allow_origins == ("https://a.example",)
    assert server.docs is False
    assert server.drain_timeout_s == 9
    assert settings.log.level == "warning"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-num-seq", "64"], "Did you mean --max-num-seqs?"),
        (["--api-key", "k"], "fairgate keys create"),
        (["--workers", "2"], "replicas are separate processes"),
        (["--api-server-count=4"], "replicas are separate processes"),
        (["--scheduling-policy=priority"], "its own scheduler"),
        (["--uds", "/tmp/s"], "FAIRGATE_SERVER__HOST"),
        (["--seed"], "A value is missing"),
        (["--enforce-eager=yes"], "Takes no value"),
        (["org/model", "stray"], "the model is org/model"),
        (["--max-num-seqs", "many"], "(flag --max-num-seqs)"),
        (["--runner=fast"], "must be one of auto, draft"),
        (["--config", "nowhere.yaml"], "Must be a YAML file"),
    ],
)
def test_flag_that_cannot_be_taken_is_answered(
    complaint: Callable[..., str], flags: list[str], words: str
) -> None:
    """With the right spelling, the setting, or the reason."""
    assert words in complaint({}, *flags)


def test_values_of_an_unknown_flag_are_not_taken_for_a_model(complaint: Callable[..., str]) -> None:
    """One mistake, one finding."""
    message = complaint({}, "org/model", "--max-num-seq", "64")
    assert "the model is" not in message


def test_flag_without_effect_is_told(load: Callable[..., Loaded]) -> None:
    """It may stay in a script that moves over."""
    loaded = load({}, "--disable-uvicorn-access-log", "--api-server-count", "1")
    (notice,) = loaded.notices
    assert "--disable-uvicorn-access-log has no effect" in notice


def test_config_file_of_vllm_is_read_before_the_flags(load: Callable[..., Loaded]) -> None:
    """As vLLM does: the command line wins over the file, wherever it is named."""
    Path("vllm.yaml").write_text(
        "model: org/model\nport: 9000\nenforce-eager: true\nmax_num_seqs: 8\n"
        "served-model-name: [a, b]\ncompilation-config: {mode: 2}\n"
    )
    settings = load({}, "--max-num-seqs=64", "--config", "vllm.yaml").settings
    assert (settings.engine.model, settings.server.port) == ("org/model", 9000)
    assert settings.engine.enforce_eager is True
    assert settings.engine.served_model_name == ("a", "b")
    assert settings.engine.compilation_config == {"mode": 2}
    assert settings.engine.max_num_seqs == 64
