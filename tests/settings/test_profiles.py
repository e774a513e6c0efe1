"""The profiles in ``config/``."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.settings import load_settings

PROFILES = sorted(Path(__file__).parents[2].joinpath("config").glob("*.env"))


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_profile_loads_without_a_notice(profile: Path) -> None:
    """Every line is a setting, and every value holds."""
    loaded = load_settings({}, [profile])
    assert not loaded.notices
    assert "--model" in loaded.settings.engine.to_flags()


def test_there_is_a_profile_for_each_kind_of_host() -> None:
    """One GPU, eight, two hosts, none."""
    assert {path.stem for path in PROFILES} >= {"gpu-one", "gpu-eight-tp", "two-nodes-pp", "cpu-small"}
