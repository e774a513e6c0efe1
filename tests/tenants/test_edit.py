"""Changing the tenants file: everything that is not the key stays as it was."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tenants import TenantsError, digest_of, load_book
from app.tenants.edit import Draft, edit, new_key

if TYPE_CHECKING:
    from pathlib import Path

KEY = {"id": "new", "sha256": "d" * 64, "label": "it's: [new] # ü"}

FILE = f"""\
# heading
tenants:   # all of them
  - id: acme  # the first
    weight: 1_000 # generous
    keys:
      # Bob's
      - id: bob   # lost?
        # within
        sha256: {"a" * 64}
      # below Bob's

  # ---- the second ----
  - id: "zed"
    limits: {{ max_n: 4 }}

# ---- the operators ----
operators:
- id: ops
  sha256: '{"b" * 64}'
# the end"""


def test_key_is_added_below_the_last_one_and_above_what_follows() -> None:
    """The heading of the next tenant does not end up within this one."""
    draft = Draft(FILE, "f")
    draft.add_keys("acme", [KEY])
    added = f'      - id: new\n        sha256: {"d" * 64}\n        label: "{KEY["label"]}"\n'
    place = FILE.index("      # below Bob's")
    assert draft.text == FILE[:place] + added + FILE[place:]
    assert draft.book.principals["d" * 64].key.label == KEY["label"]


def test_revoked_key_takes_its_lines_and_no_comment_line() -> None:
    """Only the key's own lines go, with the remarks behind them."""
    draft = Draft(FILE, "f")
    draft.remove_key("bob")
    gone = FILE.replace("      - id: bob   # lost?\n", "").replace(f"        sha256: {'a' * 64}\n", "")
    assert draft.text == gone
    assert draft.key_ids() == {"ops"}


@pytest.mark.parametrize(
    "text",
    [
        FILE,
        FILE.replace("\n", "\r\n"),
        "",
        "# nothing yet",
        "tenants:\n",
        "tenants: []\n",
        "tenants: null # none\n",
        "tenants:\n- id: zed\n  keys: [] # none\n",
        "tenants:\n  - id: zed\n    keys: # soon\n\n    weight: 2\n  - id: y\n    keys: ~\n",
        "tenants: [{id: zed}]\n",
        "tenants: [ {id: y}, {id: zed, keys: []} ]",
        f"tenants: [{{id: zed, keys: [ {{id: x, sha256: {'a' * 64}}} ]}}]\n",
        f"{{operators: [{{id: x, sha256: {'a' * 64}}}]}}\n",
        "operators: []\ntenants:\n    - id: zed\n      models:\n        - m",
    ],
)
def test_every_usual_layout_takes_keys_and_gives_them_back(text: str) -> None:
    """Block and flow lists, absent, null and empty ones, both newlines, with and without a last one."""
    draft = Draft(text, "f")
    before = draft.key_ids()
    for tenant in ("zed", "fresh"):
        if draft.book.by_id(tenant) is None:
            draft.add_tenant(tenant)
    comments = _comments(draft.text)
    draft.add_keys("zed", [KEY, {"id": "2nd", "sha256": "e" * 64}])
    draft.add_keys("fresh", [{"id": "3", "sha256": "1" * 64}])
    draft.add_keys(None, [{"id": "op", "sha256": "f" * 64}])
    owners = {p.key.id: p.tenant.id if p.tenant else None for p in draft.book.principals.values()}
    assert owners.items() >= {"new": "zed", "2nd": "zed", "3": "fresh", "op": None}.items()
    for key in ("new", "3", "op", "2nd"):
        draft.remove_key(key)
    assert draft.key_ids() == before
    assert _comments(draft.text) == comments
    newlines = draft.text.count("\n")
    assert draft.text.count("\r\n") == (newlines if "\r\n" in text else 0)


def test_new_list_lands_below_its_tenant_and_above_the_next_heading() -> None:
    """Also where the tenant ends in a name without a value, which YAML places at the next thing."""
    text = "tenants:\n- id: a\n  models: # all\n\n# ---- b ----\n- id: b\n"
    draft = Draft(text, "f")
    draft.add_keys("a", [{"id": "new", "sha256": "d" * 64}])
    added = f"  keys:\n  - id: new\n    sha256: {'d' * 64}\n"
    assert draft.text == text.replace("# all\n", f"# all\n{added}")


