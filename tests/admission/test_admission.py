"""Who may use the engine now: refusals that are true, turns, deadlines, windows, reloads."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from app.admission.policy import Policy
from app.admission.virtual_time import UNIT
from app.admission.window import GREATEST_DEPTH
from app.core.errors import Outcome, Rejected
from app.core.record import Demand, PriorityClass, Record, Tenant

from ..support.asgi import settle
from ..support.clock import loop_clock
from .desk import Desk, Engine, Job, record_of, tenant, used

if TYPE_CHECKING:
    from app.admission.slot import Share


Asked = tuple["asyncio.Task[Share]", Job]


async def refused(task: asyncio.Task[Share]) -> Rejected:
    """It is refused, without waiting for anything more."""
    await settle()
    assert task.done()
    with pytest.raises(Rejected) as caught:
        await task
    return caught.value


def retry_after(refusal: Rejected) -> int:
    """Whole seconds."""
    assert isinstance(refusal.retry_after_s, int)
    return refusal.retry_after_s


async def over_rate(desk: Desk) -> Rejected:
    """Two a minute, and a third comes."""
    for _ in range(2):
        (await desk.admitted()).settle(used(), finished=True)
    return await refused(desk.ask())


async def over_tokens(desk: Desk) -> Rejected:
    """All tokens of the minute are used, and some more are asked for."""
    (await desk.admitted(prompt=50, new=50)).settle(used(50, 50), finished=True)
    return await refused(desk.ask())


async def at_concurrency(desk: Desk) -> Rejected:
    """One runs, one may, and none may wait."""
    await desk.admitted()
    return await refused(desk.ask())


async def behind_full_queue(desk: Desk) -> Rejected:
    """One runs, three wait, three may."""
    await desk.admitted()
    for _ in range(3):
        desk.ask()
    return await refused(desk.ask())


REFUSALS: dict[str, tuple[dict[str, Any], Any, Outcome, str, str]] = {
    # limits, how, outcome, code, the limit's number in words
    "requests": (
        {"requests_per_minute": 2},
        over_rate,
        Outcome.RATE_LIMITED,
        "requests_limit_exceeded",
        "2 requests a minute",
    ),
    "tokens": (
        {"tokens_per_minute": 100},
        over_tokens,
        Outcome.TOKENS_LIMITED,
        "tokens_limit_exceeded",
        "100 tokens a minute",
    ),
    "input tokens": (
        {"input_tokens_per_minute": 50},
        over_tokens,
        Outcome.TOKENS_LIMITED,
        "input_tokens_limit_exceeded",
        "50 input tokens a minute",
    ),
    "output tokens": (
        {"output_tokens_per_minute": 50},
        over_tokens,
        Outcome.TOKENS_LIMITED,
        "output_tokens_limit_exceeded",
        "50 output tokens a minute",
    ),
    "tokens a day": (
        {"tokens_per_day": 100},
        over_tokens,
        Outcome.DAY_LIMITED,
        "tokens_per_day_limit_exceeded",
        "100 tokens a day",
    ),
    "concurrency": (
        {"max_concurrency": 1, "max_queued": 0},
        at_concurrency,
        Outcome.CONCURRENCY_LIMITED,
        "concurrency_limit_exceeded",
        "1 sequences",
    ),
    "queue": (
        {"max_concurrency": 1, "max_queued": 3},
        behind_full_queue,
        Outcome.QUEUE_FULL,
        "queue_full",
        "3",
    ),
}


@pytest.mark.parametrize("limit", REFUSALS)
async def test_refusal_says_which_limit_and_number(limit: str) -> None:
    """With a status of its own, a code of its own, and whole seconds of at least 1 (B13)."""
    limits, provoke, outcome, code, words = REFUSALS[limit]
    desk = Desk(tenant(**limits))
    refusal = await provoke(desk)
    assert (refusal.outcome, refusal.status, refusal.code) == (outcome, 429, code)
    assert words in refusal.message
    assert retry_after(refusal) >= 1
    await _end(desk)


@pytest.mark.parametrize("limit", ["requests", "tokens", "input tokens", "output tokens", "tokens a day"])
async def test_retry_after_of_a_rate_is_true(limit: str) -> None:
    """A second earlier the same request is refused, then it is admitted; no rate asks for over a minute."""
    limits, provoke, *_ = REFUSALS[limit]
    wait_s = retry_after(await provoke(Desk(tenant(**limits))))
    assert wait_s <= 60 or limit == "tokens a day"
    for early_s in (1, 0):
        desk = Desk(tenant(**limits))
        await provoke(desk)
        desk.clock.advance(wait_s - early_s)
        task = desk.ask()
        if early_s:
            assert (await refused(task)).retry_after_s == 1
        else:
            (await task).release()
    assert desk.is_empty()


@pytest.mark.parametrize("limit", ["concurrency", "queue"])
async def test_retry_after_of_a_bound_holds_once_a_request_ends_as_expected(limit: str) -> None:
    """It is an estimate: the mean time that requests hold their slots."""
    limits, provoke, *_ = REFUSALS[limit]
    desk = Desk(tenant(**limits))
    refusal = await provoke(desk)
    assert 1 <= retry_after(refusal) <= 4  # two seconds before anything is known, and a fifth by chance
    await _end(desk)
    (await desk.admitted()).release()


@pytest.mark.parametrize(
    ("limits", "prompt", "new", "code"),
    [
        ({"tokens_per_minute": 100}, 60, 50, "tokens_limit_below_request"),
        ({"input_tokens_per_minute": 100}, 101, 1, "input_tokens_limit_below_request"),
        ({"output_tokens_per_minute": 100}, 1, 101, "output_tokens_limit_below_request"),
        ({"tokens_per_day": 100}, 60, 50, "tokens_per_day_limit_below_request"),
        ({"max_prompt_tokens": 100}, 101, 1, "request_above_limit"),
        ({"max_output_tokens": 100}, 1, 101, "request_above_limit"),
    ],
)
async def test_request_that_can_never_fit_is_no_429(
    limits: dict[str, Any], prompt: int, new: int, code: str
) -> None:
    """No wait helps: 400, the number it would have to be under, nothing charged (B13)."""
    desk = Desk(tenant(**limits))
    refusal = await refused(desk.ask(prompt=prompt, new=new))
    assert (refusal.outcome, refusal.status, refusal.code) == (Outcome.TOO_LARGE, 400, code)
    assert refusal.retry_after_s is None
    assert "100" in refusal.message
    assert not any(desk.levels())
    assert desk.is_empty()


async def test_more_answers_than_allowed_are_no_429() -> None:
    """``n`` counts for each prompt of a list by itself."""
    desk = Desk(tenant(max_n=2))
    refusal = await refused(desk.ask(n=3))
    assert (refusal.status, refusal.param) == (400, "n")
    record = record_of(desk.tenants["acme"])
    tasks = [desk.ask(n=2, record=record) for _ in range(2)]
    for share in await asyncio.gather(*tasks):
        share.release()
    assert desk.is_empty()


async def test_sequences_of_a_request_run_within_the_tenants_concurrency() -> None:
    """It waits until there is room for all of them; what is behind it waits too."""
    desk = Desk(tenant(max_concurrency=4), tenant("globex"))
    held = [await desk.admitted(), await desk.admitted()]
    wide, behind = desk.ask(n=3), desk.ask()
    (await desk.admitted("globex")).release()
    assert not wide.done()
    held.pop().release()
    await settle()
    assert wide.done()
    assert not behind.done()
    assert desk.admission.snapshot().running == {"acme": 4}
    (await wide).release()
    await settle()
    assert behind.done()
    await _end(desk, [*held, behind])


async def test_wide_request_that_may_not_queue_is_told_of_the_concurrency() -> None:
    """And not of a queue that is full."""
    desk = Desk(tenant(max_concurrency=4, max_queued=0))
    held = [await desk.admitted() for _ in range(3)]
    assert (await refused(desk.ask(n=2))).outcome is Outcome.CONCURRENCY_LIMITED
    held.append(await desk.admitted())
    await _end(desk, held)


async def test_request_wider_than_its_tenants_concurrency_runs_alone() -> None:
    """A list of more prompts than may run at once: rather so than never."""
    desk = Desk(tenant(max_concurrency=2))
    held = await desk.admitted()
    wide, behind = desk.ask(n=5), desk.ask()
    await settle()
    assert not wide.done()
    held.release()
    await settle()
    assert desk.admission.snapshot().running == {"acme": 5}
    assert not behind.done()
    (await wide).release()
    await settle()
    await _end(desk, [behind])


async def test_wide_request_that_leaves_lets_those_behind_it_pass() -> None:
    """It was in their way, and only it."""
    desk = Desk(tenant(max_concurrency=4))
    held = [await desk.admitted() for _ in range(3)]
    wide, behind = desk.ask(n=2), desk.ask()
    await settle()
    assert not behind.done()
    wide.cancel()
    await settle()
    assert behind.done()
    await _end(desk, [*held, behind])


async def test_wait_behind_a_wide_request_of_ones_own_is_for_ones_own_limit() -> None:
    """429 and not 503; a reload that makes it wider than allowed does not strand it."""
    desk = Desk(tenant(max_concurrency=4), policy=Policy(queue_timeout_s=1.0))
    async with loop_clock(desk.clock):
        held = await desk.admitted(n=2)
        wide = desk.ask(n=3)
        await settle()
        desk.reload(tenant(max_concurrency=2))
        held.release()
        await settle()
        late = desk.ask(n=2)
        await settle()
        await desk.pass_s(1)
        assert (await refused(late)).outcome is Outcome.QUEUE_TIMEOUT
        (await wide).release()
    assert desk.is_empty()


@pytest.mark.parametrize("bound", ["max_concurrency", "max_queued"])
async def test_bounds_of_the_key_bind_beside_the_tenants(bound: str) -> None:
    """Sequences at once and queued requests of one key (issue 3)."""
    bounds: dict[str, Any] = {bound: 1}
    desk = Desk(tenant(max_concurrency=1) if bound == "max_queued" else tenant())
    acme = desk.tenants["acme"]
    held = await desk.admitted(record=record_of(acme, **bounds))
    tasks = [desk.ask(record=record_of(acme, **bounds)) for _ in range(2)]
    await settle()
    try:
        assert desk.admission.snapshot().running == {"acme": 1}
        assert desk.admission.snapshot().queued <= (1 if bound == "max_queued" else 2)
    finally:
        await _end(desk, [held, *tasks])


async def test_key_at_its_bound_does_not_hold_up_its_tenants_other_keys() -> None:
    """It waits in its own line, leaves it at once, and moves on when one of its own ends."""
    desk = Desk(tenant())
    acme = desk.tenants["acme"]
    held = await desk.admitted(record=record_of(acme, max_concurrency=1))
    leaving, waiting = (desk.ask(record=record_of(acme, max_concurrency=1)) for _ in range(2))
    await settle()
    assert desk.admission.snapshot().queued == 2
    other = await desk.admitted(record=record_of(acme, "other"))
    leaving.cancel()
    await settle()
    assert desk.admission.snapshot().queued == 1
    held.settle(used(), finished=True)
    await settle()
    share = await waiting
    desk.admission.check_integrity()
    for one in (share, other):
        one.settle(used(), finished=True)
    assert desk.is_empty()


async def test_limits_of_the_key_bind_beside_the_tenants() -> None:
    """Each with its own words."""
    desk = Desk(tenant(requests_per_minute=100))
    acme = desk.tenants["acme"]
    (await desk.admitted(record=record_of(acme, requests_per_minute=1))).settle(used(), finished=True)
    refusal = await refused(desk.ask(record=record_of(acme, requests_per_minute=1)))
    assert refusal.message.startswith("This key may use 1 requests a minute")
    assert desk.levels() == [1]
    refusal = await refused(desk.ask(prompt=11, record=record_of(acme, max_prompt_tokens=10)))
    assert refusal.status == 400


# Bursts, reservations and refunds


async def test_burst_of_one_tick_stays_within_the_tokens() -> None:
    """Checked and counted in one step: of five that ask for 70 of 100 tokens, one goes (B04)."""
    desk = Desk(tenant(tokens_per_minute=100, requests_per_minute=100))
    ended = await asyncio.gather(*(desk.ask(prompt=10, new=60) for _ in range(5)), return_exceptions=True)
    assert [type(e) for e in ended].count(Rejected) == 4
    assert desk.levels() == [1, 70]
    await _end(desk, ended)


@pytest.mark.parametrize("slow", [False, True])
async def test_burst_of_one_tick_stays_within_the_requests(slow: bool) -> None:
    """Five a minute, fifty at once: exactly five (B04)."""
    desk = Desk(tenant(requests_per_minute=5), slow=slow)
    ended = await asyncio.gather(*(desk.ask() for _ in range(50)), return_exceptions=True)
    assert [type(e) for e in ended].count(Rejected) == 45
    await _end(desk, ended)


async def test_tokens_of_any_minute_stay_within_the_limit_and_its_burst() -> None:
    """Whatever is asked for, however it ends: what is used in 60 s is the rate and one burst at most."""
    desk = Desk(tenant(tokens_per_minute=600))
    rng = random.Random(5)
    uses: list[tuple[float, int]] = []
    for _ in range(2000):
        desk.clock.advance(rng.expovariate(2.0))
        new = rng.randint(1, 100)
        task = desk.ask(prompt=20, new=new)
        await settle()
        if task.exception() is None:
            made = rng.randint(0, new)
            uses.append((desk.clock(), 20 + made))
            (await task).settle(used(20, made), finished=True)
    for start_s, _ in uses:
        within = sum(tokens for at_s, tokens in uses if start_s <= at_s < start_s + 60)
        assert within <= 2 * 600


async def test_many_refusals_add_nothing() -> None:
    """Fifty refused by their tokens leave the bucket as it was (B14 a)."""
    desk = Desk(tenant(tokens_per_minute=1000, requests_per_minute=100))
    held = await desk.admitted(prompt=500, new=200)
    before = desk.levels()
    for _ in range(50):
        await refused(desk.ask(prompt=500, new=10))
    assert desk.levels() == before == [1, 700]
    held.settle(used(500, 200), finished=True)
    assert desk.levels() == [1, 700]


async def test_request_without_a_bound_reserves_a_forecast_and_not_the_context() -> None:
    """8,000 tokens that it may have are not what it will have (B14 b)."""
    desk = Desk(tenant(tokens_per_minute=1000))
    share = await desk.admitted(prompt=10, new=8000)
    assert desk.levels() == [10 + 256]
    share.settle(used(10, 40), finished=True)
    (await desk.admitted(prompt=10, new=8000)).settle(used(10, 40), finished=True)
    assert desk.levels() == [100]
    await desk.admitted(prompt=10, new=8000)
    assert desk.levels() == [150], "what such requests came to"


async def test_request_that_stops_early_pays_for_what_it_had() -> None:
    """The rest is free at once (B14 c)."""
    desk = Desk(tenant(tokens_per_minute=1000))
    share = await desk.admitted(prompt=10, new=900)
    share.settle(used(10, 5), finished=True)
    assert desk.levels() == [15]


@pytest.mark.parametrize("prompt_was_computed", [False, True])
async def test_request_that_fails_pays_for_what_was_computed(prompt_was_computed: bool) -> None:
    """Nothing, where the engine has refused it: not even the request (B14 d)."""
    desk = Desk(tenant(tokens_per_minute=1000, requests_per_minute=10))
    share = await desk.admitted(prompt=10, new=900)
    share.settle(used(10, 0) if prompt_was_computed else used(0, 0), finished=False)
    assert desk.levels() == ([1, 10] if prompt_was_computed else [0, 0])


async def test_refund_of_a_long_request_grants_no_more_than_a_burst() -> None:
    """Its reservation has drained away by then; the bucket is empty, not less (B14 e)."""
    desk = Desk(tenant(tokens_per_minute=1000))
    share = await desk.admitted(prompt=10, new=200)
    desk.clock.advance(120)
    share.settle(used(10, 1), finished=True)
    assert desk.levels() == [0]
    await desk.admitted(prompt=1000, new=0)
    await refused(desk.ask(prompt=1, new=0))
    await _end(desk)


async def test_used_tokens_are_what_the_engine_counted() -> None:
    """More than was reserved too: the next pays for it."""
    desk = Desk(tenant(tokens_per_minute=1000))
    share = await desk.admitted(prompt=10, new=8000)
    share.settle(used(10, 890), finished=True)
    assert desk.levels() == [900]
    await refused(desk.ask(prompt=101, new=0))


# Turns


async def test_tenant_waits_for_its_own_limit_and_others_pass() -> None:
    """It is skipped, not in the way; its own go in order."""
    desk = Desk(tenant(max_concurrency=1), tenant("globex"))
    first = await desk.admitted()
    second, third = desk.ask(), desk.ask()
    (await desk.admitted("globex")).release()
    assert not second.done()
    first.release()
    await settle()
    assert second.done()
    assert not third.done()
    (await second).release()
    (await third).release()
    assert desk.is_empty()


async def test_newcomer_never_overtakes_a_waiter_of_its_tenant() -> None:
    """Also when a place falls free in the turn of the loop in which it comes (I8)."""
    desk = Desk(tenant(max_concurrency=1))
    held = await desk.admitted()
    waiting = [desk.ask() for _ in range(3)]
    await settle()
    held.release()
    newcomer = desk.ask()
    order = []
    for _ in range(4):
        await settle()
        (task,) = [t for t in (*waiting, newcomer) if t.done() and t not in order]
        order.append(task)
        (await task).release()
    assert order == [*waiting, newcomer]


async def test_list_of_prompts_is_one_request() -> None:
    """One request charged, one turn, all its tokens; the Slot is given back with the last (B14 f)."""
    desk = Desk(tenant(requests_per_minute=10, tokens_per_minute=1000, max_concurrency=4), slots=1)
    record = record_of(desk.tenants["acme"])
    tasks = [desk.ask(prompt=p, new=10, record=record) for p in (5, 6, 7)]
    shares = await asyncio.gather(*tasks)
    assert desk.levels() == [1, 48]
    assert desk.admission.snapshot().running == {"acme": 3}
    shares[2].settle(used(7, 1), finished=True)
    shares[0].settle(used(5, 2), finished=True)
    assert desk.admission.snapshot().running == {"acme": 3}
    shares[1].settle(used(6, 3), finished=True)
    assert desk.is_empty()
    assert desk.levels() == [1, 24]


async def test_more_work_of_an_admitted_request_takes_no_new_turn() -> None:
    """Beams: the tokens are charged, the request was (DESIGN)."""
    desk = Desk(tenant(requests_per_minute=2, tokens_per_minute=1000, max_concurrency=1))
    record = record_of(desk.tenants["acme"])
    (await desk.admitted(prompt=10, new=1, record=record)).settle(used(10, 1), finished=True)
    other = await desk.admitted(prompt=10, new=1)  # its tenant is at its concurrency
    for _ in range(5):
        beams = [desk.ask(prompt=11, new=1, record=record) for _ in range(2)]
        await settle()
        for beam in beams:
            (await beam).settle(used(11, 1), finished=True)
    assert desk.levels() == [2, 11 + 11 + 5 * 24]
    other.settle(used(10, 1), finished=True)
    assert desk.levels() == [2, 11 + 11 + 5 * 24]
    assert desk.is_empty()


async def test_more_work_that_cannot_be_paid_for_is_refused() -> None:
    """With the limit's own words."""
    desk = Desk(tenant(tokens_per_minute=30))
    record = record_of(desk.tenants["acme"])
    (await desk.admitted(prompt=10, new=1, record=record)).settle(used(10, 1), finished=True)
    refusal = await refused(desk.ask(prompt=20, new=1, record=record))
    assert refusal.outcome is Outcome.TOKENS_LIMITED
    assert desk.is_empty()


