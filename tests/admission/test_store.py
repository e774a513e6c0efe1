"""The store in this process: all or nothing, at once, and no larger than its use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from app.admission.quota import DAY_US, SECOND_US, Account, Charge, Granted, Shortage
from app.admission.store import Buckets, MemoryStore, Store
from app.core.record import Limits

if TYPE_CHECKING:
    from app.admission.quota import Instant, Line

REQUEST = Charge(requests=1)


class Clock:
    """Microseconds by hand, for both clocks."""

    def __init__(self) -> None:
        self.us = 20_000 * DAY_US

    def __call__(self) -> int:
        return self.us


def make(*, replicas: int = 1) -> tuple[MemoryStore, Clock]:
    """A store and its clock."""
    clock = Clock()
    return MemoryStore(clock, clock, replicas=replicas), clock


def tenant(name: str, **limits: int) -> Account:
    """A tenant with these limits."""
    return Account(f"tenant:{name}", Limits(**limits))


async def count_granted(store: Store, charge: Charge, account: Account, *, asked: int) -> int:
    """Of so many requests in one tick, those that were admitted."""
    answers = [await store.reserve([account], charge) for _ in range(asked)]
    return sum(isinstance(answer, Granted) for answer in answers)


async def test_a_burst_in_one_tick_cannot_walk_through_a_token_limit() -> None:
    """Five of 70 expected tokens at 100 a minute: one is admitted, whatever they use in the end (B04)."""
    store, _ = make()
    assert await count_granted(store, Charge(1, 10, 60), tenant("a", tokens_per_minute=100), asked=5) == 1
    assert await count_granted(store, REQUEST, tenant("b", requests_per_minute=5), asked=50) == 5


async def test_tenants_do_not_share_buckets_but_a_tenants_keys_share_the_tenants() -> None:
    """A key's own limit stands beside its tenant's."""
    store, _ = make()
    acme, other = tenant("acme", requests_per_minute=3), tenant("other", requests_per_minute=1)
    keys = [Account(f"key:{name}", Limits(requests_per_minute=2)) for name in "kl"]
    assert isinstance(await store.reserve([other], REQUEST), Granted)
    answers = [
        await store.reserve([acme, key], REQUEST) for key in (keys[0], keys[0], keys[0], keys[1], keys[1])
    ]
    assert [answer.account for answer in answers if isinstance(answer, Shortage)] == ["key:k", "tenant:acme"]


async def test_peek_refuses_what_reserve_would_and_charges_nothing() -> None:
    """Before the prompt is tokenized."""
    store, clock = make()
    account = tenant("a", requests_per_minute=1, output_tokens_per_minute=60)
    assert store.peek([account], REQUEST) is None
    assert store.peek([account], REQUEST) is None
    assert isinstance(await store.reserve([account], REQUEST), Granted)
    assert store.peek([account], REQUEST) == await store.reserve([account], REQUEST)
    assert store.peek([account], Charge(0, 1, 1)) is None
    clock.us += 60 * SECOND_US
    assert store.peek([account], REQUEST) is None


async def test_each_of_two_replicas_grants_half() -> None:
    """Without a shared store the limit is divided, and told as divided (B50)."""
    account = tenant("a", requests_per_minute=10, tokens_per_day=100)
    stores = [make(replicas=2)[0] for _ in range(2)]
    granted = [await count_granted(store, REQUEST, account, asked=15) for store in stores]
    assert granted == [5, 5]
    refusal = stores[0].peek([account], REQUEST)
    assert refusal is not None
    assert refusal.limit == 5
    assert isinstance(await stores[0].reserve([account], Charge(input_tokens=51)), Shortage)


async def test_ten_thousand_tenants_come_and_go_and_are_forgotten() -> None:
    """Memory follows use: those still known after a while are those who came of late."""
    store, clock = make()
    sizes = []
    for number in range(10_000):
        clock.us += SECOND_US // 10
        account = tenant(str(number), requests_per_minute=60, tokens_per_minute=6000)
        answer = await store.reserve([account], Charge(1, 100))
        assert isinstance(answer, Granted)
        await store.settle(answer.reservation, Charge(1, 50))
        sizes.append(len(store._buckets))
    assert max(sizes) <= 60  # two buckets a tenant, ten tenants a second, each empty within a second or so
    assert repr(store) == f"<MemoryStore {sizes[-1]} buckets>"


async def test_days_counters_are_forgotten_the_day_after() -> None:
    """By the calls of a single tenant that stays."""
    store, clock = make()
    for number in range(200):
        await store.reserve([tenant(str(number), tokens_per_day=100)], Charge(1, 10))
    clock.us += DAY_US
    for _ in range(250):
        await store.reserve([tenant("stays", tokens_per_day=10**6)], Charge(1, 10))
    assert len(store._buckets) == 1


async def test_a_busy_bucket_is_not_forgotten() -> None:
    """Its turn to be looked at comes while it is in use."""
    store, clock = make()
    account = tenant("a", requests_per_minute=60)
    for _ in range(300):
        assert isinstance(await store.reserve([account], REQUEST), Granted)
        assert isinstance(await store.reserve([account], REQUEST), Granted) or store.peek([account], REQUEST)
        clock.us += SECOND_US
    standing = store.standing([account]).requests
    assert standing is not None
    assert standing.remaining == 1


async def test_no_call_looks_at_more_buckets_than_it_may() -> None:
    """Ten thousand buckets fall due at once; the next call does not pay for all."""
    looked: list[str] = []

    class Watched(Buckets):
        def _look_at(self, entry: tuple[int, str, Line], now: Instant) -> None:
            looked.append(entry[1])
            super()._look_at(entry, now)

    store, clock = make()
    store._buckets = Watched()
    for number in range(10_000):
        await store.reserve([tenant(str(number), requests_per_minute=60)], REQUEST)
    clock.us += 3600 * SECOND_US
    await store.reserve([tenant("late", requests_per_minute=60)], REQUEST)
    assert len(looked) == Buckets.SWEEP


async def test_a_charge_and_its_settlement_take_microseconds() -> None:
    """All five limits; a generous bound, since the machine is shared: a sweep or a scan would break it."""
    limits = Limits(10**6, 10**7, 10**7, 10**7, 10**9)
    store = MemoryStore(lambda: time.monotonic_ns() // 1000, lambda: time.time_ns() // 1000)
    accounts = [Account(f"tenant:{number}", limits) for number in range(2000)]
    began = time.process_time_ns()
    for account in accounts:
        answer = await store.reserve([account], Charge(1, 500, 200))
        assert isinstance(answer, Granted)
        await store.settle(answer.reservation, Charge(1, 500, 120))
    assert (time.process_time_ns() - began) / len(accounts) < 200_000
