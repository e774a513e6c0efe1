"""Loading: which value wins, what is refused, and in which words (case B47)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.settings import EngineSettings, Settings, SettingsError, load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.settings import Loaded

SEQUENCES = "FAIRGATE_ENGINE__MAX_NUM_SEQS"
SERVICE_LINKS = {
    "FAIRGATE_SERVICE_HOST": "10.0.0.7",
    "FAIRGATE_SERVICE_PORT": "8000",
    "FAIRGATE_SERVICE_PORT_HTTP": "8000",
    "FAIRGATE_PORT": "tcp://10.0.0.7:8000",
    "FAIRGATE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
    "FAIRGATE_PORT_8000_TCP_ADDR": "10.0.0.7",
    "FAIRGATE_METRICS_PORT": "tcp://10.0.0.8:9000",
}


def test_defaults_are_the_production_values(load: Callable[..., Loaded]) -> None:
    """256 sequences, 4,096 tokens a step, 0.85 of the memory; nobody outside the host."""
    settings = load().settings
    engine = settings.engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (256, 4096)
    assert engine.gpu_memory_utilization == 0.85
    assert settings.server.host == "127.0.0.1"
    assert not settings.auth.disabled


def test_settings_read_nothing_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test builds has the defaults, whatever the developer's environment says."""
    monkeypatch.setenv("FAIRGATE_SERVER__PORT", "81")
    assert Settings(engine=EngineSettings(model="m")).server.port == 8000


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (SEQUENCES, "abc", "a whole number, 1 or more"),
        (SEQUENCES, "-1", "a whole number, 1 or more"),
        (SEQUENCES, "1e3", "a whole number, 1 or more"),
        ("FAIRGATE_ENGINE__MAX_NUM_BATCHED_TOKENS", "1e3", "32k is 32,000"),
        ("FAIRGATE_ENGINE__GPU_MEMORY_UTILIZATION", "90", "0.9 is 90 %"),
        ("FAIRGATE_ENGINE__GPU_MEMORY_UTILIZATION", "nan", "0.9 is 90 %"),
        ("FAIRGATE_ENGINE__ENFORCE_EAGER", "maybe", "true or false"),
        ("FAIRGATE_ENGINE__DTYPE", "bf16", "one of auto, bfloat16"),
        ("FAIRGATE_ENGINE__COMPILATION_CONFIG", "{mode: 2}", "one JSON object"),
        ("FAIRGATE_ENGINE__LORA_MODULES", "sql", "name=path"),
        ("FAIRGATE_SERVER__PORT", "70000", "from 1 to 65535"),
        ("FAIRGATE_SERVER__SSL_CERTFILE", "no/such.pem", "a file that exists"),
        ("FAIRGATE_LOG__FORMAT", "xml", "one of auto, json, console"),
        ("FAIRGATE_AUTH__JWT_ALGORITHMS", "HS256", "RS256"),
    ],
)
def test_wrong_value_is_answered_with_variable_value_and_form(
    complaint: Callable[..., str], name: str, text: str, words: str
) -> None:
    """Whoever reads the message can correct the line without a manual."""
    message = complaint({name: text})
    assert f"{name}={text!r} (environment)" in message
    assert words in message


@pytest.mark.parametrize("text", ["yes", "1", "True", " on "])
def test_words_for_true_are_accepted(load: Callable[..., Loaded], text: str) -> None:
    """People write booleans in many ways."""
    assert load({"FAIRGATE_LOG__PROMPTS": text}).settings.log.prompts is True


@pytest.mark.parametrize("text", ["no", "0", "False", "off"])
def test_words_for_false_are_accepted(load: Callable[..., Loaded], text: str) -> None:
    """And so the other way round."""
    assert load({"FAIRGATE_SERVER__DOCS": text}).settings.server.docs is False


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_value_is_unset(load: Callable[..., Loaded], text: str) -> None:
    """A manifest that leaves a value blank gets the default."""
    loaded = load({SEQUENCES: text})
    assert loaded.settings.engine.max_num_seqs == 256
    assert SEQUENCES not in loaded.origins


def test_blanks_around_a_value_are_dropped(load: Callable[..., Loaded]) -> None:
    """They come from YAML and are not meant."""
    assert load({SEQUENCES: " 8 "}).settings.engine.max_num_seqs == 8


