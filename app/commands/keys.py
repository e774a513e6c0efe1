"""``fairgate keys``: make, revoke, list and import keys in the tenants file.

Owns the sub-command's words and output; the changes are ``app/tenants/edit.py``'s. Mounted by
``app/__main__.py``. A new key goes to standard output alone, so that ``KEY=$(fairgate keys create ...)``
works; everything said about it goes to standard error. A running gateway picks each change up by itself.
"""

from __future__ import annotations

import re
import secrets
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.record import Role
from ..tenants import TenantsError, load_book
from ..tenants.edit import Draft, edit, new_key
from ..tenants.importers import ImportedKey, read_export
from ..tenants.schema import instant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

keys = typer.Typer(name="keys", help="Make, revoke, list and import keys.", no_args_is_help=True)

File = Annotated[
    Path, typer.Option("--file", "-f", envvar="FAIRGATE_AUTH__TENANTS_FILE", help="The tenants file.")
]
DEFAULT_FILE = Path("config/tenants.yaml")


@keys.command()
def create(
    tenant: Annotated[
        str | None, typer.Option(help="Whose key. Left out: an operator's, of no tenant.")
    ] = None,
    label: Annotated[str, typer.Option(help="For people: who uses it, where.")] = "",
    role: Annotated[Role | None, typer.Option(help="Left out: tenant, or operator without a tenant.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="After 90d, 12h or 30m, or at 2027-01-31T00:00:00Z. Left out: never.")
    ] = None,
    create_tenant: Annotated[
        bool, typer.Option("--create-tenant", help="Add the tenant if the file does not have it.")
    ] = False,
    file: File = DEFAULT_FILE,
) -> None:
    """Make a key and print it, once: the file keeps only its SHA-256."""
    if tenant is None and role is Role.TENANT:
        raise typer.BadParameter("a key with the role tenant needs --tenant")
    key, digest = new_key()
    entry = {"id": _key_id(tenant), "sha256": digest}
    if label:
        entry["label"] = label
    if tenant is not None and role is Role.OPERATOR:
        entry["role"] = role.value
    if expires is not None:
        entry["expires"] = _when(expires, datetime.now(UTC)).isoformat(timespec="seconds")
    with _told():
        is_new = not file.exists()
        with edit(file, create=True) as draft:
            if tenant is not None and draft.book.by_id(tenant) is None:
                # In a file of its own the first tenant is no slip of the pen.
                _need_tenant(draft, tenant, may_create=create_tenant or is_new)
            draft.add_keys(tenant, [entry])
    typer.echo(f"Key {entry['id']} is in {file}. It is shown this once:", err=True)
    typer.echo(key)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="As `fairgate keys list` shows it.")],
    file: File = DEFAULT_FILE,
) -> None:
    """Strike a key out. Running requests finish, new ones are refused."""
    with _told(), edit(file) as draft:
        draft.remove_key(key_id)
    typer.echo(f"Key {key_id} is revoked.", err=True)
    if not draft.key_ids():
        typer.echo(
            "It was the last one: nobody is served now, and the gateway will not start anew.", err=True
        )


@keys.command("list")
def list_keys(file: File = DEFAULT_FILE) -> None:
    """Show all keys; never their hashes."""
    with _told():
        book = load_book(file, need_key=False)
    now = datetime.now(UTC)
    table = Table()
    for heading in ("key", "tenant", "label", "role", "expires"):
        table.add_column(heading, overflow="fold")  # never cut: `revoke` needs the whole id
    for principal in book.principals.values():
        key = principal.key
        until = f"{key.expires_at:%Y-%m-%d %H:%M %Z}" if key.expires_at else "never"
        if key.expires_at and key.expires_at <= now:
            until += " (expired)"
        tenant = principal.tenant.id if principal.tenant else "-"
        # Text: a label in square brackets is no markup.
        table.add_row(*(Text(cell) for cell in (key.id, tenant, key.label, key.role.value, until)))
    Console().print(table)