async def test_flex_request_waits_with_the_batch_work() -> None:
    """``service_tier: "flex"`` lowers a request's class; what is not flex goes first."""
    desk = Desk(tenant(), tenant("globex"), slots=1)
    held = [await desk.admitted() for _ in range(3)]
    flexible = [desk.ask("globex", flex=True) for _ in range(4)]
    await settle()
    standard = [desk.ask("globex") for _ in range(4)]
    order = await _order(desk, held, {"flex": flexible, "standard": standard})
    assert order[:5].count("flex") <= 1


async def _order(desk: Desk, held: list[Share], named: dict[str, list[asyncio.Task[Share]]]) -> list[str]:
    """The order in which they are admitted as one after the other ends."""
    order: list[str] = []
    left = {task: name for name, tasks in named.items() for task in tasks}
    await settle()
    while left:
        held.pop(0).settle(used(), finished=True)
        await settle()
        for task in [task for task in left if task.done()]:
            order.append(left.pop(task))
            held.append(await task)
    for share in held:
        share.release()
    return order


async def test_priority_in_the_engine_is_the_fair_order() -> None:
    """Positive and rising: lower goes first in vLLM's own list (B21)."""
    desk = Desk()
    shares = [await desk.admitted() for _ in range(4)]
    priorities = [share.priority for share in shares]
    assert priorities == sorted(set(priorities))
    assert priorities[0] > 0
    await _end(desk, shares)


