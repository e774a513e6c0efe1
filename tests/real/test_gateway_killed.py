"""The end of the pooling engine, and so the last test on it: ``kill -9`` of its gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.gateway import eventually

if TYPE_CHECKING:
    from tests.support.gateway import Gateway


def test_engine_ends_with_its_gateway(pooling: Gateway) -> None:
    """Core and workers are gone within 5 s, though nobody told them."""
    titles = list(pooling.processes().values())
    assert any(title.startswith("VLLM::EngineCore") for title in titles)
    assert any(title.startswith("VLLM::Worker") for title in titles)
    pooling.process.kill()
    pooling.exit_code(within_s=5)
    eventually(lambda: not pooling.processes(), 5)
