"""Exports of other gateways: which keys come out, and which rows are told about."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from app.tenants import TenantsError, digest_of
from app.tenants.importers import read_export
from app.tenants.schema import EMPTY_DIGEST

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 6, 1, tzinfo=UTC)
D = digest_of("sk-1234")


def test_litellm_rows_come_with_owner_alias_and_expiry(tmp_path: Path) -> None:
    """`token` is the SHA-256 of the whole sk- key: the same digest as ours."""
    path = tmp_path / "keys.json"
    rows = [
        {"token": D, "team_id": "t1", "user_id": "u", "key_alias": "CI", "expires": "2026-06-02T00:00:00"},
        {
            "token": "b" * 64,
            "team_id": None,
            "user_id": "u",
            "models": ["gpt"],
            "rpm_limit": 5,
            "tpm_limit": None,
        },
        {"token": "c" * 64, "user_id": "u", "blocked": True},
        {"token": "d" * 64, "user_id": "u", "expires": "2026-05-31 00:00:00+00"},
        {"token": "e" * 64, "team_id": "litellm-dashboard"},
    ]
    path.write_text(json.dumps(rows))
    export = read_export(path, NOW)
    first, second = export.keys
    assert (first.owner, first.sha256, first.label) == ("t1", D, "CI")
    assert first.expires == datetime(2026, 6, 2, tzinfo=UTC)
    assert (second.owner, second.bounded_by) == ("u", ("models", "rpm_limit"))
    assert [line.split(":")[0] for line in export.left_out] == ["row 3", "row 4", "row 5"]


def test_litellm_table_as_csv_is_read_alike(tmp_path: Path) -> None:
    """As psql writes it: empty lists are {}, booleans t and f."""
    path = tmp_path / "keys.csv"
    path.write_text(f"token,user_id,models,blocked\n{D},u,{{}},f\n{'b' * 64},u,{{gpt}},t\n")
    export = read_export(path, NOW)
    assert [(key.sha256, key.bounded_by) for key in export.keys] == [(D, ())]
    assert export.left_out == ("row 2: blocked",)


def test_plain_csv_is_read(tmp_path: Path) -> None:
    """With a byte-order mark, upper-case digests and line breaks in labels, as spreadsheets leave them."""
    path = tmp_path / "keys.CSV"
    path.write_text(f'\ufefftenant,sha256,label\nacme,{D.upper()},"two\nlines"\n')
    [key] = read_export(path, NOW).keys
    assert (key.owner, key.sha256, key.label) == ("acme", D, "twolines")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("k.txt", "", "must be a .csv or .json file"),
        ("k.json", "{", "is not valid JSON"),
        ("k.json", '{"a": 1}', "must be a JSON list"),
        ("k.csv", "tenant,key\nacme,sk-secret\n", "row 1: needs a column sha256"),
        ("k.csv", "tenant,sha256\nacme,sk-secret\n", "row 1: sha256 is not a SHA-256"),
        ("k.json", '[{"token": "sk-secret"}]', "row 1: token is not a SHA-256"),
        ("k.csv", f"tenant,sha256\nacme,{EMPTY_DIGEST}\n", "of an empty key"),
        ("k.csv", f"tenant,sha256,expires\nacme,{D},2027-01-01\n", "expires must name its zone"),
    ],
)
def test_wrong_export_is_refused_without_quoting_it(tmp_path: Path, name: str, text: str, told: str) -> None:
    """B38: some gateways store keys in the clear."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TenantsError) as raised:
        read_export(path, NOW)
    assert told in str(raised.value)
    assert "secret" not in str(raised.value)