@settings(deadline=None)  # a busy machine is not a fault
@given(st.data())
def test_adding_and_revoking_in_any_order_keeps_every_other_line(data: st.DataObject) -> None:
    """A file with remarks on every line has all of them after any sequence of commands."""
    draft = Draft(_remarked(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))), "f")
    lines = draft.text.splitlines()
    tenants = st.sampled_from([*draft.book.tenants, None])
    added: list[str] = []
    for number in range(data.draw(st.integers(1, 6))):
        revoked = data.draw(st.integers(-1, len(added) - 1))
        if revoked >= 0:
            draft.remove_key(added.pop(revoked))
        else:
            added.append(f"added{number}")
            entry = {"id": added[-1], "sha256": digest_of(added[-1])}
            draft.add_keys(data.draw(tenants), [entry])
    for key in added:
        draft.remove_key(key)
    assert [line for line in draft.text.splitlines() if line != "operators:"] == lines


def _remarked(key_counts: list[int]) -> str:
    lines = ["# head", "tenants: # r"]
    for tenant, count in enumerate(key_counts):
        lines += [f"  # tenant {tenant}", f"  - id: t{tenant} # r", "", "    keys: # r"]
        for key in range(count):
            name = f"t{tenant}k{key}"
            lines += [f"      # key {name}", f"      - id: {name} # r", f"        sha256: {digest_of(name)}"]
        lines.append(f"      # end of {tenant}")
    return "\n".join([*lines, "# tail", ""])


def _comments(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("#")]


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_shared_list_is_left_to_people(tenant: str) -> None:
    """An aliased list cannot be changed for one tenant alone; a refusal is better than a wrong file."""
    draft = Draft("tenants:\n- id: a\n  keys: &k []\n- id: b\n  keys: *k\n", "f")
    with pytest.raises(TenantsError, match="do it by hand"):
        draft.add_keys(tenant, [KEY])


def test_unprintable_label_is_refused_as_such() -> None:
    """The schema's words, and not a complaint about the file's layout."""
    with pytest.raises(TenantsError, match="must be printable text"):
        Draft(FILE, "f").add_keys("zed", [{**KEY, "label": "a\x7fb\n"}])


def test_refused_change_leaves_the_file_alone(tmp_path: Path) -> None:
    """The result is read back as a book before it is written."""
    path = tmp_path / "t.yaml"
    path.write_text(FILE)
    with pytest.raises(TenantsError, match="the same key id"), edit(path) as draft:
        draft.add_keys("zed", [{"id": "bob", "sha256": "e" * 64}])
    assert path.read_text() == FILE
    assert os.listdir(tmp_path) == ["t.yaml"]


def test_change_keeps_mode_and_link(tmp_path: Path) -> None:
    """The gateway's user can still read it, and a linked file is still a link."""
    target = tmp_path / "real" / "t.yaml"
    target.parent.mkdir()
    target.write_text(FILE)
    target.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    with edit(link) as draft:
        draft.add_keys("acme", [KEY])
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert "d" * 64 in load_book(target).principals


def test_new_file_is_for_its_owner_only(tmp_path: Path) -> None:
    """Mode 0600, and the schema on the first line."""
    path = tmp_path / "config" / "t.yaml"
    with edit(path, create=True) as draft:
        draft.add_tenant("acme")
        draft.add_keys("acme", [KEY])
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().startswith("# yaml-language-server: $schema=")


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    """Each waits for the lock and reads what the one before has written."""
    path = tmp_path / "t.yaml"
    path.write_text(FILE)

    def add(number: int) -> None:
        with edit(path) as draft:
            draft.add_keys("zed", [{"id": f"k{number}", "sha256": digest_of(str(number))}])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Draft(path.read_text(), "f").key_ids() == {"bob", "ops", *(f"k{number}" for number in range(8))}


def test_new_keys_are_long_and_never_alike() -> None:
    """So that a plain SHA-256 is enough."""
    keys = {new_key()[0] for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("fg-") and len(key) >= 43 for key in keys)
