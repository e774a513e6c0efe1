"""A gateway whose tenants have limits, and whose every clock is the test's.

Owns `limited`, which opens such a `Stack`: the edge, admission, the store and the loop's timers go by one
`FakeClock`, so that a minute passes when a test says so and nobody sleeps.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import yaml

from app import parts, server
from app.tenants import digest_of

from .asgi import settle
from .clock import FakeClock, loop_clock
from .stack import OPERATOR, Stack, settings_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class FakeTime:
    """What the server and its parts ask of the module ``time``."""

    def __init__(self, clock: FakeClock) -> None:
        self.monotonic = clock

    def monotonic_ns(self) -> int:
        """Nanoseconds."""
        return round(self.monotonic() * 1e9)

    def time_ns(self) -> int:
        """Nanoseconds since 1970, near enough."""
        return 1_800_000_000 * 10**9 + self.monotonic_ns()


class LimitedStack(Stack):
    """A `Stack`, its clock and its tenants file."""

    clock: FakeClock

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        self.clock.advance(seconds)
        await settle()

    def write(self, **tenants: dict[str, Any]) -> None:
        """Write the tenants file: by id, their entries without id and keys. `key_of` is each one's key."""
        self.settings.auth.tenants_file.write_text(tenants_file(**tenants))

    async def reload(self, **tenants: dict[str, Any]) -> None:
        """The tenants are these from now on."""
        self.write(**tenants)
        assert await self.gateway.tenants.reload()

    def queued(self) -> int:
        """Requests that wait for their turn."""
        assert self.gateway.admission is not None
        return self.gateway.admission.snapshot().queued


def key_of(tenant: str) -> str:
    """A tenant's only key."""
    return f"fg-{tenant}-0123456789abcdef"


def tenants_file(**tenants: dict[str, Any]) -> str:
    """A tenants file's text."""
    entries = [
        {"id": id, "keys": [{"id": f"k-{id}", "sha256": digest_of(key_of(id))}], **entry}
        for id, entry in tenants.items()
    ]
    operators = [{"id": "k-operator", "sha256": digest_of(OPERATOR)}]
    return yaml.safe_dump({"tenants": entries, "operators": operators})


@asynccontextmanager
async def limited(
    directory: Path, tenants: dict[str, dict[str, Any]], **variables: str
) -> AsyncIterator[LimitedStack]:
    """A ready stack with these tenants; looked over at the end."""
    settings = settings_in(directory, **variables)
    settings.auth.tenants_file.write_text(tenants_file(**tenants))
    clock = FakeClock()
    time = FakeTime(clock)
    with mock.patch.object(server, "time", time), mock.patch.object(parts, "time", time):
        stack = LimitedStack(settings)
        stack.clock = clock
        await stack.load()
        async with loop_clock(clock):
            try:
                yield stack
            finally:
                await stack.close()
