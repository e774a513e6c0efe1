"""Loading settings from nothing but what a test gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.settings import Loaded, SettingsError, load_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = {"FAIRGATE_ENGINE__MODEL": "m"}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loaded]:
    """Load these variables (and a model) and flags, in an empty directory, where no ``.env`` stands."""
    monkeypatch.chdir(tmp_path)

    def load(environment: dict[str, str] | None = None, *flags: str) -> Loaded:
        return load_settings(MODEL | (environment or {}), (), flags)

    return load


@pytest.fixture
def complaint(load: Callable[..., Loaded]) -> Callable[..., str]:
    """The text of the error when these variables and flags are loaded."""

    def complaint(environment: dict[str, str] | None = None, *flags: str) -> str:
        with pytest.raises(SettingsError) as caught:
            load(environment, *flags)
        return str(caught.value)

    return complaint