@keys.command("import")
def import_keys(
    export: Annotated[
        Path, typer.Argument(metavar="FILE", help=".csv or .json: tenant, sha256, label; or LiteLLM's table.")
    ],
    tenant_map: Annotated[
        list[str] | None,
        typer.Option(
            metavar="THEIRS=OURS", help="Another gateway's team or user, and our tenant. Repeatable."
        ),
    ] = None,
    create_tenant: Annotated[
        bool, typer.Option("--create-tenant", help="Add the tenants that the file does not have.")
    ] = False,
    file: File = DEFAULT_FILE,
) -> None:
    """Take over another gateway's keys by their hashes: nobody has to change a key.

    A second run adds only what is new. Keys that are blocked or expired over there are left out.
    """
    names = dict(_pair(text) for text in tenant_map or [])
    with _told():
        found = read_export(export, datetime.now(UTC))
        is_new = not file.exists()
        with edit(file, create=True) as draft:
            fresh = [key for key in found.keys if key.sha256 not in draft.book.principals]
            for owner in dict.fromkeys(key.owner for key in fresh):
                tenant = names.get(owner, owner)
                _need_tenant(draft, tenant, may_create=create_tenant or is_new)
                draft.add_keys(tenant, _entries(tenant, [key for key in fresh if key.owner == owner], draft))
    for line in found.left_out:
        typer.echo(f"Left out: {line}.", err=True)
    typer.echo(f"{len(fresh)} keys added, {len(found.keys) - len(fresh)} were there already.", err=True)
    if bounds := sorted({name for key in fresh for name in key.bounded_by}):
        typer.echo(
            f"Not taken over, since a tenant has bounds here and a key has none: {', '.join(bounds)}. "
            f"Set `models` and `limits` of the tenants in {file}.",
            err=True,
        )


def _need_tenant(draft: Draft, tenant: str, *, may_create: bool) -> None:
    if not tenant:
        raise TenantsError("a key of the export has no tenant: give it one with --tenant-map =NAME")
    if draft.book.by_id(tenant) is not None:
        return
    if not may_create:
        known = ", ".join(draft.book.tenants) or "none"
        raise TenantsError(
            f"there is no tenant {tenant!r} (there are: {known}). Add it by hand, or with --create-tenant"
        )
    draft.add_tenant(tenant)


def _entries(tenant: str, imported: Sequence[ImportedKey], draft: Draft) -> list[dict[str, str]]:
    entries = []
    for key in imported:
        entry = {"id": _key_id(tenant), "sha256": key.sha256, "label": key.label}
        if key.expires is not None:
            entry["expires"] = key.expires.isoformat()
        entries.append({name: value for name, value in entry.items() if value})
    return entries


def _key_id(tenant: str | None) -> str:
    """A name that tells whose key it is, and that will not come again when this one is revoked."""
    return f"{(tenant or 'operator')[:50]}-{secrets.token_hex(4)}"


_SPAN = re.compile(r"(\d{1,6})([dhm])")
_UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "m": timedelta(minutes=1)}


def _when(text: str, now: datetime) -> datetime:
    try:
        span = _SPAN.fullmatch(text)
        end = now + int(span[1]) * _UNITS[span[2]] if span else instant(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is neither a span (90d, 12h, 30m) nor a date-time with a zone (2027-01-31T00:00:00Z)"
        ) from None
    if end <= now:
        raise typer.BadParameter(f"{text!r} has passed already")
    return end


def _pair(text: str) -> tuple[str, str]:
    theirs, separator, ours = text.rpartition("=")
    if not separator or not ours:
        raise typer.BadParameter(f"--tenant-map {text!r} is not THEIRS=OURS")
    return theirs, ours


@contextmanager
def _told() -> Iterator[None]:
    """Problems with the file, for people: the text and exit status 1."""
    try:
        yield
    except TenantsError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
