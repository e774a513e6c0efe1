"""A Record on its way: the first word stands, what is held goes back once, one ending."""

from __future__ import annotations

import pytest

from app.core.errors import STATUS, Outcome, Rejected
from app.core.record import Record, Tenant


def record() -> Record:
    """An open one."""
    return Record("r", "POST", "/v1/chat/completions", 0.0)


REFUSAL = Rejected(Outcome.RATE_LIMITED, "too many")


@pytest.mark.parametrize(
    ("rejection", "failure", "status", "client_left", "outcome"),
    [
        (None, None, 200, False, Outcome.FINISHED),
        (None, None, 200, True, Outcome.CANCELLED),
        (None, None, None, True, Outcome.CANCELLED),
        (None, RuntimeError(), 200, False, Outcome.FAILED),
        (None, None, None, False, Outcome.FAILED),
        (None, None, 500, False, Outcome.FAILED),
        (None, None, 499, False, Outcome.INVALID),
        (None, None, 400, False, Outcome.INVALID),
        (None, None, 399, False, Outcome.FINISHED),
        (REFUSAL, None, 429, False, Outcome.RATE_LIMITED),
        (REFUSAL, RuntimeError(), 200, True, Outcome.RATE_LIMITED),
        (None, RuntimeError(), None, True, Outcome.CANCELLED),
    ],
)
def test_outcome_is_settled_from_what_is_known(
    rejection: Rejected | None,
    failure: Exception | None,
    status: int | None,
    client_left: bool,
    outcome: Outcome,
) -> None:
    """A refusal first, then the client that left, then faults, then the status."""
    ended = record()
    if rejection is not None:
        ended.reject(rejection)
    if failure is not None:
        ended.fail(failure)
    ended.status = status
    ended.close(2.0, client_left=client_left)
    assert ended.outcome is outcome
    assert ended.closed_s == 2.0


def test_first_word_stands() -> None:
    """Of refusals, failures and decisions; each is told to the edge once."""
    ended, told = record(), []
    ended.on_decision = lambda: told.append("decision")
    ended.on_failure = lambda: told.append("failure")
    first, second = RuntimeError("first"), RuntimeError("second")
    for cause in (first, second):
        ended.fail(cause)
    for now_s in (1.0, 2.0):
        ended.decide(now_s)
    later = Rejected(Outcome.INVALID, "later")
    assert ended.reject(REFUSAL) is REFUSAL
    assert ended.reject(later) is later
    assert ended.failure is first
    assert ended.decided_s == 1.0
    assert ended.rejection is REFUSAL
    assert sorted(told) == ["decision", "failure"]


def test_release_gives_back_last_taken_first_and_once() -> None:
    """A run before its slot; a second release finds nothing."""
    order: list[str] = []

    class Held:
        def __init__(self, name: str) -> None:
            self.name = name

        def release(self) -> None:
            order.append(self.name)
            ended.held.remove(self)  # as a run does

    ended = record()
    ended.held += [Held("slot"), Held("run")]
    ended.release()
    ended.release()
    assert order == ["run", "slot"]
    assert ended.held == []


def test_tenant_without_a_list_may_use_every_model() -> None:
    """And one with a list those on it."""
    assert Tenant("a").may_use("m")
    assert Tenant("a", models=frozenset({"m"})).may_use("m")
    assert not Tenant("a", models=frozenset()).may_use("m")


@pytest.mark.parametrize("outcome", Outcome)
def test_every_refusal_has_a_status(outcome: Outcome) -> None:
    """Only those that finish or leave have none; overload is no 500 and no 429 of the tenant's (B16)."""
    if outcome in (Outcome.FINISHED, Outcome.CANCELLED):
        assert outcome not in STATUS
        return
    rejection = Rejected(outcome, "why")
    assert rejection.status == STATUS[outcome]
    assert rejection.code == outcome.value
    assert 400 <= rejection.status <= 503
    assert (rejection.status == 500) == (outcome is Outcome.FAILED)
