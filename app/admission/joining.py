"""`Joining`: the demands that one request states in the same tick, as one.

vLLM calls the engine once for each prompt of a list, all in one turn of the event loop. Together they are
one request: one charge, one turn. Used by ``admission.py`` alone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..core.record import Demand

if TYPE_CHECKING:
    from .slot import Share, Slot


class Joining:
    """The first call leads and decides for all; the others follow, each with a share of the Slot."""

    def __init__(self, first: Demand) -> None:
        self._demands = [first]
        self._left: set[int] = set()
        # Made when somebody follows: most requests state one demand.
        self._shares: asyncio.Future[list[Share]] | None = None

    async def follow(self, demand: Demand) -> Share:
        """Join, and wait for the leader's answer.

        Raises:
            Rejected: As the leader.
        """
        index = len(self._demands)
        self._demands.append(demand)
        if self._shares is None:
            self._shares = asyncio.get_running_loop().create_future()
        try:
            return (await asyncio.shield(self._shares))[index]
        except asyncio.CancelledError:
            self._leave(index, self._shares)
            raise

    def whole(self) -> Demand:
        """All demands together. The leader's next step takes one Slot for it."""
        if len(self._demands) == 1:
            return self._demands[0]
        return Demand(
            prompt_tokens=sum(d.prompt_tokens for d in self._demands),
            max_new_tokens=max(d.max_new_tokens for d in self._demands),
            sequences=sum(d.sequences for d in self._demands),
            prompts=len(self._demands),
        )

    def succeed(self, slot: Slot) -> Share:
        """Deal out the Slot. All shares are made before any can end; the leader's is returned."""
        if self._shares is None:
            return slot.share()
        shares = [slot.share() for _ in self._demands]
        for index in self._left:
            shares[index].release()
        self._shares.set_result(shares)
        return shares[0]

    def fail(self, ended: BaseException) -> None:
        """Tell the followers, if there are any."""
        if self._shares is None:
            return
        if isinstance(ended, Exception):  # else it is cancelled, and so are they
            self._shares.set_exception(ended)
            self._shares.exception()  # looked at: that all followers have left is no fault
        else:
            self._shares.cancel()

    def _leave(self, index: int, shares: asyncio.Future[list[Share]]) -> None:
        if shares.done() and not shares.cancelled() and shares.exception() is None:
            shares.result()[index].release()
        else:
            self._left.add(index)
