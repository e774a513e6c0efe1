"""A request that ends at any moment of its admission leaves nothing behind (I2, I3)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from app.core.errors import Rejected

from ..support.asgi import settle
from .desk import Desk, record_of, tenant, used

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from app.admission.slot import Share

MOST_TURNS = 40
"""Turns of the loop after which every admission here has long been decided."""

ACME = tenant(requests_per_minute=100, tokens_per_minute=10_000, tokens_per_day=10_000, max_concurrency=2)

stores = pytest.mark.parametrize("slow", [False, True], ids=["store in process", "store elsewhere"])


async def turns(count: int) -> None:
    """Let the loop turn so often."""
    for _ in range(count):
        await asyncio.sleep(0)


async def end(share: Share | BaseException) -> None:
    """A generation that was admitted ends; it used nothing."""
    if not isinstance(share, BaseException):
        share.release()


async def assert_untouched(desk: Desk) -> None:
    """Nothing held, queued, reserved or charged, and the next request goes in at once."""
    await settle()
    assert desk.is_empty(), desk.admission
    assert desk.levels() == [0, 0, 0]
    share = await desk.admitted()
    share.release()
    await settle()
    assert desk.is_empty()


async def cancelled_at_every_turn(
    scene: Callable[[Desk], AsyncIterator[list[asyncio.Task[Share]]]], *, slow: bool, again: bool = False
) -> int:
    """Play the scene once for each turn of the loop, cancel its first task there, and look.

    Returns:
        At how many turns the task had not ended yet.
    """
    hit = 0
    for turn in range(MOST_TURNS):
        desk = Desk(ACME, slow=slow)
        playing = scene(desk)
        tasks = await anext(playing)
        await turns(turn)
        hit += not tasks[0].done()
        tasks[0].cancel()
        if again:
            await turns(1)
            tasks[0].cancel()
        async for _ in playing:  # the scene goes on: what it held is given back
            pass
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [e for e in ended if isinstance(e, Exception)], ended
        for share in ended:
            await end(share)
        await assert_untouched(desk)
    return hit


async def alone(desk: Desk) -> AsyncIterator[list[asyncio.Task[Share]]]:
    """There is room: admitted as soon as it has paid."""
    yield [desk.ask()]


async def behind_its_own(desk: Desk) -> AsyncIterator[list[asyncio.Task[Share]]]:
    """It waits for its tenant's own limit, until another of the tenant's ends."""
    held = [await desk.admitted() for _ in range(2)]
    yield [desk.ask(), desk.ask()]
    for share in held:
        share.release()


async def as_its_turn_comes(desk: Desk) -> AsyncIterator[list[asyncio.Task[Share]]]:
    """It waits; ten turns on, while it may just be leaving, its turn comes."""
    held = [await desk.admitted() for _ in range(2)]

    async def give_back() -> None:
        await turns(20)
        for share in held:
            share.release()

    giving = asyncio.create_task(give_back())
    yield [desk.ask(), desk.ask()]
    await giving


async def leading_a_list(desk: Desk) -> AsyncIterator[list[asyncio.Task[Share]]]:
    """The first of a list of prompts. As vLLM does, the others are cancelled with it."""
    record = record_of(ACME)
    tasks = [desk.ask(record=record) for _ in range(3)]
    yield tasks
    for task in tasks[1:]:
        task.cancel()


async def following_in_a_list(desk: Desk) -> AsyncIterator[list[asyncio.Task[Share]]]:
    """One of the others of a list of prompts, alone."""
    record = record_of(ACME)
    leader = desk.ask(record=record)
    yield [desk.ask(record=record), leader, desk.ask(record=record)]


async def following_in_a_list_that_waits(desk: Desk) -> AsyncIterator[list[asyncio.Task[Share]]]:
    """The same, while the list waits for its turn."""
    held = [await desk.admitted() for _ in range(2)]

    async def give_back() -> None:
        await turns(20)
        for share in held:
            share.release()

    giving = asyncio.create_task(give_back())
    record = record_of(ACME)
    leader = desk.ask(record=record)
    yield [desk.ask(record=record), leader]
    await giving


async def extending(desk: Desk) -> AsyncIterator[list[asyncio.Task[Share]]]:
    """More work of a request that has been admitted before."""
    record = record_of(ACME)
    (await desk.admitted(record=record)).release()
    yield [desk.ask(record=record)]


SCENES = {
    scene.__name__: scene
    for scene in (
        alone,
        behind_its_own,
        as_its_turn_comes,
        leading_a_list,
        following_in_a_list,
        following_in_a_list_that_waits,
        extending,
    )
}


@stores
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("scene", SCENES)
async def test_request_cancelled_at_any_turn_leaves_nothing(scene: str, slow: bool, again: bool) -> None:
    """Wherever it stands: joining, reserving, waiting, or with the Slot just handed to it."""
    hit = await cancelled_at_every_turn(SCENES[scene], slow=slow, again=again)
    assert hit >= (8 if slow else 1), "the cancellations came too late to mean anything"


@stores
async def test_turn_that_comes_to_a_leaving_request_goes_to_the_next(slow: bool) -> None:
    """In the same turn of the loop: its task has been cancelled and has not run since."""
    desk = Desk(ACME, slow=slow)
    held = [await desk.admitted() for _ in range(2)]
    leaving, next_one = desk.ask(), desk.ask()
    await settle()
    leaving.cancel()
    held[0].release()
    await settle()
    assert leaving.cancelled()
    assert next_one.done()
    (await next_one).release()
    held[1].release()
    await assert_untouched(desk)


async def test_mass_of_waiters_that_leave_while_turns_come_leaves_nothing() -> None:
    """Every other one leaves, in one turn of the loop with releases between them."""
    desk = Desk(ACME)
    held = [await desk.admitted() for _ in range(2)]
    waiting = [desk.ask() for _ in range(50)]
    await settle()
    for task in waiting[::2]:
        task.cancel()
    for share in held:
        share.release()
    for task in waiting[1::2]:
        await settle()
        (await task).settle(used(0, 0), finished=True)
    assert all(task.cancelled() for task in waiting[::2])
    await assert_untouched(desk)


async def test_undone_reservation_is_paid_back_though_its_request_is_gone() -> None:
    """The store has said yes to a request that no longer hears it."""
    desk = Desk(ACME, slow=True)
    task = desk.ask()
    await turns(5)
    task.cancel()
    await settle()
    assert task.cancelled()
    assert desk.levels() == [0, 0, 0]


@stores
async def test_list_whose_leader_is_refused_is_refused_as_one(slow: bool) -> None:
    """Each of its generations hears the same refusal, and nothing is charged."""
    desk = Desk(tenant(requests_per_minute=1, tokens_per_minute=100, tokens_per_day=100), slow=slow)
    record = record_of(desk.tenants["acme"])
    tasks = [desk.ask(record=record, prompt=20, new=20) for _ in range(3)]
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(e, Rejected) for e in ended)
    assert len({id(e) for e in ended}) == 1
    await assert_untouched(desk)


async def test_fault_in_a_turn_is_told_to_every_generation_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as a cancellation, which would pass for a client that has left (B16)."""
    desk = Desk(ACME)

    def broken(*args: object) -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(desk.admission._turns, "enter", broken)
        record = record_of(ACME)
        ended = await asyncio.gather(*(desk.ask(record=record) for _ in range(3)), return_exceptions=True)
    assert [type(e) for e in ended] == [RuntimeError] * 3
    await assert_untouched(desk)


