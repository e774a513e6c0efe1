"""The arithmetic of limits, held against a definition that shares no code with it.

Driven through `MemoryStore`, which adds nothing but a table of buckets.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission.quota import (
    DAY_US,
    SECOND_US,
    UNIT,
    Account,
    Charge,
    Dimension,
    Granted,
    Headroom,
    Instant,
    Reservation,
    Shortage,
    divided,
    find_shortage,
    lines_of,
)
from app.admission.store import MemoryStore
from app.core.record import Limits

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

T = TypeVar("T")

REQUEST = Charge(requests=1)
NOTHING = Charge()


@dataclass
class Time:
    """Both clocks of a store, by hand."""

    us: int = 5 * DAY_US
    utc_us: int = 20_000 * DAY_US

    def pass_us(self, us: int) -> None:
        """Let time pass."""
        self.us += us
        self.utc_us += us


class Till:
    """A store in this process and its clock, spoken to without an event loop."""

    def __init__(self) -> None:
        self.time = Time()
        self.store = MemoryStore(lambda: self.time.us, lambda: self.time.utc_us)

    def __deepcopy__(self, memo: dict[int, Any]) -> Till:
        other = Till()
        other.time = deepcopy(self.time)
        other.store._buckets = deepcopy(self.store._buckets)
        return other

    def reserve(self, charge: Charge, *accounts: Account) -> Granted | Shortage:
        """Ask for a charge."""
        return at_once(self.store.reserve(accounts, charge))

    def take(self, charge: Charge, *accounts: Account) -> Reservation:
        """Ask for a charge that must fit."""
        answer = self.reserve(charge, *accounts)
        assert isinstance(answer, Granted)
        return answer.reservation

    def lack(self, charge: Charge, *accounts: Account) -> Shortage:
        """Ask for a charge that must not fit."""
        answer = self.reserve(charge, *accounts)
        assert isinstance(answer, Shortage)
        return answer

    def settle(self, reservation: Reservation, used: Charge) -> None:
        """Settle."""
        at_once(self.store.settle(reservation, used))

    def levels(self, *accounts: Account) -> list[int]:
        """What is in every bucket."""
        return self.store._buckets.levels(lines_of(accounts), Instant(self.time.us, self.time.utc_us))


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("it waits")


def account(name: str = "tenant:a", **limits: int) -> Account:
    """An account with these limits."""
    return Account(name, Limits(**limits))


def test_every_rate_and_day_limit_has_its_line() -> None:
    """A new limit by the minute or day that no line counts would be no limit."""
    names = [entry.name for entry in fields(Limits) if entry.name.endswith(("_per_minute", "_per_day"))]
    lines = Account("tenant:a", replace(Limits(), **dict.fromkeys(names, 10))).lines
    assert [line.dimension for line in lines] == list(Dimension)
    assert len({line.key for line in lines}) == len(names)


# The algorithm


@given(limit=st.integers(1, 100), burst_s=st.integers(1, 90))
def test_a_full_burst_is_admitted_to_the_last_unit_and_no_more(limit: int, burst_s: int) -> None:
    """For every limit, those that do not divide a minute too; B04's fifty at once for five a minute."""
    till, who = Till(), account(requests_per_minute=limit, burst_s=burst_s)
    answers = [till.reserve(REQUEST, who) for _ in range(151)]
    assert sum(isinstance(answer, Granted) for answer in answers) == max(1, limit * burst_s // 60)


def test_the_highest_limits_are_exact_in_a_redis_script() -> None:
    """Its numbers are doubles: a full bucket, and a bucket one tick short of it, are different numbers."""
    line = account(tokens_per_minute=10**15, burst_s=3600).lines[0]
    assert float(line.capacity) != float(line.capacity - 1)
    assert line.capacity > 10**8 * UNIT


@given(
    limit=st.integers(1, 5000),
    burst_s=st.integers(1, 120),
    steps=st.lists(st.tuples(st.integers(0, 90 * SECOND_US), st.integers(1, 3000)), max_size=40),
)
def test_a_charge_is_admitted_exactly_when_every_interval_keeps_to_rate_and_burst(
    limit: int, burst_s: int, steps: list[tuple[int, int]]
) -> None:
    """The definition: no interval sees more than its length times the rate, plus the burst (I10)."""
    till, who = Till(), account(tokens_per_minute=limit, burst_s=burst_s)
    burst = max(UNIT, limit * burst_s * SECOND_US)
    admitted: list[tuple[int, int]] = []
    for wait_us, tokens in steps:
        till.time.pass_us(wait_us)
        now = till.time.us
        trial = [*admitted, (now, tokens)]
        fits = all(
            sum(spent for _, spent in trial[first:]) * UNIT <= burst + limit * (now - began)
            for first, (began, _) in enumerate(trial)
        )
        answer = till.reserve(Charge(input_tokens=tokens), who)
        assert isinstance(answer, Granted) is fits
        if fits:
            admitted = trial


COUNTS = st.one_of(st.none(), st.integers(1, 3000))
ACCOUNTS = st.lists(
    st.builds(
        Limits,
        requests_per_minute=COUNTS,
        input_tokens_per_minute=COUNTS,
        output_tokens_per_minute=COUNTS,
        tokens_per_minute=COUNTS,
        tokens_per_day=st.one_of(st.none(), st.integers(1, 9000)),
        burst_s=st.integers(1, 120),
    ),
    min_size=1,
    max_size=2,
).map(lambda all_limits: [Account(f"account:{index}", limits) for index, limits in enumerate(all_limits)])
CHARGES = st.builds(Charge, st.integers(0, 2), st.integers(0, 900), st.integers(0, 900))
WAITS = st.integers(0, 100 * SECOND_US)


def spend(till: Till, accounts: Sequence[Account], steps: Sequence[tuple[int, Charge]]) -> None:
    """Ask for each charge after its wait, whatever the answer."""
    for wait_us, charge in steps:
        till.time.pass_us(wait_us)
        till.reserve(charge, *accounts)


@given(ACCOUNTS, st.lists(st.tuples(WAITS, CHARGES), max_size=12), CHARGES, st.integers(0, DAY_US))
def test_retry_after_is_exact(
    accounts: list[Account], steps: list[tuple[int, Charge]], charge: Charge, begin_us: int
) -> None:
    """Nothing else changing, it is refused a second earlier and admitted then, by all lines (B13)."""
    till = Till()
    till.time.pass_us(begin_us)
    spend(till, accounts, steps)
    answer = till.reserve(charge, *accounts)
    if isinstance(answer, Granted):
        return
    if answer.never:
        till.time.pass_us(40 * DAY_US)
        assert till.lack(charge, *accounts).never
        return
    second_us = answer.retry_after_s * SECOND_US
    for wait_us, fits in (
        (second_us - SECOND_US, False),
        (answer.wait_us - 1, False),
        (answer.wait_us, True),
        (second_us, True),
    ):
        later = deepcopy(till)
        later.time.pass_us(wait_us)
        assert isinstance(later.reserve(charge, *accounts), Granted) is fits


@given(ACCOUNTS, st.lists(st.tuples(WAITS, CHARGES), max_size=12), CHARGES)
def test_a_refusal_changes_nothing(
    accounts: list[Account], steps: list[tuple[int, Charge]], charge: Charge
) -> None:
    """Not even the lines that had room (I17, B14a, B35)."""
    till = Till()
    spend(till, accounts, steps)
    before = till.levels(*accounts)
    if isinstance(till.reserve(charge, *accounts), Shortage):
        assert till.levels(*accounts) == before


@given(ACCOUNTS, st.lists(st.tuples(WAITS, CHARGES), max_size=12), CHARGES)
def test_a_wholly_undone_request_costs_nothing(
    accounts: list[Account], steps: list[tuple[int, Charge]], charge: Charge
) -> None:
    """Refused later, by queue or deadline, it leaves every counter as it was, requests included."""
    till = Till()
    spend(till, accounts, steps)
    before = till.levels(*accounts)
    if isinstance(answer := till.reserve(charge, *accounts), Granted):
        till.settle(answer.reservation, NOTHING)
        assert till.levels(*accounts) == before


RUNS = st.lists(st.tuples(WAITS, st.integers(0, 400), st.integers(0, 400), st.integers(0, 15)), max_size=15)
"""Requests: the wait before, tokens expected, tokens used, after how many others it is settled."""


def run(till: Till, who: Account, requests: list[tuple[int, int, int, int]]) -> list[int]:
    """Reserve what is expected, settle what is used, in the order that the requests say; then the levels."""
    running: list[tuple[int, Reservation, int]] = []
    for turn, (wait_us, expected, used, stay) in enumerate(requests):
        till.time.pass_us(wait_us)
        running.append((turn + stay, till.take(Charge(1, expected), who), used))
        for request in [request for request in running if request[0] <= turn]:
            running.remove(request)
            till.settle(request[1], Charge(1, request[2]))
    for _, reservation, used in running:
        till.settle(reservation, Charge(1, used))
    return till.levels(who)


ROOMY = Limits(requests_per_minute=10**4, input_tokens_per_minute=6 * 10**4, burst_s=3600)


@given(RUNS)
def test_settled_levels_are_those_of_a_run_that_knew_the_costs(
    requests: list[tuple[int, int, int, int]],
) -> None:
    """Whatever the order of settlements, exactly, while the buckets are not empty (I2)."""
    levels = []
    for estimated in (True, False):
        till, who = Till(), Account("tenant:a", ROOMY)
        till.take(Charge(10**4 * 50, 6 * 10**4 * 50), who)  # fifty minutes' worth: never empty meanwhile
        exact = [(wait, used, used, stay) for wait, _, used, stay in requests]
        levels.append(run(till, who, requests if estimated else exact))
    assert levels[0] == levels[1]


@given(RUNS)
def test_settled_levels_differ_by_no_more_than_the_estimates_erred(
    requests: list[tuple[int, int, int, int]],
) -> None:
    """Buckets that run empty lose the difference, never more than it; and are never less than empty."""
    till, exact_till, who = Till(), Till(), Account("tenant:a", ROOMY)
    exact = [(wait, used, used, stay) for wait, _, used, stay in requests]
    levels, true_levels = run(till, who, requests), run(exact_till, who, exact)
    error = sum(abs(expected - used) for _, expected, used, _ in requests) * UNIT
    assert levels[0] == true_levels[0]
    assert abs(levels[1] - true_levels[1]) <= error
    assert min(levels) >= 0


# Settlement


def test_only_what_was_used_stays_charged() -> None:
    """900 reserved, 5 used: the rest is free at once (B14c)."""
    till, who = Till(), account(tokens_per_minute=1000)
    reservation = till.take(Charge(1, 10, 890), who)
    assert till.lack(Charge(1, 10, 890), who).used == 900
    till.settle(reservation, Charge(1, 4, 1))
    till.take(Charge(1, 0, 995), who)
    assert till.lack(Charge(1, 0, 1), who).used == 1000


def test_what_was_used_beyond_the_reservation_is_charged() -> None:
    """Even over the limit: the next request waits for it."""
    till, who = Till(), account(output_tokens_per_minute=60)
    till.settle(till.take(Charge(1, 0, 60), who), Charge(1, 0, 90))
    assert till.lack(Charge(1, 0, 1), who).retry_after_s == 31


def test_a_request_that_ran_keeps_its_request_charged() -> None:
    """However few tokens it used; one that was never run does not (B35)."""
    till, who = Till(), account(requests_per_minute=2)
    till.settle(till.take(Charge(1, 5, 5), who), Charge(1, 0, 0))
    till.settle(till.take(REQUEST, who), NOTHING)  # refused by its concurrency
    till.take(REQUEST, who)
    assert till.lack(REQUEST, who).used == 2


def test_settling_again_changes_nothing() -> None:
    """The first settlement counts."""
    till, who = Till(), account(tokens_per_minute=100, tokens_per_day=100)
    till.take(Charge(input_tokens=50), who)
    reservation = till.take(Charge(input_tokens=50), who)
    till.settle(reservation, Charge(input_tokens=20))
    till.settle(reservation, NOTHING)
    assert till.lack(Charge(input_tokens=40), who).used == 70


def test_a_late_refund_never_makes_more_than_a_full_burst() -> None:
    """The bucket has drained meanwhile; the refund finds nothing to give back (B14e)."""
    till, who = Till(), account(tokens_per_minute=100)
    reservation = till.take(Charge(input_tokens=100), who)
    till.time.pass_us(59 * SECOND_US)
    till.settle(reservation, NOTHING)
    till.take(Charge(input_tokens=100), who)
    assert till.lack(Charge(input_tokens=1), who).used == 100


# The day


def test_the_day_ends_at_midnight_utc() -> None:
    """The wait is to then, not a moment less or more."""
    till, who = Till(), account(tokens_per_day=100)
    till.time.pass_us(DAY_US - 90 * SECOND_US - 1)
    till.take(Charge(input_tokens=100), who)
    shortage = till.lack(Charge(output_tokens=1), who)
    assert (shortage.dimension, shortage.retry_after_s) == (Dimension.DAY_TOKENS, 91)
    till.time.pass_us(90 * SECOND_US)
    till.lack(Charge(output_tokens=1), who)
    till.time.pass_us(1)
    till.take(Charge(output_tokens=100), who)


def test_a_settlement_goes_to_the_day_of_the_reservation() -> None:
    """Yesterday's refund buys nothing today, and yesterday's extra costs nothing today."""
    till, who = Till(), account(tokens_per_day=100)
    over, under = till.take(Charge(input_tokens=50), who), till.take(Charge(input_tokens=10), who)
    till.time.pass_us(DAY_US)
    till.take(Charge(input_tokens=60), who)
    till.settle(over, NOTHING)
    till.settle(under, Charge(input_tokens=90))
    assert till.lack(Charge(input_tokens=41), who).used == 60


def test_a_days_counter_outlives_a_clock_that_steps_back_over_midnight() -> None:
    """Else the step would hand out a second day."""
    till, who = Till(), account(tokens_per_day=100)
    till.take(Charge(input_tokens=99), who)
    till.time.utc_us -= SECOND_US
    till.take(Charge(input_tokens=1), who)
    assert till.lack(Charge(input_tokens=1), who).retry_after_s == 1
    till.time.utc_us += SECOND_US
    till.lack(Charge(input_tokens=1), who)


# Answers


def test_of_several_short_lines_the_slowest_is_told() -> None:
    """Its Retry-After is the one that holds; key and tenant are judged together."""
    till = Till()
    tenant, key = (
        account(requests_per_minute=60, tokens_per_minute=600),
        account("key:k", requests_per_minute=6),
    )
    for _ in range(6):
        till.take(Charge(1, 100), tenant, key)
    shortage = till.lack(Charge(1, 50), tenant, key)
    assert (shortage.account, shortage.dimension, shortage.limit) == ("key:k", Dimension.REQUESTS, 6)
    assert (shortage.used, shortage.asked, shortage.wait_us) == (6, 1, 10 * SECOND_US)


def test_what_exceeds_the_whole_burst_or_day_never_fits() -> None:
    """It is told before any line that time would help (B13)."""
    till = Till()
    who = account(requests_per_minute=1, tokens_per_minute=1000, tokens_per_day=5000, burst_s=120)
    till.take(Charge(1, 1000, 1000), who)
    rate, day = till.lack(Charge(1, 2000, 1), who), till.lack(Charge(1, 5001), who)
    assert (rate.dimension, rate.never, rate.asked) == (Dimension.TOKENS, True, 2001)
    assert day.never
    assert not till.lack(Charge(1, 2000, 0), who).never


def test_a_line_that_is_not_charged_refuses_nothing() -> None:
    """An embedding does not wait for overdrawn output tokens."""
    till, who = Till(), account(output_tokens_per_minute=10, requests_per_minute=10)
    till.settle(till.take(Charge(1, 0, 10), who), Charge(1, 0, 500))
    till.take(Charge(1, 30, 0), who)


@pytest.mark.parametrize(("wait_us", "seconds"), [(1, 1), (SECOND_US, 1), (SECOND_US + 1, 2)])
def test_retry_after_is_a_whole_number_of_at_least_one(wait_us: int, seconds: int) -> None:
    """Zero would be ignored by clients, and a fraction is not allowed."""
    line = account(requests_per_minute=60).lines[0]
    excess = wait_us * line.drain
    level = line.capacity - UNIT + excess
    shortage = find_shortage([line], [UNIT], [level], Instant(0, 0))
    assert shortage is not None
    assert shortage.retry_after_s == seconds


def test_standing_falls_by_one_with_each_request_and_tells_the_tightest_tokens() -> None:
    """Of tenant and key, of input, output and both; after the reserve (B48)."""
    till = Till()
    tenant = account(requests_per_minute=10, input_tokens_per_minute=500, tokens_per_minute=400)
    key = account("key:k", output_tokens_per_minute=300)
    seen = []
    for _ in range(3):
        answer = till.reserve(Charge(1, 20, 30), tenant, key)
        seen.append(answer.standing.requests)
    assert seen == [Headroom(10, 9, 6), Headroom(10, 8, 12), Headroom(10, 7, 18)]
    assert answer.standing.tokens == Headroom(300, 210, 18)
    till.take(Charge(1, 200, 0), tenant, key)
    assert till.store.standing([tenant, key]).tokens == Headroom(400, 50, 53)


def test_standing_is_never_negative_and_agrees_with_the_refusal() -> None:
    """Overdrawn tokens are none, and all of them are back later than the refused request's turn."""
    till, who = Till(), account(tokens_per_minute=60)
    till.settle(till.take(Charge(1, 60), who), Charge(1, 90))
    shortage = till.lack(Charge(1, 10), who)
    assert shortage.standing.requests is None
    assert shortage.standing.tokens == Headroom(60, 0, 90)
    assert shortage.retry_after_s == 40


def test_without_limits_there_is_nothing_to_tell() -> None:
    """No bogus numbers for the unlimited; the day's counter is not among the headers."""
    till = Till()
    assert till.reserve(Charge(1, 10**6, 10**6), account(), account("key:k")).standing == (None, None)
    assert till.reserve(Charge(1, 10), account(tokens_per_day=100)).standing == (None, None)


def test_a_replicas_part_is_rounded_down_and_at_least_one() -> None:
    """Rates and day only: a prompt is no shorter for there being two processes (B50)."""
    whole = Limits(
        requests_per_minute=10, tokens_per_minute=7, tokens_per_day=1, max_concurrency=4, max_prompt_tokens=99
    )
    part = divided(whole, 2)
    assert (part.requests_per_minute, part.tokens_per_minute, part.tokens_per_day) == (5, 3, 1)
    assert (part.max_concurrency, part.max_prompt_tokens, part.output_tokens_per_minute) == (4, 99, None)