# The tenant's own bounds


async def test_tenant_that_may_not_queue_never_waits() -> None:
    """Not for its concurrency, not for a window, not for the cache."""
    desk = Desk(tenant(max_queued=0, max_concurrency=20), slots=1, kv_tokens=1000)
    held = [await desk.admitted(prompt=700)]
    refusal = await refused(desk.ask(prompt=700))
    assert refusal.outcome is Outcome.QUEUE_FULL
    held.append(await desk.admitted())
    held.append(await desk.admitted())
    assert (await refused(desk.ask())).outcome is Outcome.QUEUE_FULL
    await _end(desk, held)


async def test_burst_of_one_tick_stays_within_the_queue() -> None:
    """The early check sees none of them; the late one does."""
    desk = Desk(tenant(max_concurrency=1, max_queued=3))
    tasks = [desk.ask() for _ in range(10)]
    await settle()
    assert desk.admission.snapshot().queued == 3
    assert sum(task.done() for task in tasks) == 7
    await _end(desk, [task for task in tasks if not task.done() or task.exception() is None])


async def test_full_queue_is_refused_before_the_prompt_is_read() -> None:
    """`check` costs no tokenizing."""
    desk = Desk(tenant(max_concurrency=1, max_queued=1, requests_per_minute=10))
    record = record_of(desk.tenants["acme"])
    await desk.admitted()
    desk.admission.check(record, 1)
    desk.ask()
    await settle()
    with pytest.raises(Rejected) as caught:
        desk.admission.check(record, 1)
    assert caught.value.outcome is Outcome.QUEUE_FULL
    assert desk.levels() == [2]
    await _end(desk)


