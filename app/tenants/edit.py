"""Changes to the tenants file, as ``fairgate keys`` makes them.

Owns the writing: one command at a time (a lock on the directory), a text that has been read back as a
valid book before it replaces the old one, and a replacement that is there whole or not at all, also
when the power fails. The gateway only ever reads.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import splice
from .book import TenantBook, digest_of, parse_book, read_text
from .document import Document, TenantsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .document import FieldPath

NEW_FILE = """\
# yaml-language-server: $schema=tenants.schema.json
# Fairgate's tenants and their keys. `fairgate keys --help` changes the keys; the rest is for an editor.
tenants:
"""

KEY_PREFIX = "fg-"
KEY_BYTES = 32
"""256 random bits: so many that a plain SHA-256 cannot be searched."""


def new_key() -> tuple[str, str]:
    """A fresh key, and the digest by which it will be known."""
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, digest_of(key)


class Draft:
    """A tenants file being changed. Made by `edit`; every method leaves it valid or raises."""

    def __init__(self, text: str, name: str) -> None:
        self._document = Document.parse(text, name)
        self._parse()

    def _parse(self) -> None:
        self.book: TenantBook = parse_book(self._document, need_key=False)

    @property
    def text(self) -> str:
        """What will be written."""
        return self._document.text

    def key_ids(self) -> set[str]:
        """The ids of all keys."""
        return {principal.key.id for principal in self.book.principals.values()}

    def add_tenant(self, tenant_id: str) -> None:
        """A new tenant with everything left at its default."""
        self._append(("tenants",), [{"id": tenant_id}])

    def add_keys(self, tenant_id: str | None, entries: Sequence[Mapping[str, str]]) -> None:
        """Keys for a tenant, or for operators without one. The fields are those of `KeyEntry`.

        Raises:
            TenantsError: No such tenant; a field is wrong; the layout needs a human hand.
        """
        if tenant_id is None:
            self._append(("operators",), entries)
            return
        for number, entry in enumerate((self._document.data or {}).get("tenants") or []):
            if entry["id"] == tenant_id:
                self._append(("tenants", number, "keys"), entries)
                return
        known = ", ".join(self.book.tenants) or "none"
        raise TenantsError(f"{self._document.name}: there is no tenant {tenant_id!r} (there are: {known})")

    def remove_key(self, key_id: str) -> None:
        """Strike a key out.

        Raises:
            TenantsError: There is no such key; the layout needs a human hand.
        """
        for path, keys in _key_lists(self._document.data):
            for index, key in enumerate(keys):
                if key["id"] == key_id:
                    meant = [*keys[:index], *keys[index + 1 :]]
                    self._become(splice.remove(self._document, path, index), path, meant)
                    return
        raise TenantsError(
            f"{self._document.name}: there is no key {key_id!r} (`fairgate keys list` shows them)"
        )

    def _append(self, path: FieldPath, entries: Sequence[Mapping[str, str]]) -> None:
        before = _at(self._document.data, path) or []
        self._become(splice.append(self._document, path, entries), path, [*before, *map(dict, entries)])

    def _become(self, text: str, path: FieldPath, meant: list[Any]) -> None:
        """Take a changed text, if its data differ from the present ones in what was meant, and only there."""
        old, name = self._document, self._document.name
        by_hand = TenantsError(
            f"{old.place(path)}: is laid out in a way that this command cannot change safely: do it by hand"
        )
        try:
            new = Document.parse(text, name)
        except TenantsError:
            raise by_hand from None
        # Both sides without the list itself must be equal, and the list must be as meant.
        if (_at(new.data, path) or []) != meant or _without(new.data, path) != _without(old.data, path):
            raise by_hand
        self._document = new
        self._parse()


@contextmanager
def edit(path: Path, *, create: bool = False) -> Iterator[Draft]:
    """Change a tenants file; it is written when the block ends well and untouched when it raises.

    Args:
        path: The file; a link is followed, so that the link stays and its target is replaced.
        create: Begin a new file (mode 0600) where there is none.

    Raises:
        TenantsError: Missing, unreadable, broken, or not writable.
    """
    target = path.resolve()
    try:
        with _locked(target.parent, make=create):
            before = "" if create and not target.exists() else read_text(target)
            draft = Draft(before or NEW_FILE, str(path))
            yield draft
            if draft.text != before:
                _replace(target, draft.text)
    except OSError as error:
        raise TenantsError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def _locked(directory: Path, *, make: bool) -> Iterator[None]:
    # The directory and not the file: that one is replaced, and a lock would stay on the old one.
    if make:
        directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(target: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            _keep_access(file.fileno(), target)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _keep_access(descriptor: int, target: Path) -> None:
    """Mode and owner of the file that is replaced (a new one stays at mkstemp's 0600)."""
    if not target.exists():
        return
    old, new = target.stat(), os.fstat(descriptor)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        # Else root's command would leave a file that the gateway's user cannot read.
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, old.st_mode & 0o7777)


def _key_lists(data: Any) -> Iterator[tuple[FieldPath, list[dict[str, Any]]]]:
    yield ("operators",), (data or {}).get("operators") or []
    for number, tenant in enumerate((data or {}).get("tenants") or []):
        yield ("tenants", number, "keys"), tenant.get("keys") or []


def _at(data: Any, path: FieldPath) -> Any:
    for part in path[:-1]:
        data = data[part]
    return (data or {}).get(path[-1])


def _without(data: Any, path: FieldPath) -> Any:
    """The data with the list at `path` taken out."""
    first, *rest = path
    if isinstance(data, list):
        return [_without(item, tuple(rest)) if number == first else item for number, item in enumerate(data)]
    remaining = {name: value for name, value in (data or {}).items() if name != first}
    if rest:
        remaining[str(first)] = _without(data[first], tuple(rest))
    return remaining
