"""An engine's sizes, for tests that have no engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from app.core.facts import EngineFacts

_FACTS = EngineFacts(
    vllm_version="0.32.0",
    model="tiny",
    served_names=("tiny",),
    adapters=(),
    tasks=("generate",),
    max_model_len=4096,
    slots=8,
    batched_tokens=2048,
    block_size=128,
    kv_tokens=100_000,
    kv_dtype="auto",
    ranks=1,
    load_s=1.0,
)


def facts(**changes: Any) -> EngineFacts:
    """Eight slots and a cache that is never full, unless said otherwise."""
    return replace(_FACTS, **changes)
