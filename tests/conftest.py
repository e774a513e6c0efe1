"""What every test may ask for: a ready gateway over a fake engine, or one whose engine is still loading."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from .support.stack import Stack, opened, settings_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A gateway that is ready."""
    async with opened(settings_in(tmp_path)) as ready:
        yield ready


@pytest.fixture
async def loading(tmp_path: Path) -> AsyncIterator[Stack]:
    """A gateway whose model is still loading."""
    stack = Stack(settings_in(tmp_path))
    yield stack
    await stack.close()


@pytest.fixture(autouse=True)
async def _no_task_left() -> AsyncIterator[None]:
    """A test leaves no task of its requests behind."""
    yield
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, left
