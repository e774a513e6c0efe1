"""`fairgate keys` from the command line: what it prints, and what it leaves in the file."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner, Result

from app.commands.keys import keys
from app.tenants import digest_of, load_book

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the tenants file is, or will be."""
    return tmp_path / "tenants.yaml"


def run(file: Path, *words: str) -> Result:
    return CliRunner().invoke(keys, [*words, "--file", str(file)], env={"COLUMNS": "200"})


def created(file: Path, *words: str) -> str:
    result = run(file, "create", *words)
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


def only_key_id(file: Path) -> str:
    [principal] = load_book(file).principals.values()
    return principal.key.id


def test_created_key_is_alone_on_standard_output_and_opens_the_gateway(file: Path) -> None:
    """Scripts catch it; the file holds only its digest."""
    key = created(file, "--tenant", "acme", "--label", "Bob's [red] one", "--expires", "90d")
    assert key.startswith("fg-")
    assert len(key.split()) == 1
    now = datetime.now(UTC)
    principal = load_book(file).resolve(key, now)
    assert principal is not None
    assert principal.tenant is not None
    assert principal.tenant.id == "acme"
    assert principal.key.label == "Bob's [red] one"
    assert principal.key.expires_at is not None
    assert abs(principal.key.expires_at - now - timedelta(days=90)) < timedelta(minutes=1)
    assert key not in file.read_text()


def test_unknown_tenant_in_a_present_file_is_taken_for_a_slip(file: Path) -> None:
    """Unless one says so."""
    created(file, "--tenant", "acme")
    before = file.read_text()
    result = run(file, "create", "--tenant", "acne")
    assert result.exit_code == 1
    assert "there are: acme" in result.stderr
    assert file.read_text() == before
    created(file, "--tenant", "acne", "--create-tenant")
    assert list(load_book(file).tenants) == ["acme", "acne"]


def test_operator_key_has_no_tenant_unless_one_is_named(file: Path) -> None:
    """One for Prometheus, one for an administrator who also asks the model."""
    bare, both = created(file), created(file, "--tenant", "a", "--role", "operator", "--create-tenant")
    book = load_book(file)
    for key, tenant in ((bare, None), (both, book.by_id("a"))):
        principal = book.principals[digest_of(key)]
        assert principal.is_operator
        assert principal.tenant is tenant


@pytest.mark.parametrize(
    "words",
    [
        ["--role", "tenant"],
        ["--tenant", "a", "--expires", "soon"],
        ["--tenant", "a", "--expires", "2027-01-01"],
        ["--tenant", "a", "--expires", "2020-01-01T00:00:00Z"],
        ["--tenant", "a", "--expires", "0d"],
        ["--tenant", "Not A Name"],
    ],
)
def test_useless_request_makes_no_file(file: Path, words: list[str]) -> None:
    """Neither half a file nor a key that opens nothing."""
    result = run(file, "create", *words)
    assert result.exit_code != 0
    assert "fg-" not in result.stdout
    assert not file.exists()


def test_revoked_key_is_gone_and_the_last_one_is_warned_about(file: Path) -> None:
    """A leaked last key must be revocable."""
    key = created(file, "--tenant", "acme")
    result = run(file, "revoke", only_key_id(file))
    assert result.exit_code == 0
    assert "the last one" in result.stderr
    assert load_book(file, need_key=False).resolve(key, datetime.now(UTC)) is None
    assert run(file, "revoke", "acme-00000000").exit_code == 1


def test_list_shows_keys_and_no_digest(file: Path) -> None:
    """Whole ids, since revoke wants them; square brackets as they are."""
    key = created(file, "--tenant", "acme", "--label", "[bold]x", "--expires", "2999-01-01T00:00:00Z")
    output = run(file, "list").stdout
    assert only_key_id(file) in output
    for cell in ("acme", "[bold]x", "tenant", "2999-01-01"):
        assert cell in output
    assert digest_of(key)[:12] not in output


def test_missing_file_is_told(file: Path) -> None:
    """Reading and revoking make none."""
    for words in (["list"], ["revoke", "x"]):
        result = run(file, *words)
        assert result.exit_code == 1
        assert "no such file" in result.stderr
        assert not file.exists()


def test_imported_litellm_key_works_as_it_is(file: Path, tmp_path: Path) -> None:
    """Nobody changes a key; a second import adds nothing; what is not taken over is told."""
    export = tmp_path / "litellm.json"
    rows = [
        {
            "token": digest_of("sk-one"),
            "team_id": "0F-Team",
            "key_alias": "one",
            "expires": "2999-01-01T00:00:00",
        },
        {"token": digest_of("sk-two"), "user_id": "bob@example.com", "models": ["gpt"]},
        {"token": digest_of("sk-old"), "user_id": "bob@example.com", "blocked": True},
    ]
    export.write_text(json.dumps(rows))
    created(file, "--tenant", "acme")
    words = ["import", str(export), "--tenant-map", "0F-Team=acme", "--tenant-map", "bob@example.com=bob"]
    refused = run(file, *words)
    assert refused.exit_code == 1
    assert "no tenant 'bob'" in refused.stderr
    result = run(file, *words, "--create-tenant")
    assert result.exit_code == 0, result.output
    assert "2 keys added, 0 were there already" in result.stderr
    assert "Left out: row 3: blocked" in result.stderr
    assert "Not taken over" in result.stderr
    assert "models" in result.stderr
    book = load_book(file)
    for key, tenant in (("sk-one", "acme"), ("sk-two", "bob")):
        principal = book.resolve(key, datetime.now(UTC))
        assert principal is not None
        assert principal.tenant is book.by_id(tenant)
    assert book.resolve("sk-old", datetime.now(UTC)) is None
    before = file.read_text()
    assert "0 keys added, 2 were there already" in run(file, *words).stderr
    assert file.read_text() == before


def test_import_of_keys_without_an_owner_asks_for_one(file: Path, tmp_path: Path) -> None:
    """`--tenant-map =acme` gives them to acme."""
    export = tmp_path / "keys.csv"
    export.write_text(f"sha256,label\n{digest_of('k1')},one\n")
    refused = run(file, "import", str(export))
    assert refused.exit_code == 1
    assert "--tenant-map =NAME" in refused.stderr
    assert run(file, "import", str(export), "--tenant-map", "=acme").exit_code == 0
    assert load_book(file).by_id("acme") is not None