async def test_empty_bucket_is_refused_before_the_prompt_is_read() -> None:
    """With the very answer that the late check would give."""
    desk = Desk(tenant(requests_per_minute=2))
    late = await over_rate(desk)
    with pytest.raises(Rejected) as caught:
        desk.admission.check(record_of(desk.tenants["acme"]), 1)
    assert (caught.value.outcome, caught.value.retry_after_s) == (late.outcome, late.retry_after_s)


@pytest.mark.parametrize("cause", REFUSALS)
async def test_refusal_by_one_limit_eats_no_other(cause: str) -> None:
    """Every counter as it was, for the tenant and for others (B35)."""
    limits, provoke, *_ = REFUSALS[cause]
    roomy = {"requests_per_minute": 50, "tokens_per_minute": 5000, "tokens_per_day": 5000}
    desk = Desk(tenant(**(roomy | limits)), tenant("globex", **roomy))
    await provoke(desk)
    before, running = desk.levels(), dict(desk.admission.snapshot().running)
    queued = desk.admission.snapshot().queued
    for _ in range(3):
        await refused(desk.ask())
    assert desk.levels() == before
    assert desk.levels("globex") == [0, 0, 0]
    assert (dict(desk.admission.snapshot().running), desk.admission.snapshot().queued) == (running, queued)
    await _end(desk)


async def test_refused_by_concurrency_is_not_counted_as_a_request() -> None:
    """A runs, B is refused, A ends, C is the second request of the minute (B35)."""
    desk = Desk(tenant(requests_per_minute=2, max_concurrency=1, max_queued=0))
    running = await desk.admitted()
    await refused(desk.ask())
    assert desk.levels() == [1]
    running.settle(used(), finished=True)
    (await desk.admitted()).settle(used(), finished=True)
    assert desk.levels() == [2]


