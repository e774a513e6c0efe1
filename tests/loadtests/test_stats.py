"""The reports' arithmetic."""

from __future__ import annotations

from statistics import median

import pytest

from loadtests.stats import added, bootstrap, quantile, ratio


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.25, 1.75), (1.0, 4.0)])
def test_quantile_lies_between_its_neighbours_in_proportion(q: float, expected: float) -> None:
    """Also when the values come unsorted."""
    assert quantile([4.0, 1.0, 3.0, 2.0], q) == expected


def test_no_value_has_no_quantile() -> None:
    """Nor an estimate."""
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="no samples"):
        bootstrap([], median)


def test_ratio_is_taken_within_each_round() -> None:
    """A slow round of both servers does not count for either."""
    estimate = ratio([(100.0, 90.0), (10.0, 9.0), (1000.0, 900.0)])
    assert estimate.value == estimate.low == estimate.high == pytest.approx(0.9)


def test_added_time_is_the_difference_of_the_medians() -> None:
    """One slow answer moves neither."""
    assert added([(10.0, 11.0), (12.0, 13.0), (11.0, 400.0)]).value == pytest.approx(2.0)


def test_interval_holds_the_value_and_narrows_with_more_samples() -> None:
    """And is the same every time."""
    few = bootstrap([float(i % 10) for i in range(20)], median)
    many = bootstrap([float(i % 10) for i in range(2000)], median)
    assert few.low <= few.value <= few.high
    assert many.high - many.low < few.high - few.low
    assert few == bootstrap([float(i % 10) for i in range(20)], median)
