"""Lengths, KV peak and first-token time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.admission.forecast import FirstToken, Growth, KvForecast, Lengths, peak
from app.core.facts import EngineSignals
from app.core.record import PriorityClass

STANDARD = PriorityClass.STANDARD


def step(at_s: float, *, prefill: int = 0, decode: int = 0, running: int = 1) -> EngineSignals:
    return EngineSignals(
        rank=0,
        at_s=at_s,
        running=running,
        waiting=0,
        kv_usage=0.0,
        prefill_tokens=prefill,
        decode_tokens=decode,
        preempted=0,
    )


def test_unknown_tenant_is_expected_to_use_a_prior_not_its_whole_allowance() -> None:
    """A request without max_tokens is allowed the context window, and must not be charged that."""
    assert Lengths().expected("acme", STANDARD, 128_000) == 256
    assert Lengths().expected("acme", STANDARD, 16) == 16


def test_tenant_is_charged_what_its_answers_came_to() -> None:
    """One that asks 4,096 and uses 10 is not starved for the other 4,086."""
    lengths = Lengths()
    for _ in range(100):
        lengths.learn("acme", STANDARD, 4096, 10)
    assert lengths.expected("acme", STANDARD, 4096) == 10


def test_new_tenant_inherits_the_length_of_its_class() -> None:
    """The prior of a class is what its tenants' answers came to."""
    lengths = Lengths()
    lengths.learn("acme", STANDARD, 4096, 40)
    assert lengths.expected("umbrella", STANDARD, 4096) == 40
    assert lengths.expected("umbrella", PriorityClass.BATCH, 4096) == 256


def test_old_answers_are_forgotten() -> None:
    """A tenant that changes its habits is soon believed."""
    lengths = Lengths()
    for tokens in [1000] * 200 + [20] * 64:
        lengths.learn("acme", STANDARD, 4096, tokens)
    assert lengths.expected("acme", STANDARD, 4096) == 20


@st.composite
def running_sets(draw: st.DrawFn) -> list[Growth]:
    return [
        Growth(
            prompt_tokens=draw(st.integers(1, 50)),
            sequences=draw(st.integers(1, 3)),
            expected_tokens=draw(st.integers(1, 40)),
            max_new_tokens=draw(st.integers(1, 60)),
            started_step=0,
        )
        for _ in range(draw(st.integers(0, 8)))
    ]


@given(running_sets(), st.integers(0, 30))
def test_peak_is_the_highest_point_of_a_token_by_token_run(running: list[Growth], now: int) -> None:
    """The closed form equals the simulation in which each request ends as forecast."""
    left = [(g.remaining(now), g.sequences, g.used(now)) for g in running]
    highest = 0
    for tick in range(1, 200):
        held = sum(used + n * tick for remaining, n, used in left if remaining >= tick)
        highest = max(highest, held)
    # A request that has nothing left to make still holds its cache until its last step is done.
    still = sum(used for remaining, _, used in left)
    assert peak(running, now) == max(highest, still)


def test_request_that_would_outgrow_the_cache_is_not_sent() -> None:
    """Two that fit alone but not together: the second waits until the first has ended."""
    kv = KvForecast(1000, spare=0.0)
    first = kv.add(100, 1, 500, 800)
    assert not kv.fits(100, 1, 400, 800)
    assert kv.fits(50, 1, 300, 800)
    kv.remove(first)
    assert kv.fits(100, 1, 400, 800)


def test_empty_engine_takes_anything() -> None:
    """Whatever the forecast says, a request that is alone makes progress."""
    assert KvForecast(100).fits(90, 4, 500, 500)


def test_room_comes_back_as_requests_near_their_end() -> None:
    """The peak shrinks with what remains, step by step."""
    kv = KvForecast(1000, spare=0.0)
    kv.add(100, 4, 200, 10_000)
    assert not kv.fits(50, 1, 200, 10_000)
    for _ in range(190):
        kv.on_step()
    assert kv.peak_tokens < 1100


def test_request_that_outlives_its_forecast_is_expected_to_go_on() -> None:
    """Long answers are the rule, so a point guess is not trusted once it is past."""
    growth = Growth(prompt_tokens=10, sequences=1, expected_tokens=50, max_new_tokens=1000, started_step=0)
    assert growth.remaining(400) == 100
    assert growth.remaining(1000) == 0


def test_first_token_time_is_work_over_measured_rate() -> None:
    """100 output tokens a second are 200 units a second, so 400 units take two seconds."""
    first = FirstToken()
    assert first.predict_s(100, 10) is None
    for tenth in range(200):
        first.on_step(step(tenth / 10, decode=10))
    predicted_s = first.predict_s(390, 10)
    assert predicted_s is not None
    assert abs(predicted_s - 2.0) < 0.05


def test_idle_gap_is_no_slow_step() -> None:
    """An hour without requests leaves the rate as it was."""
    first = FirstToken()
    for tenth in range(100):
        first.on_step(step(tenth / 10, decode=10))
    rate = first.units_per_s
    first.on_step(step(10.0, running=0))
    first.on_step(step(3600.0, decode=10))
    first.on_step(step(3600.1, decode=10))
    assert abs(first.units_per_s - rate) < rate / 10


def test_nine_of_ten_predictions_come_to_hold() -> None:
    """Whatever the bias of the raw estimate, the factor takes it out (case: it is off by three)."""
    first = FirstToken()
    for tenth in range(100):
        first.on_step(step(tenth / 10, decode=10))
    for i in range(3000):
        predicted_s = first.predict_s(1000, 0)
        assert predicted_s is not None
        first.learn(predicted_s, 15.0 * (1 + (i * 7919 % 100) / 100))
    assert 0.85 <= first.coverage <= 0.95
