"""What the engine says about itself. Made by ``engine/launch.py``; read by all above it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A loaded engine's sizes, as resolved by vLLM (not as asked for)."""

    vllm_version: str
    model: str
    served_names: tuple[str, ...]
    adapters: tuple[str, ...]
    """LoRA names served beside the base model."""
    tasks: tuple[str, ...]
    max_model_len: int
    """Tokens, prompt and output together."""
    slots: int
    """Sequences per step and rank (``max_num_seqs``)."""
    batched_tokens: int
    """Tokens per step and rank (``max_num_batched_tokens``)."""
    block_size: int
    """Tokens per KV block."""
    kv_tokens: int
    """Tokens that the KV cache of one rank holds; 0 for a model without one (many pooling models)."""
    kv_dtype: str
    ranks: int
    """Data-parallel ranks."""
    load_s: float
    """Seconds from the start of the load to the first token."""
    steps_behind: int = 1
    """Steps until a request that has been sent is seen in the signals: 2 with async scheduling."""


@dataclass(frozen=True, slots=True)
class EngineSignals:
    """One engine step of one data-parallel rank, as its scheduler saw it. Made once a step."""

    rank: int
    at_s: float
    """Monotonic clock of the gateway, seconds, when the step's results arrived."""
    running: int
    """Sequences in the batch."""
    waiting: int
    """Requests in the engine's own waiting list."""
    kv_usage: float
    """Share of the KV blocks in use, 0 to 1."""
    prefill_tokens: int
    """Prompt tokens computed in the step."""
    decode_tokens: int
    """Output tokens made in the step."""
    preempted: int
    """Requests that the engine itself put back for want of KV blocks."""
