"""Keys from another gateway, by their hashes, so that nobody has to change a key.

Owns the reading of exports (`read_export`); ``commands/keys.py`` writes what comes out. Two kinds of
rows, as a JSON list or as CSV with a header:

- plain: ``tenant``, ``sha256`` and optionally ``label`` and ``expires``;
- LiteLLM's table ``LiteLLM_VerificationToken``: ``token`` is the SHA-256, in hexadecimal, of the whole
  ``sk-...`` key (``hash_token`` in ``litellm/proxy/_types.py``), the owner is ``team_id`` or else
  ``user_id``, the label ``key_alias``, and ``expires`` is in UTC.

No message repeats a hash field: an export from a gateway that stores keys in the clear would be quoted.
"""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .book import read_text
from .document import TenantsError
from .schema import EMPTY_DIGEST, MAX_LABEL, instant

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DIGEST = re.compile(r"[0-9a-f]{64}")

LITELLM_LIMITS = ("models", "rpm_limit", "tpm_limit", "max_parallel_requests", "max_budget")
"""Columns that bound one key there. Here a tenant has bounds, a key has none."""

LITELLM_DASHBOARD = "litellm-dashboard"
"""The team of the sessions of LiteLLM's own web page."""


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """One key of an export."""

    owner: str
    """The tenant's name over there; empty if the export has none."""
    sha256: str
    label: str
    expires: datetime | None
    bounded_by: tuple[str, ...] = ()
    """Names of LiteLLM's columns that bound this key and are not taken over."""


@dataclass(frozen=True, slots=True)
class Export:
    """What an export holds."""

    keys: tuple[ImportedKey, ...]
    left_out: tuple[str, ...]
    """Rows not to be taken, and why: for people."""


def read_export(path: Path, now: datetime) -> Export:
    """Read another gateway's keys.

    Args:
        path: ``*.csv`` or ``*.json``.
        now: With a zone; keys that have expired by then are left out.

    Raises:
        TenantsError: Not such a file, or a row that cannot be a key; with its number.
    """
    keys: list[ImportedKey] = []
    left_out: list[str] = []
    for number, row in enumerate(_rows(path), start=1):
        where = f"{path}: row {number}"
        key = _litellm(row, where) if "token" in row else _plain(row, where)
        if str(row.get("blocked")).lower() in {"true", "t", "1"}:
            left_out.append(f"row {number}: blocked")
        elif key.owner == LITELLM_DASHBOARD:
            left_out.append(f"row {number}: a session of LiteLLM's web page")
        elif key.expires is not None and key.expires <= now:
            left_out.append(f"row {number}: expired {key.expires:%Y-%m-%d}")
        else:
            keys.append(key)
    return Export(tuple(keys), tuple(left_out))


def _rows(path: Path) -> list[Mapping[str, Any]]:
    text = read_text(path).removeprefix("\ufeff")  # spreadsheets write a byte-order mark
    match path.suffix.lower():
        case ".csv":
            rows: Any = list(csv.DictReader(io.StringIO(text)))
        case ".json":
            try:
                rows = json.loads(text)
            except ValueError as error:
                raise TenantsError(f"{path}: is not valid JSON: {type(error).__name__}") from None
        case _:
            raise TenantsError(f"{path}: must be a .csv or .json file")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise TenantsError(f"{path}: must be a JSON list of objects, one a key")
    return rows


def _plain(row: Mapping[str, Any], where: str) -> ImportedKey:
    if "sha256" not in row:
        raise TenantsError(f"{where}: needs a column sha256 (or token, as LiteLLM exports it)")
    return ImportedKey(
        owner=_text(row, "tenant"),
        sha256=_digest(row, "sha256", where),
        label=_label(row, "label"),
        expires=_expiry(row, where, naive_is_utc=False),
    )


def _litellm(row: Mapping[str, Any], where: str) -> ImportedKey:
    return ImportedKey(
        owner=_text(row, "team_id") or _text(row, "user_id"),
        sha256=_digest(row, "token", where),
        label=_label(row, "key_alias"),
        expires=_expiry(row, where, naive_is_utc=True),
        bounded_by=tuple(name for name in LITELLM_LIMITS if row.get(name) not in (None, "", "{}", "[]", [])),
    )


def _text(row: Mapping[str, Any], column: str) -> str:
    return str(row.get(column) or "").strip()


def _label(row: Mapping[str, Any], column: str) -> str:
    return "".join(filter(str.isprintable, _text(row, column)))[:MAX_LABEL]


def _digest(row: Mapping[str, Any], column: str, where: str) -> str:
    digest = _text(row, column).lower()
    if not _DIGEST.fullmatch(digest):
        raise TenantsError(f"{where}: {column} is not a SHA-256 in 64 hexadecimal digits")
    if digest == EMPTY_DIGEST:
        raise TenantsError(f"{where}: {column} is the SHA-256 of an empty key")
    return digest


def _expiry(row: Mapping[str, Any], where: str, *, naive_is_utc: bool) -> datetime | None:
    text = _text(row, "expires")
    if not text:
        return None
    try:
        if naive_is_utc:
            parsed = datetime.fromisoformat(text)
            return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
        return instant(text)
    except ValueError as error:
        raise TenantsError(f"{where}: expires {error}") from None
