"""What a request costs: the unit in which tenants' shares are counted.

Plain numbers and two functions, used by ``turns.py`` and ``forecast.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .virtual_time import UNIT

if TYPE_CHECKING:
    from ..core.record import Usage

INPUT_COST = 1
"""Cost of one uncached prompt token: the unit."""
OUTPUT_COST = 2
"""Cost of one output token. Input and output at 1:2 is what VTC's artifact and its comparisons use."""

CACHED_TICKS = UNIT // 10
"""Ticks of a prompt token found in the prefix cache: a tenth of one that must be computed."""


def cost(prompt_tokens: int, output_tokens: int) -> int:
    """The cost of a request, in uncached prompt tokens."""
    return INPUT_COST * prompt_tokens + OUTPUT_COST * output_tokens


def ticks_of(used: Usage) -> int:
    """What a request has really cost, in the fair queue's ticks."""
    computed = used.prompt_tokens - used.cached_tokens
    return cost(computed, used.completion_tokens) * UNIT + used.cached_tokens * CACHED_TICKS