@pytest.mark.parametrize(
    ("text", "names"), [("a,b", ("a", "b")), (" a , b,", ("a", "b")), ('["a", "b,c"]', ("a", "b,c"))]
)
def test_lists_are_comma_separated_or_json(
    load: Callable[..., Loaded], text: str, names: tuple[str, ...]
) -> None:
    """The short form, and the one that can hold a comma."""
    engine = load({"FAIRGATE_ENGINE__SERVED_MODEL_NAME": text}).settings.engine
    assert engine.served_model_name == names


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("FAIRGATE_ENGINE__MAX_NUM_SEQ", SEQUENCES),
        ("FAIRGATE_MAX_NUM_SEQS", SEQUENCES),
        ("fairgate_engine__max_num_seqs", SEQUENCES),
        ("FAIRGATE_PORT", "FAIRGATE_SERVER__PORT"),
    ],
)
def test_unknown_name_is_answered_with_the_nearest_right_one(
    complaint: Callable[..., str], name: str, nearest: str
) -> None:
    """A mistyped variable would otherwise change nothing and say nothing."""
    message = complaint({name: "8"})
    assert f"{name} (environment)" in message
    assert f"Did you mean {nearest}?" in message


def test_every_finding_is_told_at_once(complaint: Callable[..., str]) -> None:
    """One start, one list: not one mistake per restart."""
    message = complaint({SEQUENCES: "abc", "FAIRGATE_NONSENSE": "1", "WEB_CONCURRENCY": "4"}, "--nonsense")
    for subject in (SEQUENCES, "FAIRGATE_NONSENSE", "WEB_CONCURRENCY", "--nonsense"):
        assert subject in message


def test_missing_model_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one setting without a default."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"FAIRGATE_ENGINE__MODEL\n    Is required"):
        load_settings({})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FAIRGATE_ENGINE__ENABLE_AUTO_TOOL_CHOICE": "1"}, "needs FAIRGATE_ENGINE__TOOL_CALL_PARSER"),
        ({"FAIRGATE_ENGINE__NODE_RANK": "1"}, "must be below FAIRGATE_ENGINE__NNODES=1"),
        ({"FAIRGATE_ENGINE__NNODES": "2"}, "needs FAIRGATE_ENGINE__MASTER_ADDR"),
        ({"FAIRGATE_AUTH__JWT_AUDIENCE": "a"}, "needs FAIRGATE_AUTH__JWT_ISSUER"),
        ({"FAIRGATE_AUTH__JWT_ISSUER": "i"}, "needs one of FAIRGATE_AUTH__JWT_JWKS_URL"),
        (
            {"FAIRGATE_AUTH__JWT_ISSUER": "i", "FAIRGATE_AUTH__JWT_JWKS_URL": "https://i.example/keys"},
            "needs FAIRGATE_AUTH__JWT_AUDIENCE",
        ),
        ({"FAIRGATE_SERVER__SSL_KEYFILE": __file__}, "needs FAIRGATE_SERVER__SSL_CERTFILE"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    complaint: Callable[..., str], environment: dict[str, str], words: str
) -> None:
    """Each is fine alone; together they cannot work."""
    assert words in complaint(environment)


def test_secret_is_shown_nowhere(load: Callable[..., Loaded], complaint: Callable[..., str]) -> None:
    """Neither in the effective configuration nor in an error, also under a mistyped name."""
    secret = "s3cr3t"
    loaded = load({"FAIRGATE_ENGINE__TOKEN": secret, "FAIRGATE_AUTH__CACHE_SALT_SECRET": secret})
    assert secret not in repr(list(loaded.effective()))
    assert secret not in repr(loaded.settings)
    assert secret not in " ".join(loaded.settings.engine.to_flags())
    assert secret not in complaint({"FAIRGATE_ENGINE__TOKN": secret}, "--api-key", secret)
    assert secret not in complaint({"FAIRGATE_ENGINE__EXTRA": f'{{"hf_token": "{secret}"}}'})


def test_service_links_of_our_own_service_are_ignored_with_a_notice(load: Callable[..., Loaded]) -> None:
    """Kubernetes injects them for a Service named fairgate; they are not typing errors."""
    loaded = load(SERVICE_LINKS)
    assert loaded.settings.server.port == 8000
    (notice,) = loaded.notices
    assert all(name in notice for name in SERVICE_LINKS)
    assert "Kubernetes" in notice


def test_service_links_of_a_service_named_vllm_do_not_reach_the_engine(load: Callable[..., Loaded]) -> None:
    """vLLM would read VLLM_PORT as a port of its own, and fail."""
    environ = {"VLLM_PORT": "tcp://10.0.0.7:8000", "VLLM_SERVICE_HOST": "10.0.0.7", "VLLM_USE_V1": "1"}
    loaded = load(environ)
    loaded.apply(environ)
    assert environ == {"VLLM_USE_V1": "1"}
    assert "VLLM_PORT" in loaded.notices[0]


