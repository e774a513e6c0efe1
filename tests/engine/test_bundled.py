"""The bundled model, without unpacking it: what holds when something is missing, broken or there already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.engine import bundled
from app.engine.bundled import BundledModelMissing, filled_aside, prepare

if TYPE_CHECKING:
    from pathlib import Path


def test_prepared_model_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start needs neither the package nor the time."""
    monkeypatch.setattr(bundled, "_PACKAGE", "no_such_package")
    assert prepare(tmp_path) == tmp_path


def test_missing_package_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before torch is loaded, and nothing is left behind."""
    monkeypatch.setattr(bundled, "_PACKAGE", "no_such_package")
    with pytest.raises(BundledModelMissing, match="make install"):
        prepare(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_directory_appears_only_when_whole(tmp_path: Path) -> None:
    """An engine that looks meanwhile sees none."""
    directory = tmp_path / "models" / "m"
    with filled_aside(directory) as filling:
        (filling / "config.json").write_text("{}")
        assert not directory.exists()
    assert [entry.name for entry in directory.iterdir()] == ["config.json"]
    assert [entry.name for entry in directory.parent.iterdir()] == ["m"]


def test_failed_work_leaves_nothing(tmp_path: Path) -> None:
    """The next start begins anew."""

    def fail() -> None:
        with filled_aside(tmp_path / "m") as filling:
            (filling / "half").touch()
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_first_of_two_wins(tmp_path: Path) -> None:
    """Two processes that prepare at once do not disturb each other."""
    directory = tmp_path / "m"
    with filled_aside(directory) as slow:
        (slow / "slow").touch()
        with filled_aside(directory) as fast:
            (fast / "fast").touch()
    assert [entry.name for entry in directory.iterdir()] == ["fast"]
    assert list(tmp_path.iterdir()) == [directory]
