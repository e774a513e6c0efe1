"""Who may ask: tenants by id, principals by the digest of a key.

Owns `TenantBook`, an immutable picture of one tenants file, and its reading (`load_book`).
``holder.py`` swaps whole books; ``http/auth.py`` asks the book of the moment; ``edit.py`` reads a
changed text through the same door before it is written.

Looking a key up takes no time that depends on a secret: what is compared is the SHA-256 of the
presented key, and nobody can choose digests that agree with a stored one digit by digit. The keys
themselves have at least 256 random bits (``fairgate keys create``), so a fast hash is enough.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from pydantic import ValidationError

from ..core.record import Key, Limits, Principal, Role, Tenant
from .document import Document, TenantsError, shown
from .schema import KeyEntry, LimitsEntry, TenantEntry, TenantsFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime
    from pathlib import Path

    from pydantic_core import ErrorDetails

    from .document import FieldPath

_EVERYONE = Tenant("anonymous")
ANONYMOUS = Principal(Key("anonymous", role=Role.OPERATOR), _EVERYONE)
"""Everyone, when authentication is switched off."""


class KeyExpired(Exception):
    """The key is right, and its time is over. Only who holds the key can learn this."""


@dataclass(frozen=True, slots=True)
class TenantBook:
    """One state of the tenants file. Empty by default: it lets nobody in."""

    tenants: Mapping[str, Tenant] = field(default_factory=lambda: MappingProxyType({}))
    """By id, in the file's order."""
    principals: Mapping[str, Principal] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    """By the hexadecimal SHA-256 of the key."""

    def resolve(self, token: str, now: datetime) -> Principal | None:
        """Whose key this is, or ``None``.

        Args:
            token: The key as presented.
            now: With a zone.

        Raises:
            KeyExpired: It was a key until a moment that has passed.
        """
        principal = self.principals.get(digest_of(token))
        if principal is not None and (end := principal.key.expires_at) is not None and now >= end:
            raise KeyExpired
        return principal

    def by_id(self, tenant_id: str) -> Tenant | None:
        """The tenant of that id, or ``None``."""
        return self.tenants.get(tenant_id)

    @classmethod
    def open_to_all(cls) -> Self:
        """The book of a gateway without authentication: everyone is `ANONYMOUS`."""
        return cls(MappingProxyType({_EVERYONE.id: _EVERYONE}))

    @classmethod
    def of(cls, file: TenantsFile) -> Self:
        """The book of a checked file."""
        tenants = {entry.id: _tenant(entry) for entry in file.tenants}
        principals = {
            key.sha256: Principal(_key(key), tenants[entry.id])
            for entry in file.tenants
            for key in entry.keys
        }
        principals |= {key.sha256: Principal(_key(key)) for key in file.operators}
        return cls(MappingProxyType(tenants), MappingProxyType(principals))


def digest_of(token: str) -> str:
    """The hexadecimal SHA-256 by which a key is known."""
    # surrogatepass: a lone surrogate cannot be in a stored key, but must not raise either
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def read_text(path: Path) -> str:
    """The tenants file's text, newlines as they are.

    Raises:
        TenantsError: Missing, not readable, not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise TenantsError(
            f"{path}: there is no such file. Make one with `fairgate keys create --tenant NAME --file {path}`"
        ) from None
    except OSError as error:
        raise TenantsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TenantsError(f"{path}: is not UTF-8 text") from None


def load_book(path: Path, *, need_key: bool = True) -> TenantBook:
    """Read a tenants file. `need_key` refuses one that would let nobody in.

    Raises:
        TenantsError: Every problem of the file, one a line.
    """
    return parse_book(Document.parse(read_text(path), str(path)), need_key=need_key)


def parse_book(document: Document, *, need_key: bool) -> TenantBook:
    """`load_book` on a parsed text."""
    try:
        file = TenantsFile.model_validate({} if document.data is None else document.data)
    except ValidationError as error:
        raise TenantsError("\n".join(_problem(document, one) for one in error.errors())) from None
    book = TenantBook.of(file)
    problems = list(_repetitions(document, file))
    if need_key and not book.principals:
        problems.append(f"{document.name}: holds no key at all, so nobody could be served")
    if problems:
        raise TenantsError("\n".join(problems))
    return book


def _repetitions(document: Document, file: TenantsFile) -> Iterator[str]:
    """What each entry may not share with another: tenant ids, key ids, digests."""
    yield from _repeated(
        document, ((("tenants", i, "id"), t.id) for i, t in enumerate(file.tenants)), "tenant"
    )
    keys: list[tuple[FieldPath, KeyEntry]] = [(("operators", i), key) for i, key in enumerate(file.operators)]
    keys += [
        (("tenants", i, "keys", j), key)
        for i, tenant in enumerate(file.tenants)
        for j, key in enumerate(tenant.keys)
    ]
    yield from _repeated(document, (((*path, "id"), key.id) for path, key in keys), "key id")
    yield from _repeated(document, (((*path, "sha256"), key.sha256) for path, key in keys), "key")


def _repeated(document: Document, found: Iterable[tuple[FieldPath, str]], what: str) -> Iterator[str]:
    first: dict[str, FieldPath] = {}
    for path, value in found:
        if value in first:
            where = document.place(first[value]).removeprefix(f"{document.name}:")
            yield f"{document.place(path)}{shown(path, value)}: the same {what} stands on line {where}"
        first.setdefault(value, path)


def _problem(document: Document, error: ErrorDetails) -> str:
    """One of pydantic's errors, for people."""
    path = error["loc"]
    known = error["type"] != "extra_forbidden"  # an unknown field could be `key: fg-...`
    told = {
        "extra_forbidden": "there is no such field",
        "missing": "is missing",
        "string_pattern_mismatch": _PATTERNS.get(str(path[-1]) if path else "", error["msg"]),
    }.get(error["type"], error["msg"].removeprefix("Value error, "))
    value = shown(path, error["input"]) if known and error["type"] != "missing" else ""
    return f"{document.place(path)}{value}: {told}"


_PATTERNS = {
    "id": "must be 1 to 64 of a-z 0-9 _ . - and begin with a letter or digit",
    "sha256": "must be the SHA-256 of a key, 64 lower-case hexadecimal digits (`fairgate keys` writes it)",
}


def _tenant(entry: TenantEntry) -> Tenant:
    return Tenant(
        id=entry.id,
        weight=entry.weight,
        priority_class=entry.priority_class,
        limits=_limits(entry.limits),
        models=None if entry.models is None else frozenset(entry.models),
        shared_prefix_cache="shared_prefix_cache" in entry.flags,
        no_preempt="no_preempt" in entry.flags,
        ttft_deadline_s=entry.ttft_deadline_s,
    )


def _key(entry: KeyEntry) -> Key:
    return Key(
        id=entry.id,
        label=entry.label,
        role=entry.role,
        expires_at=entry.expires,
        limits=None if entry.limits is None else _limits(entry.limits),
    )


def _limits(entry: LimitsEntry) -> Limits:
    return Limits(**entry.model_dump())  # the names are the same; a test compares them
