"""One request, one Record: who asks, what for, what it used, how it ended.

Owns `Tenant` and `Key` (who), `Demand` (what is asked of the engine), `Usage` (what was computed)
and `Record`, which carries them through the gateway. ``http/edge.py`` opens and closes a Record;
auth, gate and admission write on it; observers read it when it is closed.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from .errors import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from .errors import Rejected
    from .observer import Releasable


class Role(StrEnum):
    """What a key opens."""

    TENANT = "tenant"
    """The model routes, and the tenant's own usage."""
    OPERATOR = "operator"
    """Metrics, docs, everyone's usage; no model routes unless it also names a tenant."""


class PriorityClass(StrEnum):
    """Classes share the engine 8 to 4 to 1, and tenants their class by weight: no class starves another."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a tenant, or of one of its keys. ``None`` is "no bound"."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_concurrency: int | None = None
    """Sequences at once in the engine."""
    max_queued: int | None = None
    """Requests waiting for their turn."""
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_n: int | None = None
    burst_s: int = 60
    """Seconds' worth of each rate that may come at once."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays. Frozen: a reload makes new ones, and running requests keep theirs."""

    id: str
    weight: float = 1.0
    priority_class: PriorityClass = PriorityClass.STANDARD
    limits: Limits = Limits()
    models: frozenset[str] | None = None
    """Names of models and LoRA adapters that it may use; ``None`` is all."""
    shared_prefix_cache: bool = False
    """Share prefix-cache entries with the other tenants that say so."""
    no_preempt: bool = False
    """Never swap its requests out of the batch (bitwise repeatable texts)."""
    ttft_deadline_s: float | None = None
    """Seconds to the first token after which its requests are of no use; ``None`` waits."""

    def may_use(self, model: str) -> bool:
        """Whether this tenant may use the model or adapter of that name."""
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class Key:
    """One credential of a tenant or an operator. Holds no secret: `id` is safe to log."""

    id: str
    label: str = ""
    role: Role = Role.TENANT
    expires_at: datetime | None = None
    limits: Limits | None = None
    """Bounds of this key alone, beside its tenant's."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking: the key, and the tenant that it belongs to (an operator may have none)."""

    key: Key
    tenant: Tenant | None = None

    @property
    def is_operator(self) -> bool:
        """Whether metrics, docs and everyone's usage are open to it."""
        return self.key.role is Role.OPERATOR


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of the engine."""

    prompt_tokens: int
    max_new_tokens: int
    """The most tokens that each sequence may emit (0 for pooling)."""
    sequences: int = 1
    prompts: int = 1
    """Prompts whose tokens are summed up in `prompt_tokens` (a list in one request)."""


@dataclass(slots=True)
class Usage:
    """Tokens that the engine computed for a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those found in the prefix cache."""
    completion_tokens: int = 0

    def add(self, other: Usage) -> None:
        """Add what another generation used."""
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens


@dataclass(slots=True, eq=False, weakref_slot=True)
class Record:
    """A request on its way through the gateway. Mutable; one event loop; one owner, the edge."""

    id: str
    method: str
    path: str
    opened_s: float
    """Monotonic clock, seconds."""
    principal: Principal | None = None
    route: str = "other"
    """A known route's path, never the client's text: it labels metrics."""
    model: str | None = None
    """A served name, never the client's text."""
    usage: Usage = field(default_factory=Usage)
    deadline_s: float | None = None
    """Seconds from arrival to the first token after which the answer is of no use, by the client's word."""
    tells_queue: bool = False
    """The client wants to hear how it stood in the queue."""
    rejection: Rejected | None = None
    """Set before a refusal is raised. The edge trusts it, not the exception that arrives."""
    failure: BaseException | None = None
    """The engine's fault, when a stream could only tell it as an event."""
    status: int | None = None
    """The HTTP status, once it has been sent."""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    """Further response headers, lower case; the edge adds them to whatever answer goes out."""
    outcome: Outcome | None = None
    first_token_s: float | None = None
    decided_s: float | None = None
    closed_s: float | None = None
    on_decision: Callable[[], None] | None = None
    """The edge's hold-back: lets the response out."""
    on_failure: Callable[[], None] | None = None
    """The edge's: from here on the stream may not claim to be complete."""
    on_cut: Callable[[], None] | None = None
    """The edge's: end the request now, as if the client had left."""
    held: list[Releasable] = field(default_factory=list)
    """What the edge gives back in its ``finally``."""

    @property
    def tenant(self) -> Tenant | None:
        """The tenant, once auth has found it."""
        return self.principal.tenant if self.principal else None

    def reject(self, rejection: Rejected) -> Rejected:
        """Note a refusal, so that ``raise record.reject(Rejected(...))`` cannot be swallowed."""
        if self.rejection is None:
            self.rejection = rejection
        return rejection

    def decide(self, now_s: float) -> None:
        """The request is admitted: the response may go out. Later calls change nothing."""
        if self.decided_s is None:
            self.decided_s = now_s
            if self.on_decision is not None:
                self.on_decision()

    def fail(self, cause: BaseException) -> None:
        """The engine let it down. The first cause is kept."""
        if self.failure is None:
            self.failure = cause
            if self.on_failure is not None:
                self.on_failure()

    def release(self) -> None:
        """Give back everything held, last taken first. Idempotent."""
        for taken in reversed(tuple(self.held)):
            taken.release()
        self.held.clear()

    def close(self, now_s: float, *, client_left: bool) -> None:
        """Settle the outcome from what is known. Called once, by the edge."""
        self.closed_s = now_s
        self.outcome = self._settle(client_left=client_left)

    def _settle(self, *, client_left: bool) -> Outcome:
        if self.rejection is not None:
            return self.rejection.outcome
        if client_left:
            return Outcome.CANCELLED
        if self.failure is not None or self.status is None or self.status >= 500:
            return Outcome.FAILED
        if self.status >= 400:
            return Outcome.INVALID
        return Outcome.FINISHED


current_record: ContextVar[Record | None] = ContextVar("current_record", default=None)
"""Set by the edge, here and nowhere else; read by the gate and by the log."""
