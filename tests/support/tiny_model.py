"""Tiny random models with SmolLM2's tokenizer: a real engine starts on one in half a minute.

Owns their shapes and where they lie. Called by tests that talk to a real engine; made once per machine, in
about 15 s, and the same everywhere: the seed is fixed. Never imports vllm. Serve them with
``dtype=float32``: vLLM would take bfloat16, where near ties of random weights fall as the batch falls.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from app.engine.bundled import filled_aside, read_tokenizer

VERSION = 1
"""Raise it with every change of a shape: the old ones stay in the cache under their own name."""
MAX_MODEL_LEN = 8192
"""Tokens, prompt and output together."""

_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    # Transformers' usual 0.02 makes all tokens nearly equally likely, and greedy texts a matter of rounding.
    "initializer_range": 0.2,
}


def tiny_model() -> Path:
    """A language model (Llama): random words, as deterministic as a trained one."""
    from transformers import LlamaForCausalLM

    return _made("llama", LlamaForCausalLM, tie_word_embeddings=True)


def tiny_pooling_model() -> Path:
    """An embedding model (Llama without a head, last token pooled): vectors of 128 numbers."""
    from transformers import LlamaModel

    return _made("llama-pooling", LlamaModel)


def _made(name: str, architecture: Any, **shape: Any) -> Path:
    directory = _cache() / f"tiny-{name}-v{VERSION}"
    if directory.is_dir():
        return directory
    import torch
    from transformers import LlamaConfig

    tokenizer = read_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(_SHAPE | shape),
    )
    with filled_aside(directory) as checkpoint, torch.random.fork_rng(devices=[]):
        torch.manual_seed(VERSION)
        architecture(config).save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
    return directory


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairgate-tests"