# Time


async def test_wait_is_over_at_its_time_and_not_before() -> None:
    """A second, for each of two hundred that wait for their tenant's own limit (B16)."""
    desk = Desk(tenant(max_concurrency=1, tokens_per_day=10**6), policy=Policy(queue_timeout_s=1.0))
    async with loop_clock(desk.clock):
        held = await desk.admitted()
        tasks = [desk.ask() for _ in range(200)]
        await settle()
        await desk.pass_s(0.95)
        assert not any(task.done() for task in tasks)
        await desk.pass_s(0.1)
        for task in tasks:
            refusal = await refused(task)
            assert (refusal.outcome, refusal.status, refusal.code) == (
                Outcome.QUEUE_TIMEOUT,
                429,
                "queue_timeout",
            )
            assert "1.0 s" in refusal.message
            assert retry_after(refusal) >= 1
        assert desk.levels() == [20]
        held.release()
        await settle()
    assert desk.is_empty()


async def test_wait_for_others_that_is_over_is_the_servers_overload() -> None:
    """503: not the tenant's own doing (DESIGN)."""
    desk = Desk(tenant(), tenant("globex"), slots=1, policy=Policy(queue_timeout_s=1.0))
    async with loop_clock(desk.clock):
        held = [await desk.admitted("globex") for _ in range(3)]
        task = desk.ask()
        await settle()
        await desk.pass_s(1.0)
        refusal = await refused(task)
        await _end(desk, held)
    assert (refusal.outcome, refusal.status) == (Outcome.OVERLOADED, 503)
    assert retry_after(refusal) >= 1


async def test_turn_and_end_of_wait_in_one_moment_are_one_of_the_two() -> None:
    """Whichever comes first holds: never a refusal of what the engine already has (B16)."""
    for timer_first in (False, True):
        desk = Desk(tenant(max_concurrency=1, requests_per_minute=10), policy=Policy(queue_timeout_s=1.0))
        async with loop_clock(desk.clock):
            held = await desk.admitted()
            task = desk.ask()
            await settle()
            desk.clock.advance(1.0)
            if timer_first:
                await settle()
                held.release()
                assert (await refused(task)).outcome is Outcome.QUEUE_TIMEOUT
            else:
                held.release()  # in the turn of the loop in which the timer is due
                await settle()
                (await task).release()
        assert desk.is_empty()
        assert desk.levels() == [0]


async def test_deadline_is_the_clients_or_the_tenants_whichever_is_sooner() -> None:
    """The client's can only shorten it."""
    for client_s, own_s, ends_s in ((0.5, 2.0, 0.5), (3.0, 2.0, 2.0), (None, 2.0, 2.0), (0.5, None, 0.5)):
        desk = Desk(tenant(max_concurrency=1, deadline_s=own_s))
        async with loop_clock(desk.clock):
            held = await desk.admitted()
            task = desk.ask(deadline_s=client_s)
            await settle()
            await desk.pass_s(ends_s - 0.01)
            assert not task.done()
            await desk.pass_s(0.02)
            assert (await refused(task)).outcome is Outcome.QUEUE_TIMEOUT
            held.release()
        assert desk.is_empty()


async def test_deadline_is_no_matter_once_the_turn_has_come() -> None:
    """What runs is not cut: its timer is gone."""
    desk = Desk(tenant(max_concurrency=1), policy=Policy(queue_timeout_s=1.0))
    async with loop_clock(desk.clock):
        held = await desk.admitted(deadline_s=1.0)
        task = desk.ask(deadline_s=1.0)
        await settle()
        await desk.pass_s(0.9)
        held.release()
        share = await task
        timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        assert all(timer.cancelled() for timer in timers)
        await desk.pass_s(10)
        share.settle(used(), finished=True)
    assert desk.is_empty()


async def _busy(desk: Desk, steps: int = 20) -> None:
    """The engine shows what it can: 100 steps a second, 10 tokens each, 2,000 units a second."""
    for _ in range(steps):
        desk.step(running=10, decode=10)
    await settle()


async def test_hopeless_deadline_is_refused_at_arrival() -> None:
    """After its own backlog: 503 at once, with the expected time; nothing is charged."""
    desk = Desk(tenant(requests_per_minute=1000), slots=1)
    held = [await desk.admitted() for _ in range(3)]
    await _busy(desk)
    backlog = [desk.ask(prompt=1000, new=500) for _ in range(10)]  # 20,000 units: ten seconds
    await settle()
    before = desk.levels()
    refusal = await refused(desk.ask(deadline_s=2.0))
    assert (refusal.outcome, refusal.status) == (Outcome.OVERLOADED, 503)
    assert "the deadline is 2 s" in refusal.message
    assert refusal.retry_after_s in (6, 7)
    assert desk.levels() == before
    patient = desk.ask(deadline_s=20.0)
    await settle()
    assert not patient.done()
    await _end(desk, [*held, *backlog, patient])


async def test_tenant_within_its_share_is_not_refused_for_others_backlog() -> None:
    """However deep, whatever its deadline: it is next."""
    desk = Desk(tenant(), tenant("globex"), slots=1)
    held = [await desk.admitted("globex") for _ in range(3)]
    await _busy(desk)
    backlog = [desk.ask("globex", prompt=1000, new=500) for _ in range(100)]
    await settle()
    light = desk.ask(deadline_s=0.5)
    await settle()
    assert not light.done()
    held.pop().settle(used(), finished=True)
    await settle()
    assert light.done()
    await _end(desk, [*held, light, *backlog])


async def test_deadline_is_not_refused_before_anything_is_known() -> None:
    """No rate, no prediction."""
    desk = Desk(slots=1)
    held = [await desk.admitted() for _ in range(3)]
    tasks = [desk.ask(prompt=4000, deadline_s=0.5) for _ in range(3)]
    await settle()
    assert not any(task.done() for task in tasks)
    await _end(desk, [*held, *tasks])