async def test_share_given_back_twice_counts_once() -> None:
    """Generator and edge both end it."""
    desk = Desk(ACME)
    record = record_of(ACME)
    first, second = [desk.ask(record=record) for _ in range(2)]
    await settle()
    share = await first
    share.settle(used(10, 3), finished=True)
    share.settle(used(10, 3), finished=True)
    share.release()
    assert desk.admission.snapshot().running == {"acme": 2}
    (await second).settle(used(10, 4), finished=True)
    await settle()
    assert desk.is_empty()
    assert desk.levels() == [1, 27, 27]


async def test_demand_larger_than_the_cache_in_a_list_takes_the_list_down() -> None:
    """The one that is too large raises at once; vLLM then cancels the others."""
    desk = Desk(ACME, kv_tokens=1000)
    record = record_of(ACME)
    tasks = [desk.ask(record=record), desk.ask(record=record, prompt=1000)]
    await turns(1)
    with pytest.raises(Rejected, match="1000"):
        await tasks[1]
    tasks[0].cancel()
    await settle()
    await asyncio.gather(*tasks, return_exceptions=True)
    await assert_untouched(desk)


async def test_queue_whose_requests_all_leave_is_empty() -> None:
    """All in one turn of the loop."""
    desk = Desk(ACME)
    held = await desk.admitted()
    waiting = [desk.ask(prompt=1, new=1) for _ in range(90)]
    await settle()
    assert desk.admission.snapshot().queued == 89
    for task in waiting:
        task.cancel()
    await settle()
    assert desk.admission.snapshot().queued == 0
    held.release()
    await end((await asyncio.gather(*waiting, return_exceptions=True))[0])
    await assert_untouched(desk)
