"""The ideal that a level of the fair queue approximates: work as a fluid, divided by weight at every moment.

Generalised processor sharing (Parekh and Gallager, ToN 1993) with exact fractions and no thought of speed.
The oracle of ``test_fairness_machine.py``, which holds one for the classes and one for each class's tenants.
"""

from __future__ import annotations

from fractions import Fraction


class Fluid:
    """Divides work among those who wait, all the time. Knows nothing of requests.

    Args:
        weights: Of those who wait, by name.
    """

    def __init__(self, weights: dict[str, int]) -> None:
        self._weights = weights
        self.served = dict.fromkeys(weights, Fraction())

    def serve(self, work: int) -> None:
        """So much work is done: each gets his part."""
        total = sum(self._weights.values())
        for name, weight in self._weights.items():
            self.served[name] += Fraction(work * weight, total)