async def test_long_prompt_with_nothing_before_it_is_not_refused_by_a_guess() -> None:
    """A rate measured under a light load says little of how fast a prompt is read."""
    desk = Desk()
    for _ in range(20):
        desk.step(running=1, decode=1)
    (await desk.admitted(prompt=4000, deadline_s=0.5)).release()
    assert desk.is_empty()


# The engine's room


async def test_prompt_larger_than_the_cache_is_refused() -> None:
    """It would block the engine's list for ever; 400, with both numbers."""
    desk = Desk(tenant(tokens_per_minute=10_000), kv_tokens=1000)
    refusal = await refused(desk.ask(prompt=1000, new=1))
    assert (refusal.status, refusal.code) == (400, "context_length_exceeded")
    assert "1000" in refusal.message
    assert desk.levels() == [0]
    (await desk.admitted(prompt=999, new=1)).release()


async def test_request_waits_while_the_running_set_would_outgrow_the_cache() -> None:
    """And goes as soon as there is room; small ones behind it do not starve it."""
    desk = Desk(tenant(), tenant("globex"), kv_tokens=1000)
    held = await desk.admitted(prompt=600, new=100)
    large = desk.ask(prompt=600, new=100)
    await settle()
    assert not large.done()
    desk.step()
    await settle()
    assert not large.done()
    held.settle(used(600, 100), finished=True)
    await settle()
    (await large).release()
    assert desk.is_empty()


async def test_model_without_a_cache_is_never_full() -> None:
    """Pooling models: their facts say 0 tokens."""
    desk = Desk(kv_tokens=0)
    shares = [await desk.admitted(prompt=4000, new=0) for _ in range(8)]
    await _end(desk, shares)


def _sent(
    engine: Engine, tasks: list[tuple[asyncio.Task[Share], Job]]
) -> list[tuple[asyncio.Task[Share], Job]]:
    """Send what has been admitted; what remains."""
    for task, job in tasks:
        if task.done():
            job.share = task.result()
            engine.arrive(job)
    return [(task, job) for task, job in tasks if not task.done()]


class Load:
    """Tenants that always have something queued, over a simulated engine."""

    def __init__(self, desk: Desk, slots: int) -> None:
        self.desk = desk
        self.engine = Engine(desk, slots)
        self.waiting: list[Asked] = []
        self.asked_step: dict[int, int] = {}
        self.waits: dict[str, list[int]] = {}
        self.steps = 0

    def add(self, who: str, prompt: int, output: int, most: int | None = None) -> None:
        """One request more."""
        task = self.desk.ask(who, prompt=prompt, new=most or output)
        job = Job(who, None, prompt, output, most or output)  # type: ignore[arg-type]
        self.asked_step[id(job)] = self.steps
        self.waiting.append((task, job))

    async def step(self) -> None:
        """One step of the engine; what has been admitted is sent."""
        await self.engine.step()
        self.steps += 1
        for task, job in self.waiting:
            if task.done():
                self.waits.setdefault(job.tenant, []).append(self.steps - self.asked_step[id(job)])
        self.waiting = _sent(self.engine, self.waiting)

    def queued(self, who: str) -> int:
        """Requests of a tenant's that wait at the gateway."""
        return sum(job.tenant == who for _, job in self.waiting)

    async def end(self) -> None:
        """All leave."""
        await _end(self.desk, [*(task for task, _ in self.waiting), *(j.share for j in self.engine.running)])
        for job in self.engine.waiting:
            job.share.release()
        assert self.desk.is_empty()


async def _saturate(
    load: Load, kinds: dict[str, tuple[int, int, int]], steps: int, *, depth: int = 8
) -> Counter[str]:
    """Keep each tenant's backlog full for so many steps; the cost served to each meanwhile."""
    before = Counter(load.engine.served)
    for _ in range(steps):
        for who, (prompt, output, most) in kinds.items():
            for _ in range(depth - load.queued(who)):
                load.add(who, prompt, output, most)
        await settle()
        await load.step()
    return Counter(load.engine.served) - before


@pytest.mark.parametrize(("weight", "ratio"), [(1.0, 1.0), (3.0, 3.0)])
async def test_work_follows_weights_whatever_the_size_of_requests(weight: float, ratio: float) -> None:
    """Long ones against short ones, in prompt and completion, within 15 % (B19)."""
    desk = Desk(tenant("a", weight=weight), tenant("b"), slots=4)
    load = Load(desk, 4)
    kinds = {"a": (600, 200, 200), "b": (20, 20, 20)}
    await _saturate(load, kinds, 400)
    served = await _saturate(load, kinds, 6000)
    assert served["a"] / served["b"] == pytest.approx(ratio, rel=0.15)
    await load.end()


async def test_short_requests_wait_a_few_service_times_whatever_the_others_backlog() -> None:
    """p95, with a thousand long ones queued before (B19)."""
    desk = Desk(tenant("a"), tenant("b"), slots=4)
    load = Load(desk, 4)
    for _ in range(1000):
        load.add("a", 600, 200)
    await settle()
    for step in range(4000):
        if step % 40 == 0:
            load.add("b", 20, 20)
            await settle()
        await load.step()
    waits = sorted(load.waits["b"])
    assert waits[int(len(waits) * 0.95)] <= 2 * 200
    await load.end()


async def test_tenant_that_asks_for_much_and_uses_little_is_not_starved() -> None:
    """The charge is corrected when the answer ends, and the next forecast is better (B19)."""
    desk = Desk(tenant("a"), tenant("b"), slots=4)
    load = Load(desk, 4)
    kinds = {"a": (20, 10, 4000), "b": (20, 100, 100)}
    await _saturate(load, kinds, 300)
    served = await _saturate(load, kinds, 3000)
    assert served["a"] / served["b"] == pytest.approx(1.0, rel=0.15)
    await load.end()


async def test_what_outgrows_its_forecast_is_charged_as_it_comes() -> None:
    """To the tenant's share, step by step, long before it ends; then exactly."""
    desk = Desk()
    (await desk.admitted(new=1000)).settle(used(10, 10), finished=True)
    share = await desk.admitted(new=1000)
    charged = [_charged(desk)]
    assert charged == [10 + 2 * 10]
    for _ in range(60):
        desk.step()
        charged.append(_charged(desk))
    assert charged == sorted(charged)
    assert charged[10] == 30
    assert 10 + 2 * 55 <= charged[-1] <= 10 + 2 * 60
    share.settle(used(10, 60), finished=True)
    assert desk.is_empty()


