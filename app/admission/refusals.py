"""The words of admission's refusals: which limit, which number, what would work.

Plain functions, called by ``admission.py``. An estimated ``Retry-After`` is moved upward by up to a
fifth at random, so that clients refused together do not come back together; an exact one is left alone.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from ..core.errors import Outcome, Rejected
from .quota import Dimension

if TYPE_CHECKING:
    from .quota import Shortage

_WORDS = {
    Dimension.REQUESTS: ("requests a minute", Outcome.RATE_LIMITED, "requests"),
    Dimension.INPUT_TOKENS: ("input tokens a minute", Outcome.TOKENS_LIMITED, "input_tokens"),
    Dimension.OUTPUT_TOKENS: ("output tokens a minute", Outcome.TOKENS_LIMITED, "output_tokens"),
    Dimension.TOKENS: ("tokens a minute", Outcome.TOKENS_LIMITED, "tokens"),
    Dimension.DAY_TOKENS: ("tokens a day (UTC)", Outcome.DAY_LIMITED, "tokens_per_day"),
}


def estimate_s(seconds: float) -> int:
    """A measured wait as ``Retry-After``: whole seconds, at least 1, spread upward."""
    return max(1, math.ceil(seconds * random.uniform(1.0, 1.2)))


def short(shortage: Shortage) -> Rejected:
    """A rate or day limit: exact, or 400 where no wait would help."""
    words, outcome, name = _WORDS[shortage.dimension]
    whose = "This key" if shortage.account.startswith("key:") else "This tenant"
    if shortage.never:
        return Rejected(
            Outcome.TOO_LARGE,
            f"The request asks for {shortage.asked} tokens (prompt and expected output). {whose} may use "
            f"{shortage.limit} {words}, so it can never be served. Ask for fewer (max_tokens).",
            code=f"{name}_limit_below_request",
        )
    return Rejected(
        outcome,
        f"{whose} may use {shortage.limit} {words}; {shortage.used} are used or reserved and this request "
        f"asks for {shortage.asked}. Retry in {shortage.retry_after_s} s.",
        code=f"{name}_limit_exceeded",
        retry_after_s=shortage.retry_after_s,
    )


def over_cap(what: str, asked: int, limit: int, param: str) -> Rejected:
    """Above the tenant's or key's own cap on the size of one request."""
    return Rejected(
        Outcome.TOO_LARGE,
        f"The request has {asked} {what}; this key may ask for {limit} at most.",
        code="request_above_limit",
        param=param,
    )


def over_cache(prompt_tokens: int, kv_tokens: int) -> Rejected:
    """A prompt that the KV cache can never hold: it would block the engine's queue for ever."""
    return Rejected(
        Outcome.TOO_LARGE,
        f"The prompt has {prompt_tokens} tokens; the server's KV cache holds {kv_tokens}.",
        code="context_length_exceeded",
        param="messages",
    )


def at_concurrency(limit: int, *, wait_s: float) -> Rejected:
    """The tenant runs what it may, and no request of its may wait."""
    return Rejected(
        Outcome.CONCURRENCY_LIMITED,
        f"This tenant may run {limit} sequences at once; with this request there would be more, and it may "
        "not queue.",
        code="concurrency_limit_exceeded",
        retry_after_s=estimate_s(wait_s),
    )


def queue_full(queued: int, limit: int, *, wait_s: float) -> Rejected:
    """The tenant's own queue is full, or the engine is and the tenant may not queue."""
    return Rejected(
        Outcome.QUEUE_FULL,
        f"This tenant has {queued} requests waiting; it may have {limit}.",
        code="queue_full",
        retry_after_s=estimate_s(wait_s),
    )


def waited_for_own_limit(waited_s: float, limit: int | None, *, wait_s: float) -> Rejected:
    """Its deadline passed while the tenant was at its own concurrency."""
    return Rejected(
        Outcome.QUEUE_TIMEOUT,
        f"The request waited {waited_s:.1f} s, its deadline, for this tenant's own requests: it may have "
        f"{limit} sequences at once.",
        code="queue_timeout",
        retry_after_s=estimate_s(wait_s),
    )


def overloaded(deadline_s: float, expected_s: float) -> Rejected:
    """The engine cannot meet the deadline."""
    return Rejected(
        Outcome.OVERLOADED,
        f"The first token would come after about {expected_s:.1f} s; the deadline is {deadline_s:g} s.",
        code="overloaded",
        retry_after_s=estimate_s(expected_s - deadline_s),
    )


def store_lost() -> Rejected:
    """The shared store is away, and the operator has chosen to admit nobody meanwhile."""
    return Rejected(
        Outcome.OVERLOADED,
        "Limits cannot be checked at the moment.",
        code="limits_unavailable",
        retry_after_s=estimate_s(1),
    )


def removed() -> Rejected:
    """The tenant has been taken out of the configuration while this request waited."""
    return Rejected(Outcome.FORBIDDEN, "This tenant has been removed.", code="tenant_removed")
