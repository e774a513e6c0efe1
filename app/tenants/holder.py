"""The book of the moment, and its reloads.

Owns `Tenants`. ``server.py`` opens one, runs `watch` as a task and calls `reload` on SIGHUP;
``http/auth.py`` reads `book` at every request, so that a new state holds from the next request on.
Running requests keep the frozen `Tenant` that they came with, and nothing is ever written back.
A file that cannot be used changes nothing: the last good book stays.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Protocol, Self

from watchfiles import awatch

from .book import TenantBook, load_book
from .document import TenantsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
"""Seconds between looks at the file without any event: network mounts and links into other
directories send none. So a revoked key is out within this time wherever the file lies."""


class ReloadObserver(Protocol):
    """Told how each reload went: for the log and a metric."""

    def __call__(self, ok: bool, problem: str | None) -> None:
        """`problem` is a text for people, without any key."""


class Tenants:
    """Holds one `TenantBook` at a time. One event loop; reading and parsing happen off it."""

    def __init__(
        self,
        path: Path | None,
        book: TenantBook,
        *,
        on_reload: ReloadObserver,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        """Hold a book; without a path (authentication is off) it stays for good."""
        self._path = path
        self._on_reload = on_reload
        self._look_again_s = look_again_s
        self._subscribers: list[Callable[[TenantBook, TenantBook], None]] = []
        # The mutable state: the book, and the fingerprint of the file as last looked at.
        self._book = book
        self._seen: bytes | None = None
        self._one_at_a_time = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Tenants {len(self._book.tenants)} tenants, {len(self._book.principals)} keys>"

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        on_reload: ReloadObserver,
        need_key: bool = True,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> Self:
        """Load the file at start.

        Args:
            path: The tenants file.
            on_reload: Told about later reloads.
            need_key: Whether a file without a key is an error (not where tokens are accepted too).
            look_again_s: See `LOOK_AGAIN_S`.

        Raises:
            TenantsError: It cannot be used.
        """
        seen = _fingerprint(path)
        tenants = cls(
            path, load_book(path, need_key=need_key), on_reload=on_reload, look_again_s=look_again_s
        )
        tenants._seen = seen
        return tenants

    @property
    def book(self) -> TenantBook:
        """The state that holds now."""
        return self._book

    def subscribe(self, changed: Callable[[TenantBook, TenantBook], None]) -> None:
        """Call `changed(old, new)` after every reload, on the loop. It must not block."""
        self._subscribers.append(changed)

    async def reload(self) -> bool:
        """Read the file again; whether its state holds now. A broken file keeps the old one.

        A file without any key is taken here, other than at start: whoever revokes the last key
        wants it out.
        """
        if self._path is None:
            return True
        async with self._one_at_a_time:  # or a slow older read could overwrite a newer one
            # Looked at before it is read: a change between the two is then seen as one next time.
            self._seen = await asyncio.to_thread(_fingerprint, self._path)
            try:
                book = await asyncio.to_thread(load_book, self._path, need_key=False)
            except TenantsError as error:
                self._on_reload(False, str(error))
                return False
            old, self._book = self._book, book
        self._on_reload(True, None)
        for changed in self._subscribers:
            try:
                changed(old, book)
            except Exception:  # a subscriber's fault may not end the watch: keys would stay valid
                log.exception("a subscriber failed on new tenants")
        return True

    async def watch(self) -> None:
        """Reload whenever the file's content is another. Runs until cancelled."""
        if self._path is None:
            return
        while True:
            # The directory, because ConfigMaps and editors put a new file in the old one's place.
            events = awatch(
                self._path.parent,
                recursive=False,
                rust_timeout=int(self._look_again_s * 1000),
                yield_on_timeout=True,
            )
            try:
                await self._reload_if_changed(self._path)  # also where no watch is possible
                async for _ in events:
                    await self._reload_if_changed(self._path)
            except (OSError, RuntimeError) as error:  # RuntimeError: watchfiles' own
                log.warning("the tenants file is not watched, only looked at every few seconds: %s", error)
            await asyncio.sleep(self._look_again_s)

    async def _reload_if_changed(self, path: Path) -> None:
        # Other files of the directory change too, and a touched file may be the same.
        if await asyncio.to_thread(_fingerprint, path) != self._seen:
            await self.reload()


def _fingerprint(path: Path) -> bytes:
    """Equal for equal content; empty when there is nothing to read."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""