def _charged(desk: Desk) -> int:
    """Cost units charged for what acme has in flight."""
    (share,) = desk.admission._turns._queue.tenant("acme")
    return (share.charged_ticks - share.settled_ticks) // UNIT


async def test_idle_time_earns_no_credit_and_owes_none() -> None:
    """Alone for long, then both: shares are equal from the first turns (B20)."""
    desk = Desk(tenant("a"), tenant("b"), slots=4)
    load = Load(desk, 4)
    kinds = {"a": (20, 20, 20), "b": (20, 20, 20)}
    await _saturate(load, {"a": kinds["a"]}, 2000)
    started = len(load.engine.starts)
    while len(load.engine.starts) < started + 24:
        await _saturate(load, kinds, 1)
    turns = Counter(load.engine.starts[started + 4 : started + 24])
    assert abs(turns["a"] - turns["b"]) <= 4
    await load.end()


async def test_tenants_that_come_and_go_leave_nothing() -> None:
    """Ten thousand times: no state grows (B20)."""
    desk = Desk(*(tenant(f"t{i}") for i in range(50)))
    for i in range(10_000):
        share = await desk.admission.admit(record_of(desk.tenants[f"t{i % 50}"]), Demand(10, 10))
        share.settle(used(), finished=True)
    assert desk.is_empty()
    turns = desk.admission._turns
    assert turns._queue.snapshot().tenants == 0
    assert len(turns._ledger) == 0
    assert not desk.admission._joining
    gc.collect()
    assert len(desk.admission._admitted) <= 1
    assert repr(desk.admission) == "<Admission 0 running, 0 waiting, 0 tenants>"


async def test_high_class_is_next_to_start() -> None:
    """Twenty of a low class wait, then one of a high: at most one completion later (B21)."""
    low = Tenant("low", priority_class=PriorityClass.BATCH)
    high = Tenant("high", priority_class=PriorityClass.INTERACTIVE)
    desk = Desk(low, high, slots=2)
    load = Load(desk, 2)
    for _ in range(24):
        load.add("low", 20, 20)
    for _ in range(3):
        await load.step()
    load.add("high", 20, 20)
    await settle()
    started = len(load.engine.starts)
    while "high" not in load.engine.starts:
        await load.step()
    assert load.engine.starts[started:].index("high") <= 1
    await load.end()


async def test_low_class_is_not_starved_by_endless_high_traffic() -> None:
    """Its weight is an eighth: its turn comes (B21)."""
    low = Tenant("low", priority_class=PriorityClass.BATCH)
    high = Tenant("high", priority_class=PriorityClass.INTERACTIVE)
    desk = Desk(low, high, slots=2)
    load = Load(desk, 2)
    await _saturate(load, {"high": (20, 20, 20)}, 100)
    load.add("low", 20, 20)
    started = len(load.engine.starts)
    while "low" not in load.engine.starts:
        await _saturate(load, {"high": (20, 20, 20)}, 1)
        assert len(load.engine.starts) < started + 12
    await load.end()


@pytest.mark.parametrize("slots", [1, 4, 32])
async def test_engine_s_own_list_stays_short_and_no_slot_idle(slots: int) -> None:
    """Between 1 and L, in the long run: what waits there cannot be overtaken by who comes later."""
    desk = Desk(tenant("a"), tenant("b"), slots=slots)
    load = Load(desk, slots)
    kinds = {"a": (20, 20, 20), "b": (30, 7, 7)}
    await _saturate(load, kinds, 100, depth=3 * slots)
    load.engine.depths.clear()
    load.engine.idle = 0
    await _saturate(load, kinds, 400, depth=3 * slots)
    depths = sorted(load.engine.depths)
    assert depths[int(len(depths) * 0.9)] <= GREATEST_DEPTH + 1
    assert load.engine.idle <= 0.03 * 400 * slots
    await load.end()


# Tenants that change


async def test_removed_tenants_queued_requests_are_refused() -> None:
    """403 at once; what runs may end; nothing stays charged for who waited (B27)."""
    desk = Desk(tenant(max_concurrency=1, requests_per_minute=10), tenant("globex", requests_per_minute=10))
    held = await desk.admitted()
    waiting = [desk.ask() for _ in range(3)]
    await settle()
    acme = desk.tenants["acme"]
    desk.reload(desk.tenants["globex"])
    for task in waiting:
        refusal = await refused(task)
        assert (refusal.outcome, refusal.status) == (Outcome.FORBIDDEN, 403)
    assert desk.admission.snapshot().running == {"acme": 1}
    held.settle(used(), finished=True)
    assert desk.is_empty()
    desk.tenants["acme"] = acme
    assert desk.levels() == [1]


async def test_new_concurrency_holds_at_once_both_ways() -> None:
    """More: who waits goes. Less: nobody goes until enough have ended."""
    desk = Desk(tenant(max_concurrency=1))
    held = [await desk.admitted()]
    waiting = [desk.ask() for _ in range(6)]
    await settle()
    desk.reload(tenant(max_concurrency=4))
    await settle()
    assert sum(task.done() for task in waiting) == 3
    held += [await task for task in waiting[:3]]
    desk.reload(tenant(max_concurrency=2))
    for running in (3, 2):
        held.pop().release()
        await settle()
        assert desk.admission.snapshot().running == {"acme": running}
    held.pop().release()
    await settle()
    assert waiting[3].done()
    assert not waiting[4].done()
    desk.reload(tenant())
    await settle()
    assert all(task.done() for task in waiting)
    await _end(desk, [*held, *waiting[3:]])


async def test_new_weight_holds_at_once() -> None:
    """For what is queued already."""
    desk = Desk(tenant("a"), tenant("b"), slots=4)
    load = Load(desk, 4)
    kinds = {"a": (20, 20, 20), "b": (20, 20, 20)}
    await _saturate(load, kinds, 200)
    desk.reload(tenant("a", weight=4.0), tenant("b"))
    await _saturate(load, kinds, 20)
    served = await _saturate(load, kinds, 1000)
    assert served["a"] / served["b"] == pytest.approx(4.0, rel=0.15)
    await load.end()


