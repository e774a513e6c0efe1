"""README's table of settings."""

from __future__ import annotations

from pathlib import Path

from app.settings import Settings, markdown_table

README = Path(__file__).parents[2] / "README.md"


def test_every_setting_stands_in_readme() -> None:
    """After a change: ``python -m app.settings`` prints the table anew."""
    _, _, rest = README.read_text(encoding="utf-8").partition("<!-- settings -->")
    table, _, _ = rest.partition("<!-- /settings -->")
    assert table.strip() == markdown_table()


def test_every_setting_is_described() -> None:
    """A sentence each, and no two variables of one name."""
    rows = list(Settings.rows())
    assert all(description.endswith(".") for _, _, description in rows)
    assert len({name for name, _, _ in rows}) == len(rows)
