"""Reading a tenants file: what is refused, in which words, and who a key belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from app.core.record import Limits, PriorityClass, Role
from app.tenants import ANONYMOUS, KeyExpired, TenantBook, TenantsError, load_book
from app.tenants.schema import EMPTY_DIGEST, LimitsEntry

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 6, 1, tzinfo=UTC)
A, B = ("a" * 64, "b" * 64)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def book_of(tmp_path: Path, text: str, *, need_key: bool = True) -> TenantBook:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    return load_book(path, need_key=need_key)


def problem_of(tmp_path: Path, text: str) -> str:
    with pytest.raises(TenantsError) as raised:
        book_of(tmp_path, text)
    return str(raised.value).replace(f"{tmp_path}/", "")


def test_every_field_reaches_the_tenant(tmp_path: Path) -> None:
    """What stands in the file is what the gateway works with."""
    book = book_of(
        tmp_path,
        f"""
tenants:
  - id: acme
    weight: 2.5
    class: batch
    limits: {{requests_per_minute: 60, max_concurrency: 4, burst_s: 5}}
    ttft_deadline_s: 1.5
    models: [base, adapter]
    flags: [shared_prefix_cache, no_preempt]
    keys:
      - id: k1
        sha256: {A}
        label: Bob
        role: operator
        expires: 2027-01-31T00:00:00+01:00
        limits: {{max_n: 1}}
operators:
  - {{id: ops, sha256: {B}}}
""",
    )
    acme = book.by_id("acme")
    assert acme is not None
    assert (acme.weight, acme.priority_class) == (2.5, PriorityClass.BATCH)
    assert acme.limits == Limits(requests_per_minute=60, max_concurrency=4, burst_s=5)
    assert acme.ttft_deadline_s == 1.5
    assert acme.models == frozenset({"base", "adapter"})
    assert acme.shared_prefix_cache
    assert acme.no_preempt
    key = book.principals[A].key
    assert (key.id, key.label, key.role) == ("k1", "Bob", Role.OPERATOR)
    assert key.limits == Limits(max_n=1)
    assert key.expires_at == datetime(2027, 1, 30, 23, tzinfo=UTC)
    assert book.principals[B].tenant is None
    assert book.principals[B].is_operator


def test_limits_in_the_file_are_those_of_the_core() -> None:
    """A limit added to the core is one that a file can set."""
    assert list(LimitsEntry.model_fields) == [field.name for field in fields(Limits)]


def test_key_is_found_by_its_digest_until_it_expires(tmp_path: Path) -> None:
    """The moment of expiry itself is too late; a wrong key is nobody's."""
    end = NOW + timedelta(hours=1)
    book = book_of(
        tmp_path,
        f"tenants: [{{id: a, keys: [{{id: k, sha256: {digest('sk-é')}, expires: '{end.isoformat()}'}}]}}]",
    )
    found = book.resolve("sk-é", end - timedelta(seconds=1))
    assert found is not None
    assert found.tenant is book.by_id("a")
    with pytest.raises(KeyExpired):
        book.resolve("sk-é", end)
    assert book.resolve("sk-e", NOW) is None
    assert book.resolve("", NOW) is None


def test_book_without_authentication_knows_its_one_tenant() -> None:
    """Metrics and limits are looked up by it."""
    assert TenantBook.open_to_all().by_id("anonymous") is ANONYMOUS.tenant


def test_empty_book_lets_nobody_in() -> None:
    """The default is deny."""
    assert TenantBook().resolve("anything", NOW) is None


