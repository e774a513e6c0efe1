"""`Bounds`: what a tenant, and a key, may have under way at once: sequences that run, requests that wait.

Owns the counts (the `Ledger` of tenants, the `Keys`) and says who is at which bound. Asked by ``turns.py``,
which moves the waiters. A bound is read from the tenant as configured now: a request keeps the tenant that
it came with, but a reload holds at once.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from . import refusals
from .keys import Keys, concurrency_of, most_queued
from .ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core.errors import Rejected
    from ..core.record import Limits, Tenant
    from .policy import Policy
    from .slot import Waiter


def bounds_of(limits: Limits) -> dict[str, int]:
    """The limits that are set, by their names in the tenants file."""
    return {name: value for name, value in asdict(limits).items() if value is not None}


class Bounds:
    """The counts, and the bounds on them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # All mutable state
        self.ledger = Ledger()
        self.keys = Keys()
        self.tenants: Mapping[str, Tenant] = {}
        """As configured now."""

    def current(self, tenant: Tenant) -> Tenant:
        """The tenant as configured now; itself where it is not configured (any more)."""
        return self.tenants.get(tenant.id, tenant)

    def check(self, tenant: Tenant, *, engine_full: bool, is_blocked: bool) -> None:
        """Refuse who would have to wait, where the tenant's queue is full or none is allowed.

        Raises:
            Rejected: That.
        """
        queued = self.ledger.of(tenant.id).queued
        if queued < self.most_queued(tenant):
            return
        if queued or engine_full or self.is_at_concurrency(tenant):
            raise self.queue_full(tenant, queued, is_blocked=is_blocked)

    def check_key(self, waiter: Waiter, *, engine_full: bool) -> None:
        """The same for the key.

        Raises:
            Rejected: That.
        """
        most, queued = most_queued(waiter), self.keys.queued(waiter)
        if most is None or queued < most:
            return
        limit = concurrency_of(waiter)
        is_at_limit = not self.keys.may_pass(waiter)
        wait_s = self.ledger.next_release_s(waiter.tenant.id)
        if is_at_limit and limit is not None and most == 0:
            raise refusals.at_concurrency(limit, wait_s=wait_s)
        if queued or engine_full or is_at_limit:
            raise refusals.queue_full(queued, most, wait_s=wait_s)

    def is_at_concurrency(self, tenant: Tenant) -> bool:
        """Whether not one more of the tenant's sequences may run."""
        limit = self.current(tenant).limits.max_concurrency
        return limit is not None and self.ledger.of(tenant.id).running >= limit

    def fits_concurrency(self, waiter: Waiter) -> bool:
        """Whether all its sequences may run beside its tenant's others. One that is wider may run alone."""
        limit = self.current(waiter.tenant).limits.max_concurrency
        running = self.ledger.of(waiter.tenant.id).running
        return limit is None or not running or running + waiter.demand.sequences <= limit

    def most_queued(self, tenant: Tenant) -> int:
        """Requests of the tenant that may wait."""
        own = self.current(tenant).limits.max_queued
        return self._policy.max_queued if own is None else own

    def queue_full(self, tenant: Tenant, queued: int, *, is_blocked: bool) -> Rejected:
        """The refusal of one that may not wait. ``is_blocked``: by the tenant's own concurrency."""
        limit, most = self.current(tenant).limits.max_concurrency, self.most_queued(tenant)
        wait_s = self.ledger.next_release_s(tenant.id)
        if most == 0 and limit is not None and is_blocked:
            return refusals.at_concurrency(limit, wait_s=wait_s)
        return refusals.queue_full(queued, most, wait_s=wait_s)

    def waited_for_own(self, waiter: Waiter, deadline_s: float, *, is_blocked: bool) -> Rejected | None:
        """The refusal of one whose time is over, if it waited for its own tenant's or key's requests."""
        wait_s = self.ledger.next_release_s(waiter.tenant.id)
        if self.keys.is_parked(waiter):
            limit = concurrency_of(waiter)
        elif is_blocked:
            limit = self.current(waiter.tenant).limits.max_concurrency
        else:
            return None
        return refusals.waited_for_own_limit(deadline_s, limit, wait_s=wait_s)
