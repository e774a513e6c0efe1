"""The generated list of arguments, and our flags, against the installed vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine.arguments import LIST, generate
from app.settings import EngineSettings, load_settings

pytestmark = pytest.mark.real

PROFILES = sorted(Path(__file__).parents[2].joinpath("config").glob("*.env"))


def reached(engine: EngineSettings) -> object:
    """What vLLM's own parser makes of our flags."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(engine.to_flags()))


def test_list_of_arguments_is_fresh() -> None:
    """After an upgrade of vLLM: ``python -m app.engine.arguments``."""
    assert LIST.read_text(encoding="utf-8") == generate()


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_what_reaches_vllm_equals_the_settings(profile: Path) -> None:
    """Every value of a profile, through vLLM's own parser."""
    engine = load_settings({}, [profile]).settings.engine
    args = reached(engine)
    for name in EngineSettings.own_arguments():
        value = getattr(engine, name)
        if value in (None, ()) or not hasattr(args, name):
            continue  # left to vLLM, or an argument of its front end
        assert getattr(args, name) == (list(value) if isinstance(value, tuple) else value), name


def test_unusual_values_survive_vllms_parser() -> None:
    """Dashes, dots, JSON, lists."""
    engine = EngineSettings.model_validate(
        {
            "model": "./models/tiny.v1",
            "served_model_name": ["a.b", "c"],
            "seed": -3,
            "max_model_len": "auto",
            "compilation_config": {"mode": 2, "backend": "eager"},
            "extra": {"max_logprobs": 5, "async_scheduling": False, "hf_overrides": {"rope_theta": 1.5}},
        }
    )
    args = reached(engine)
    assert vars(args) | {
        "model": "./models/tiny.v1",
        "served_model_name": ["a.b", "c"],
        "seed": -3,
        "max_model_len": -1,
        "max_logprobs": 5,
        "async_scheduling": False,
        "hf_overrides": {"rope_theta": 1.5},
    } == vars(args)
