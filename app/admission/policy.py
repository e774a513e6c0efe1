"""`Policy`: what the operator has set for all tenants. Made by ``server.py`` from the settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator has set for all tenants."""

    max_queued: int = 1000
    """Requests of a tenant that may wait, where it has no bound of its own."""
    queue_timeout_s: float | None = None
    fixes_status: bool = False
    """A waiting stream is kept alive by comments, which fix its status to 200."""
