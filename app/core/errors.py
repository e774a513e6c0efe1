"""How a request can end, and the one exception that refuses it.

Owns `Outcome` (the closed list that labels metrics, log lines and spans) and `Rejected`. Raised
where the decision falls (auth, gate, admission); rendered once, in ``http/edge.py``.

::

    Exception
    ├── Rejected            a decision, not a fault: says outcome, status, code, and in words why
    └── StartError          the process cannot start or go on; told to the operator, last
"""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """The endings of a request. Every request has exactly one."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """The client left."""
    FAILED = "failed"
    """Our fault: 500, or an error event in a stream that has begun."""
    INVALID = "invalid"
    """The client's mistake: 400, 404, 405, 408, 413."""
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    RATE_LIMITED = "rate_limited"
    TOKENS_LIMITED = "tokens_limited"
    DAY_LIMITED = "day_limited"
    CONCURRENCY_LIMITED = "concurrency_limited"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    OVERLOADED = "overloaded"
    TOO_LARGE = "too_large"
    """Can never fit: context, KV cache, or the tenant's own cap."""
    DRAINING = "draining"
    ENGINE_DOWN = "engine_down"
    LOADING = "loading"


STATUS: dict[Outcome, int] = {
    Outcome.INVALID: 400,
    Outcome.UNAUTHENTICATED: 401,
    Outcome.FORBIDDEN: 403,
    Outcome.RATE_LIMITED: 429,
    Outcome.TOKENS_LIMITED: 429,
    Outcome.DAY_LIMITED: 429,
    Outcome.CONCURRENCY_LIMITED: 429,
    Outcome.QUEUE_FULL: 429,
    Outcome.QUEUE_TIMEOUT: 429,
    Outcome.OVERLOADED: 503,
    Outcome.TOO_LARGE: 400,
    Outcome.DRAINING: 503,
    Outcome.ENGINE_DOWN: 503,
    Outcome.LOADING: 503,
    Outcome.FAILED: 500,
}
"""The HTTP status of each refusal (FINISHED and CANCELLED have none of their own)."""


class Rejected(Exception):
    """A request is refused.

    Args:
        outcome: Why, from the closed list.
        message: For the client: which limit or field, which number, what would work.
        code: OpenAI's machine-readable ``error.code``; the outcome's name where there is no
            better one.
        param: The field of the request that is at fault, if one is.
        status: HTTP status, where it differs from the outcome's usual one (404, 405, 413…).
        retry_after_s: Whole seconds, at least 1, after which asking again makes sense.
        headers: Further response headers (``Allow``, ``WWW-Authenticate``).
    """

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.code = code or outcome.value
        self.param = param
        self.status = status or STATUS[outcome]
        self.retry_after_s = retry_after_s
        self.headers = headers or {}


class StartError(Exception):
    """The gateway cannot start or go on. The message is for the operator, and the last line printed."""