def test_port_that_is_meant_for_vllm_stays(load: Callable[..., Loaded]) -> None:
    """Only the value tells a service link from a port."""
    loaded = load({"VLLM_PORT": "29600"})
    assert not loaded.removed
    assert not loaded.notices


@pytest.mark.parametrize(
    ("name", "text"),
    [("WEB_CONCURRENCY", "4"), ("UVICORN_WORKERS", "2"), ("GUNICORN_CMD_ARGS", "--workers=3 --bind x")],
)
def test_several_workers_are_refused(complaint: Callable[..., str], name: str, text: str) -> None:
    """Case B28: each worker would start an engine and keep limits of its own."""
    message = complaint({name: text})
    assert name in message
    assert "replicas are separate processes" in message


@pytest.mark.parametrize(
    ("name", "text"), [("WEB_CONCURRENCY", "1"), ("WEB_CONCURRENCY", ""), ("GUNICORN_CMD_ARGS", "-w 1")]
)
def test_one_worker_is_fine(load: Callable[..., Loaded], name: str, text: str) -> None:
    """Platforms set it for everything that they run."""
    assert load({name: text}).settings


def test_later_file_wins_and_the_environment_wins_over_files(tmp_path: Path) -> None:
    """A profile, a correction beside it, and the host's last word."""
    profile, correction = tmp_path / "profile.env", tmp_path / "correction.env"
    profile.write_text(
        f"# One GPU\nexport FAIRGATE_ENGINE__MODEL=m\n{SEQUENCES}=8\nFAIRGATE_SERVER__PORT=81\n"
    )
    correction.write_text(f"FAIRGATE_SERVER__PORT='82'\n{SEQUENCES}=9\n")
    loaded = load_settings({SEQUENCES: "10"}, [profile, correction])
    assert loaded.settings.engine.max_num_seqs == 10
    assert loaded.settings.server.port == 82
    assert loaded.origins["FAIRGATE_ENGINE__MODEL"] == f"{profile}:2"
    assert loaded.origins["FAIRGATE_SERVER__PORT"] == f"{correction}:1"
    assert loaded.origins[SEQUENCES] == "environment"


def test_files_are_named_by_the_environment_or_found_here(
    load: Callable[..., Loaded], tmp_path: Path
) -> None:
    """``.env`` of the directory, unless ``FAIRGATE_ENV_FILE`` names others."""
    Path(".env").write_text(f"{SEQUENCES}=8\n")
    Path("other.env").write_text("FAIRGATE_SERVER__PORT=81\n")
    assert load().settings.engine.max_num_seqs == 8
    named = load({"FAIRGATE_ENV_FILE": "other.env"}).settings
    assert (named.engine.max_num_seqs, named.server.port) == (256, 81)


def test_file_is_judged_like_the_environment(
    load: Callable[..., Loaded], complaint: Callable[..., str]
) -> None:
    """A typing error in a file is one too, and its line is told."""
    Path(".env").write_text("\nFAIRGATE_ENGINE__MAX_NUM_SEQ=8\nnot a setting\n")
    message = complaint()
    assert "FAIRGATE_ENGINE__MAX_NUM_SEQ (.env:2)" in message
    assert ".env:3" in message


def test_missing_file_is_told(complaint: Callable[..., str]) -> None:
    """A file that was named must be there."""
    assert "nowhere.env" in complaint({"FAIRGATE_ENV_FILE": "nowhere.env"})


def test_file_may_hold_the_engines_own_variables(load: Callable[..., Loaded]) -> None:
    """They go to the engine's environment, behind the real one; what nobody reads is said."""
    Path(".env").write_text("HF_HOME=/models\nVLLM_LOGGING_LEVEL=DEBUG\nCOMPOSE_PROJECT_NAME=x\n")
    loaded = load()
    environ = {"VLLM_LOGGING_LEVEL": "INFO"}
    loaded.apply(environ)
    assert environ == {"VLLM_LOGGING_LEVEL": "INFO", "HF_HOME": "/models"}
    (notice,) = loaded.notices
    assert "COMPOSE_PROJECT_NAME (.env:3)" in notice


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "PROMETHEUS_MULTIPROC_DIR"])
def test_variable_that_would_mislead_is_removed_and_told(load: Callable[..., Loaded], name: str) -> None:
    """It means something to a library below us that does not hold here."""
    loaded = load({name: "x"})
    assert name in loaded.removed
    assert name in loaded.notices[0]
