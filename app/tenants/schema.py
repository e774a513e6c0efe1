"""The form of ``config/tenants.yaml``: what may stand in it, field by field.

Owns the pydantic models and the JSON schema made from them (``config/tenants.schema.json``, which
editors use for completion). Called by ``book.py``, which turns a checked file into core's frozen
words; nothing behind it sees pydantic. What holds between entries (no two alike) is checked there.

The messages say what would work. They never quote a value: that is left to ``document.py``, which
knows what could be a secret.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from ..core.record import PriorityClass, Role

NAME = r"^[a-z0-9][a-z0-9_.-]{0,63}$"
"""Ids of tenants and keys: they label metrics and log lines, so they are short and plain."""

RESERVED = frozenset({"other", "none", "anonymous"})
"""The metrics' labels for unknown tenants and for none, and everyone when authentication is off."""

EMPTY_DIGEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of nothing: what ``printf "$UNSET" | sha256sum`` writes. It would let an empty key in."""

MAX_LABEL = 120
"""Characters."""

MAX_COUNT = 10**15
"""Tokens or requests; beyond any hardware, and exact in a JSON number and in a Redis script."""


def instant(value: object) -> datetime:
    """An ISO 8601 date-time with a zone. A bare number or date is refused, not guessed at."""
    if isinstance(value, datetime):
        parsed = value
    else:
        try:
            parsed = datetime.fromisoformat(str(value))
        except ValueError:
            raise ValueError("must be a date-time such as 2027-01-31T00:00:00Z") from None
    if parsed.tzinfo is None:
        raise ValueError("must name its zone: 2027-01-31T00:00:00Z or 2027-01-31T00:00:00+01:00")
    return parsed


def _tenant_name(value: str) -> str:
    if value in RESERVED:
        raise ValueError(f"is reserved ({', '.join(sorted(RESERVED))}): choose another id")
    return value


def _digest(value: str) -> str:
    if value == EMPTY_DIGEST:
        raise ValueError("is the SHA-256 of an empty key: the variable that held the key was not set")
    return value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be printable text on one line")
    return value


def _null_is_empty(value: object) -> object:
    # `keys:` with every entry commented out is null in YAML. Its author means "none".
    return [] if value is None else value


Name = Annotated[str, StringConstraints(pattern=NAME)]
TenantName = Annotated[Name, AfterValidator(_tenant_name)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$"), AfterValidator(_digest)]
Label = Annotated[str, StringConstraints(max_length=MAX_LABEL), AfterValidator(_printable)]
Instant = Annotated[
    datetime, BeforeValidator(instant), WithJsonSchema({"type": "string", "format": "date-time"})
]
# Strict, so that neither `true` nor "100" passes for a number.
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
Weight = Annotated[float, Field(strict=True, ge=0.001, le=1000, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=86400, allow_inf_nan=False)]
Flag = Literal["shared_prefix_cache", "no_preempt"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LimitsEntry(_Entry):
    """Bounds of a tenant, or of one key beside its tenant's. What is left out is unbounded."""

    requests_per_minute: Count | None = None
    input_tokens_per_minute: Count | None = None
    output_tokens_per_minute: Count | None = None
    tokens_per_minute: Count | None = Field(default=None, description="Input and output together.")
    tokens_per_day: Count | None = Field(default=None, description="Input and output together.")
    max_concurrency: Count | None = Field(default=None, description="Sequences at once in the engine.")
    max_queued: Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)] | None = Field(
        default=None, description="Requests waiting for their turn; 0 refuses instead."
    )
    max_prompt_tokens: Count | None = Field(default=None, description="Of one request.")
    max_output_tokens: Count | None = Field(default=None, description="Of one sequence.")
    max_n: Count | None = Field(default=None, description="Answers to one prompt (`n`).")
    burst_s: Annotated[int, Field(strict=True, ge=1, le=3600)] = Field(
        default=60, description="Seconds' worth of each rate that may come at once."
    )


class KeyEntry(_Entry):
    """A key of a tenant, known by its SHA-256. The key itself stands nowhere."""

    id: Name = Field(description="Names the key in logs, in `fairgate keys revoke` and in usage reports.")
    sha256: Digest = Field(description="SHA-256 of the whole key, as 64 lower-case hexadecimal digits.")
    label: Label = Field(default="", description="For people: whose key it is, where it is used.")
    role: Role = Field(
        default=Role.TENANT,
        description="tenant: the model routes and its own usage. operator: also metrics, docs, all usage.",
    )
    expires: Instant | None = Field(
        default=None, description="ISO 8601 date-time with a zone; from then on the key opens nothing."
    )
    limits: LimitsEntry | None = Field(default=None, description="Of this key alone, beside its tenant's.")


class OperatorKeyEntry(KeyEntry):
    """A key without a tenant: metrics, docs and everyone's usage, but no generation."""

    role: Literal[Role.OPERATOR] = Field(default=Role.OPERATOR, description="Always operator.")


class TenantEntry(_Entry):
    """Someone who shares the engine: a weight, bounds, and keys."""

    id: TenantName = Field(description="Names the tenant in metrics, logs and usage reports.")
    weight: Weight = Field(
        default=1.0, description="Its share of the tokens, against the weights of the other busy tenants."
    )
    priority_class: PriorityClass = Field(
        default=PriorityClass.STANDARD,
        alias="class",
        description="Classes share the engine 8 to 4 to 1, tenants share their class by weight.",
    )
    limits: LimitsEntry = LimitsEntry()
    models: Annotated[list[Annotated[str, StringConstraints(min_length=1)]], Field(min_length=1)] | None = (
        Field(default=None, description="Models and LoRA adapters that it may use. Left out: all.")
    )
    flags: list[Flag] = Field(
        default=[],
        description="shared_prefix_cache: share prefix-cache entries with the other tenants that say so. "
        "no_preempt: never swap its requests out of the batch.",
    )
    ttft_deadline_s: Seconds | None = Field(
        default=None,
        description="Seconds to the first token after which its requests are of no use. Left out: waits.",
    )
    keys: Annotated[list[KeyEntry], BeforeValidator(_null_is_empty)] = []


class TenantsFile(_Entry):
    """Fairgate's tenants and their keys."""

    tenants: Annotated[list[TenantEntry], BeforeValidator(_null_is_empty)] = []
    operators: Annotated[list[OperatorKeyEntry], BeforeValidator(_null_is_empty)] = Field(
        default=[], description="Keys for metrics, docs and everyone's usage, without a tenant."
    )


def json_schema() -> dict[str, Any]:
    """The schema for editors, as ``config/tenants.schema.json`` holds it."""
    schema = TenantsFile.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