async def test_new_rate_holds_at_once_and_the_minute_so_far_counts() -> None:
    """Neither a fresh bucket nor the old limit (B27)."""
    desk = Desk(tenant(requests_per_minute=100))
    for _ in range(5):
        (await desk.admitted()).settle(used(), finished=True)
    desk.reload(tenant(requests_per_minute=6))
    (await desk.admitted()).settle(used(), finished=True)
    refusal = await refused(desk.ask())
    assert "6 requests a minute" in refusal.message


# The end


@pytest.mark.parametrize("slow", [False, True])
async def test_closed_admission_refuses_who_waits_and_who_comes(slow: bool) -> None:
    """At once, with a time; what runs may end."""
    desk = Desk(tenant(max_concurrency=1, requests_per_minute=10), slow=slow, kv_tokens=1000)
    held = await desk.admitted()
    waiting = [desk.ask() for _ in range(3)]
    await settle()
    reserving = desk.ask()
    await asyncio.sleep(0)
    desk.admission.close(lambda: Rejected(Outcome.DRAINING, "No more.", retry_after_s=10))
    for task in (*waiting, reserving, desk.ask()):
        assert (await refused(task)).outcome is Outcome.DRAINING
    with pytest.raises(Rejected):
        desk.admission.check(record_of(desk.tenants["acme"]), 1)
    held.settle(used(), finished=True)
    await desk.admission.settled()
    assert desk.is_empty()
    assert desk.levels() == [1]


async def test_closing_lets_nobody_in() -> None:
    """The first refused was in the way of the next, which would now fit."""
    desk = Desk(kv_tokens=1000)
    held = await desk.admitted(prompt=600, new=100)
    waiting = [desk.ask(prompt=600, new=100), desk.ask(), desk.ask()]
    await settle()
    desk.admission.close(lambda: Rejected(Outcome.DRAINING, "No more.", retry_after_s=10))
    for task in waiting:
        assert (await refused(task)).outcome is Outcome.DRAINING
    held.release()
    assert desk.is_empty()


# What is told


async def test_headers_tell_what_is_left() -> None:
    """Falls by one for each request admitted, and by what is reserved; none for who has no limit (B48)."""
    desk = Desk(tenant(requests_per_minute=10, tokens_per_minute=1000), tenant("globex"))
    for left in (9, 8, 7):
        record = record_of(desk.tenants["acme"])
        share = await desk.admitted(prompt=10, new=90, record=record)
        headers = _headers(record)
        assert headers["x-ratelimit-limit-requests"] == "10"
        assert headers["x-ratelimit-limit-tokens"] == "1000"
        assert int(headers["x-ratelimit-remaining-requests"]) == left
        assert int(headers["x-ratelimit-remaining-tokens"]) == 1000 - 100 * (10 - left)
        assert headers["x-ratelimit-reset-requests"] == f"{6 * (10 - left)}s"
        share.settle(used(10, 90), finished=True)
    record = record_of(desk.tenants["globex"])
    (await desk.admitted(record=record)).release()
    assert _headers(record) == {}


async def test_headers_of_a_refusal_agree_with_its_retry_after() -> None:
    """Nothing left, and it is back when the refusal says."""
    desk = Desk(tenant(requests_per_minute=2))
    await over_rate(desk)
    record = record_of(desk.tenants["acme"])
    refusal = await refused(desk.ask(record=record))
    headers = _headers(record)
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert retry_after(refusal) <= int(headers["x-ratelimit-reset-requests"].removesuffix("s"))


async def test_queued_client_hears_its_place_and_its_wait() -> None:
    """If it asks for it."""
    desk = Desk(tenant(max_concurrency=1))
    held = await desk.admitted()
    records = [record_of(desk.tenants["acme"]) for _ in range(3)]
    records[2].tells_queue = True
    tasks = [desk.ask(record=record) for record in records]
    await settle()
    desk.clock.advance(1.25)
    held.release()
    for task in tasks:
        (await task).release()
    assert _headers(records[0]) == {}
    assert _headers(records[2]) == {"x-fairgate-position": "2", "x-fairgate-wait": "1.250"}


async def test_usage_tells_a_tenant_of_itself() -> None:
    """Limits, use, place, expected wait."""
    desk = Desk(tenant(max_concurrency=1, requests_per_minute=10), tenant("globex"))
    held = await desk.admitted()
    tasks = [desk.ask() for _ in range(2)]
    await settle()
    assert desk.admission.usage(record_of(desk.tenants["acme"])) == {
        "tenant": "acme",
        "running": 1,
        "queued": 2,
        "position": 0,
        "estimated_wait_s": None,
        "limits": {"requests_per_minute": 10, "max_concurrency": 1, "burst_s": 60},
        "requests_per_minute": {"limit": 10, "remaining": 7, "reset_s": 18},
        "tokens_per_minute": None,
    }
    assert desk.admission.usage(record_of(desk.tenants["globex"]))["queued"] == 0
    assert repr(desk.admission) == "<Admission 1 running, 2 waiting, 1 tenants>"
    assert desk.admission.queue_depths() == (2,)
    await _end(desk, [held, *tasks])


async def test_replicas_without_a_shared_store_grant_a_part_each() -> None:
    """Two of them, ten a minute: five each (B50)."""
    for _ in range(2):
        desk = Desk(tenant(requests_per_minute=10), replicas=2)
        ended = await asyncio.gather(*(desk.ask() for _ in range(15)), return_exceptions=True)
        assert [type(e) for e in ended].count(Rejected) == 10
        await _end(desk, ended)


def _headers(record: Record) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in dict(record.headers).items()}


async def _end(desk: Desk, taken: Any = ()) -> None:
    """All that is under way ends, and nothing is left."""
    for each in taken:
        if isinstance(each, asyncio.Task):
            each.cancel()
            await asyncio.gather(each, return_exceptions=True)
            each = None if each.cancelled() or each.exception() else each.result()
        if each is not None and not isinstance(each, BaseException):
            each.release()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await settle()
    for slot in list(desk.admission._turns._slots):
        slot.release()
    await settle()
    assert desk.is_empty(), desk.admission
