"""Who pays, and with what: the way from a request to the store and back.

Owns `Accounts`: which accounts a request is charged on, its reservation, its settlement, and the
rate-limit headers that tell the client how it stands. Called by ``admission.py``; speaks to the `Store`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from . import refusals
from .quota import Account, Charge, Shortage
from .store import MemoryStore, StoreLost

if TYPE_CHECKING:
    from ..core.record import Limits, Principal, Record
    from .quota import Granted, Reservation, Standing
    from .store import Store


class Accounts:
    """The store, as admission uses it. What is reserved here is settled here, once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # A store in this process is asked without a task: a third of a decision's cost.
        self._local = store if isinstance(store, MemoryStore) else None
        # All mutable state: accounts by id (they work out their lines once), settlements under way
        self._accounts: dict[str, Account] = {}
        self._settling: set[asyncio.Task[None]] = set()

    @property
    def settling(self) -> int:
        """Settlements that the store has not yet confirmed."""
        return len(self._settling)

    def check(self, record: Record) -> None:
        """Refuse by what this process knows, before anything is spent on the request.

        Only the count of requests is looked at: how many tokens it has is not known yet, and a
        ``Retry-After`` for fewer would not hold.

        Raises:
            Rejected: Not one more request may come now.
        """
        if not (accounts := self._of(record)):
            return
        shortage = self._store.peek(accounts, Charge(1, 0, 0))
        if shortage is not None and not shortage.never:
            _show(record, shortage.standing)
            raise refusals.short(shortage)

    async def reserve(self, record: Record, charge: Charge) -> Reservation | None:
        """Charge the expected cost; ``None`` where no limit applies.

        Raises:
            Rejected: A limit is short, or the store is lost. Nothing is charged.
        """
        if not (accounts := self._of(record)):
            return None
        answer = (
            self._local.reserve_now(accounts, charge) if self._local else await self._ask(accounts, charge)
        )
        _show(record, answer.standing)
        if isinstance(answer, Shortage):
            raise refusals.short(answer)
        return answer.reservation

    async def _ask(self, accounts: list[Account], charge: Charge) -> Granted | Shortage:
        # A task of its own: whoever is cancelled here must still learn what was reserved, to undo it.
        reserving = asyncio.ensure_future(self._store.reserve(accounts, charge))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(self._undo)
            raise
        except StoreLost:
            raise refusals.store_lost() from None

    def settle(self, reservation: Reservation | None, used: Charge) -> None:
        """Put what was used in the place of what was reserved; by a task: a release cannot wait."""
        if reservation is None:
            return
        if self._local is not None:
            self._local.settle_now(reservation, used)
        else:
            task = asyncio.get_running_loop().create_task(self._store.settle(reservation, used))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def settled(self) -> None:
        """Wait until the store has been told of everything that has ended."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    def show(self, record: Record) -> None:
        """The rate-limit headers of the moment, for an answer that charges nothing."""
        if accounts := self._of(record):
            _show(record, self._store.standing(accounts))

    def standing(self, record: Record) -> dict[str, dict[str, int] | None]:
        """How the request's accounts stand with their limits a minute."""
        standing = self._store.standing(self._of(record))
        return {
            "requests_per_minute": None if standing.requests is None else standing.requests._asdict(),
            "tokens_per_minute": None if standing.tokens is None else standing.tokens._asdict(),
        }

    def _undo(self, reserving: asyncio.Future[Granted | Shortage]) -> None:
        if not reserving.cancelled() and reserving.exception() is None:
            answer = reserving.result()
            if not isinstance(answer, Shortage):
                self.settle(answer.reservation, Charge())

    def _of(self, record: Record) -> list[Account]:
        """The tenant, and the key if it has limits of its own; those that limit nothing left out."""
        principal = record.principal
        assert principal is not None, "auth stands before admission"
        return [account for account in self._all(principal) if account.lines]

    def _all(self, principal: Principal) -> list[Account]:
        found = []
        if principal.tenant is not None:
            found.append(self._account(f"tenant:{principal.tenant.id}", principal.tenant.limits))
        if principal.key.limits is not None:
            found.append(self._account(f"key:{principal.key.id}", principal.key.limits))
        return found

    def _account(self, account_id: str, limits: Limits) -> Account:
        account = self._accounts.get(account_id)
        if account is None or account.limits != limits:
            account = self._accounts[account_id] = Account(account_id, limits)
        return account


def _show(record: Record, standing: Standing) -> None:
    """The rate-limit headers of whatever answer goes out, under OpenAI's names."""
    headers = record.headers
    if standing.requests is not None:
        limit, remaining, reset_s = standing.requests
        headers[b"x-ratelimit-limit-requests"] = b"%d" % limit
        headers[b"x-ratelimit-remaining-requests"] = b"%d" % remaining
        headers[b"x-ratelimit-reset-requests"] = b"%ds" % reset_s
    if standing.tokens is not None:
        limit, remaining, reset_s = standing.tokens
        headers[b"x-ratelimit-limit-tokens"] = b"%d" % limit
        headers[b"x-ratelimit-remaining-tokens"] = b"%d" % remaining
        headers[b"x-ratelimit-reset-tokens"] = b"%ds" % reset_s
