"""Reloading: a new state holds at once, a broken one never (B27)."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from app.tenants import TenantBook, Tenants, digest_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def text_for(*keys: str, limit: int = 100) -> str:
    entries = ", ".join(f"{{id: {key}, sha256: '{digest_of(key)}'}}" for key in keys)
    return f"tenants: [{{id: acme, limits: {{requests_per_minute: {limit}}}, keys: [{entries}]}}]\n"


class Told:
    """Remembers what was reported, and lets a test wait for the next report."""

    def __init__(self) -> None:
        self.reports: list[tuple[bool, str | None]] = []
        self._news = asyncio.Event()

    def __call__(self, ok: bool, problem: str | None) -> None:
        self.reports.append((ok, problem))
        self._news.set()

    async def after(self, change: Callable[[], object]) -> tuple[bool, str | None]:
        """The report that a change brings. It is repeated: nothing says when the kernel's watch stands."""
        self._news.clear()
        async with asyncio.timeout(20):
            while not self._news.is_set():
                change()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.5)
        return self.reports[-1]


@asynccontextmanager
async def watching(path: Path, *, look_again_s: float = 600.0) -> AsyncIterator[tuple[Tenants, Told]]:
    """A watched file. By default it looks without an event so late that a test would have failed."""
    told = Told()
    tenants = Tenants.open(path, on_reload=told, look_again_s=look_again_s)
    watch = asyncio.create_task(tenants.watch())
    try:
        yield tenants, told
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def test_revoked_key_and_new_limit_hold_from_the_next_request_on(tmp_path: Path) -> None:
    """Who runs keeps the tenant that he came with; nothing is written back."""
    path = tmp_path / "tenants.yaml"
    path.write_text(text_for("old", "kept"))
    tenants = Tenants.open(path, on_reload=Told())
    running = tenants.book.resolve("old", NOW)
    path.write_text(text_for("kept", limit=1))
    assert await tenants.reload()
    assert tenants.book.resolve("old", NOW) is None
    kept = tenants.book.resolve("kept", NOW)
    assert kept is not None
    assert kept.tenant is not None
    assert kept.tenant.limits.requests_per_minute == 1
    assert running is not None
    assert running.tenant is not None
    assert running.tenant.limits.requests_per_minute == 100


async def test_broken_or_missing_file_keeps_the_old_book_and_is_told(tmp_path: Path) -> None:
    """A slip of the pen locks nobody out."""
    path = tmp_path / "tenants.yaml"
    path.write_text(text_for("k"))
    told = Told()
    tenants = Tenants.open(path, on_reload=told)
    before = tenants.book
    path.write_text("tenants: [{id: acme, weight: 0}]")
    assert not await tenants.reload()
    path.unlink()
    assert not await tenants.reload()
    assert tenants.book is before
    (weight_ok, weight_problem), (file_ok, file_problem) = told.reports
    assert not weight_ok
    assert "weight = 0" in (weight_problem or "")
    assert not file_ok
    assert "no such file" in (file_problem or "")


async def test_last_key_can_be_revoked_while_running(tmp_path: Path) -> None:
    """At start no key is an error; later it is somebody's wish."""
    path = tmp_path / "tenants.yaml"
    path.write_text(text_for("k"))
    tenants = Tenants.open(path, on_reload=Told())
    path.write_text(text_for())
    assert await tenants.reload()
    assert tenants.book.resolve("k", NOW) is None


async def test_subscribers_hear_of_old_and_new_and_cannot_stop_one_another(tmp_path: Path) -> None:
    """Admission learns who is gone, also when another subscriber fails."""
    path = tmp_path / "tenants.yaml"
    path.write_text(text_for("k"))
    tenants = Tenants.open(path, on_reload=Told())
    seen: list[tuple[TenantBook, TenantBook]] = []

    def failing(old: TenantBook, new: TenantBook) -> None:
        raise RuntimeError("subscriber")

    tenants.subscribe(failing)
    tenants.subscribe(lambda old, new: seen.append((old, new)))
    old = tenants.book
    assert await tenants.reload()
    assert seen == [(old, tenants.book)]
    assert old is not tenants.book


async def test_without_a_file_nothing_is_watched() -> None:
    """Authentication is off: the empty book stays."""
    tenants = Tenants(None, TenantBook(), on_reload=Told())
    await tenants.watch()
    assert await tenants.reload()


async def test_swapped_link_of_a_config_map_is_seen(tmp_path: Path) -> None:
    """Kubernetes writes a new directory and renames the link ..data; the file's own entry stays as it is."""
    for version, key in (("..1", "old"), ("..2", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tenants.yaml").write_text(text_for(key))
    (tmp_path / "..data").symlink_to("..1")
    path = tmp_path / "tenants.yaml"
    path.symlink_to("..data/tenants.yaml")

    def swap() -> None:
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    async with watching(path) as (tenants, told):
        assert await told.after(swap) == (True, None)
        assert tenants.book.resolve("new", NOW) is not None
        assert tenants.book.resolve("old", NOW) is None


async def test_only_other_content_reloads(tmp_path: Path) -> None:
    """Neighbours in the directory, and a touch, are no news; a broken file is told and then mended."""
    path = tmp_path / "tenants.yaml"
    path.write_text(text_for("k"))
    async with watching(path) as (tenants, told):
        assert await told.after(lambda: path.write_text(text_for("l"))) == (True, None)
        (tmp_path / "neighbour").write_text("x")
        path.touch()
        await asyncio.sleep(0.3)  # the kernel's events come within 50 ms; that none comes needs a wait
        assert len(told.reports) == 1
        ok, problem = await told.after(lambda: path.write_text("tenants: ["))
        assert not ok
        assert "not valid YAML" in (problem or "")
        assert tenants.book.resolve("l", NOW) is not None
        assert await told.after(lambda: path.write_text(text_for("m"))) == (True, None)
        assert tenants.book.resolve("m", NOW) is not None


async def test_change_without_an_event_is_found_by_looking(tmp_path: Path) -> None:
    """Behind a link into another directory the kernel tells us nothing."""
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    elsewhere.mkdir()
    here.mkdir()
    (elsewhere / "tenants.yaml").write_text(text_for("old"))
    (here / "tenants.yaml").symlink_to(elsewhere / "tenants.yaml")
    async with watching(here / "tenants.yaml", look_again_s=0.1) as (tenants, told):
        change = (elsewhere / "tenants.yaml").write_text
        for key in ("new", "newer"):  # the second one is not found by the look at the start
            assert await told.after(lambda key=key: change(text_for(key))) == (True, None)  # type: ignore[misc]
            assert tenants.book.resolve(key, NOW) is not None


async def test_directory_that_goes_and_comes_back_is_watched_again(tmp_path: Path) -> None:
    """A remount: the last good book serves meanwhile."""
    path = tmp_path / "mount" / "tenants.yaml"
    path.parent.mkdir()
    path.write_text(text_for("k"))
    async with watching(path, look_again_s=0.1) as (tenants, told):
        ok, _ = await told.after(lambda: shutil.rmtree(path.parent, ignore_errors=True))
        assert not ok
        assert tenants.book.resolve("k", NOW) is not None
        path.parent.mkdir()
        assert await told.after(lambda: path.write_text(text_for("l"))) == (True, None)
        assert tenants.book.resolve("l", NOW) is not None
