"""The arithmetic of the reports: quantiles, and estimates with a 95 % interval.

Called by the scenarios. Intervals are percentile bootstraps (Efron 1979): resample, compute the
statistic again, take the middle 95 %. Nothing is assumed of the distribution, and pairs stay pairs.
The seed is fixed, so that the same measurements always give the same report.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
Pair = tuple[float, float]

_RESAMPLES = 1000
_TAIL = 0.025


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the ends of its 95 % interval, all in the unit of the value."""

    value: float
    low: float
    high: float


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q``-quantile, between the neighbours in proportion.

    Raises:
        ValueError: There is no value.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def bootstrap(samples: Sequence[T], statistic: Callable[[Sequence[T]], float]) -> Estimate:
    """The statistic of the samples, and its interval.

    Raises:
        ValueError: There is no sample.
    """
    if not samples:
        raise ValueError("no samples")
    draw = random.Random(0)
    values = [statistic(draw.choices(samples, k=len(samples))) for _ in range(_RESAMPLES)]
    return Estimate(statistic(samples), quantile(values, _TAIL), quantile(values, 1 - _TAIL))


def ratio(pairs: Sequence[Pair]) -> Estimate:
    """Median over the pairs of second to first: what two servers did in the same round."""
    return bootstrap(pairs, lambda some: median(b / a for a, b in some))


def added(pairs: Sequence[Pair]) -> Estimate:
    """Median of the seconds, less median of the firsts."""
    return bootstrap(pairs, lambda some: median(b for _, b in some) - median(a for a, _ in some))
