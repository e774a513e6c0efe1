"""The files that come with the project."""

from __future__ import annotations

import json
from pathlib import Path

from app.tenants import load_book
from app.tenants.schema import json_schema

CONFIG = Path(__file__).parents[2] / "config"


def test_schema_for_editors_is_fresh() -> None:
    """Generated from the models. To renew: write `json_schema()` with an indent of 2 into the file."""
    assert (CONFIG / "tenants.schema.json").read_text() == json.dumps(json_schema(), indent=2) + "\n"


def test_example_is_valid_and_names_its_schema() -> None:
    """What newcomers copy works, and their editor helps."""
    example = CONFIG / "tenants.example.yaml"
    assert len(load_book(example).tenants) == 2
    assert example.read_text().startswith("# yaml-language-server: $schema=tenants.schema.json\n")