@pytest.mark.parametrize("weight", ["0", "-1", ".nan", ".inf", "1001", "true", "'2'"])
def test_useless_weight_is_refused(tmp_path: Path, weight: str) -> None:
    """Each of these would starve a tenant, or everyone else."""
    text = f"tenants:\n  - id: a\n    weight: {weight}\n    keys: [{{id: k, sha256: {A}}}]\n"
    assert problem_of(tmp_path, text).startswith("tenants.yaml:3: tenants[0].weight")


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("id: Acme", "tenants[0].id = 'Acme': must be 1 to 64 of a-z"),
        ("id: other", "tenants[0].id = 'other': is reserved (anonymous, none, other)"),
        (
            "id: a, class: gold",
            "tenants[0].class = 'gold': Input should be 'interactive', 'standard' or 'batch'",
        ),
        (
            "id: a, limits: {max_n: 0}",
            "tenants[0].limits.max_n = 0: Input should be greater than or equal to 1",
        ),
        ("id: a, limits: {max_n: true}", "tenants[0].limits.max_n = True: Input should be a valid integer"),
        ("id: a, limits: {rpm: 5}", "tenants[0].limits.rpm: there is no such field"),
        ("id: a, models: []", "tenants[0].models: List should have at least 1 item"),
        ("id: a, flags: [fast]", "tenants[0].flags[0] = 'fast': Input should be 'shared_prefix_cache'"),
        ("weight: 1", "tenants[0].id: is missing"),
        (f"id: a, keys: [{{id: k, sha256: {EMPTY_DIGEST}}}]", "is the SHA-256 of an empty key"),
        (f"id: a, keys: [{{id: k, sha256: {A.upper()}}}]", "keys[0].sha256: must be the SHA-256 of a key"),
        (f"id: a, keys: [{{id: k, sha256: {A}, expires: 2027-01-31}}]", "must name its zone"),
        (f"id: a, keys: [{{id: k, sha256: {A}, expires: 20}}]", "expires = 20: must be a date-time such as"),
        ("id: a, keys: [{id: k, sha256: 1}]", "keys[0].sha256: Input should be a valid string"),
    ],
)
def test_wrong_field_is_told_with_line_path_and_remedy(tmp_path: Path, entry: str, told: str) -> None:
    """Whoever mistyped finds the place without searching."""
    problem = problem_of(tmp_path, f"# heading\ntenants:\n  - {{{entry}}}\n")
    assert told in problem
    assert problem.startswith("tenants.yaml:3: ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "tenants: [{id: a}, {id: a}]",
            "tenants[1].id = 'a': the same tenant stands on line 1: tenants[0].id",
        ),
        (
            f"tenants: [{{id: a, keys: [{{id: k, sha256: {A}}}]}}]\noperators: [{{id: k, sha256: {B}}}]",
            "tenants[0].keys[0].id = 'k': the same key id stands on line 2: operators[0].id",
        ),
        (
            f"operators: [{{id: k, sha256: {A}}}, {{id: l, sha256: {A}}}]",
            "operators[1].sha256: the same key stands on line 1: operators[0].sha256",
        ),
        ("tenants:\n  - id: a\n    id: b\n", "tenants.yaml:3: is not valid YAML: found duplicate key"),
        ("tenants: [{id: a", "is not valid YAML"),
        ("- a", "Input should be"),
        (f"operators: [{{id: o, sha256: {A}, role: tenant}}]", "operators[0].role = 'tenant'"),
        ("tenants: [{id: a}]", "holds no key at all"),
        ("# nothing yet\n", "holds no key at all"),
    ],
)
def test_wrong_file_is_refused_with_the_reason(tmp_path: Path, text: str, told: str) -> None:
    """What no single field shows: repetitions, broken YAML, nobody to serve."""
    assert told in problem_of(tmp_path, text)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    """One edit mends the file, not one edit a problem."""
    problem = problem_of(tmp_path, "tenants:\n  - {id: A}\n  - {id: b, weight: 0}\n")
    assert [line.split(":")[1] for line in problem.splitlines()] == ["2", "3"]


SECRET = "fg-ThisIsAKeyThatSomeonePastedIntoTheFile0000"


@pytest.mark.parametrize(
    "text",
    [
        f"tenants: [{{id: {SECRET}}}]",
        f"tenants: [{{id: a, keys: [{{id: k, key: {SECRET}}}]}}]",
        f"tenants: [{{id: a, keys: [{{id: k, sha256: {SECRET}}}]}}]",
        f"tenants: [{{id: a, keys: [{SECRET}]}}]",
        f"tenants: [{{id: a, keys: {SECRET}}}]",
        f"tenants: [{{id: a, keys: [{{id: k, sha256: {A}, role: {SECRET}}}]}}]",
        f"tenants: [{{id: a, keys: [{{id: k, sha256: {A}, expires: {SECRET}}}]}}]",
        f"tenants: [{{id: {SECRET}, id: {SECRET}}}]",
        f"tenants: [{SECRET}: {SECRET}",
        "tenants: [{id: a, keys: [{id: k, sha256: sk-hunter2}]}]",
        "tenants: [{id: a, keys: [{id: k, key: sk-hunter2}]}]",
    ],
)
def test_pasted_key_is_not_quoted(tmp_path: Path, text: str) -> None:
    """B38: the message goes to the log, and the log goes everywhere."""
    problem = problem_of(tmp_path, text)
    assert SECRET not in problem
    assert "hunter2" not in problem


def test_repr_shows_no_digest(tmp_path: Path) -> None:
    """A book in a traceback or a debug line tells nothing about keys."""
    assert A not in repr(book_of(tmp_path, f"operators: [{{id: o, sha256: {A}}}]"))


def test_missing_file_names_the_command_that_makes_one(tmp_path: Path) -> None:
    """The first start of a newcomer."""
    with pytest.raises(TenantsError, match=r"no such file.*fairgate keys create"):
        load_book(tmp_path / "none.yaml")


def test_keyless_file_is_fine_where_tokens_serve(tmp_path: Path) -> None:
    """With an identity provider no key need exist; a null list is an empty one."""
    assert (
        book_of(tmp_path, "tenants:\n  - id: a\n    keys:\noperators:\n", need_key=False).by_id("a")
        is not None
    )
