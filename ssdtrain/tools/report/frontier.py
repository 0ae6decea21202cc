"""The frontier of a run: the least predicted peak at each overhead."""

from collections.abc import Sequence
from typing import NamedTuple

from ssdtrain.plan.choose import QUICK_MARKS, choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import Prediction
from ssdtrain.plan.profile import Profile

PRICES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Values of `max_overhead`."""


class Point(NamedTuple):
    """One plan, as predicted."""

    overhead: float
    """Fraction of the step with everything kept."""
    peak_bytes: int


def frontier(profile: Profile, prices: Sequence[float] = PRICES) -> list[Point]:
    """Return the best plan at each overhead, largest last, without dominated ones.

    Args:
        profile: an observed step.
        prices: values of `max_overhead`. Each costs a quick search.
    """
    found: list[Point] = []
    for price in sorted(prices):
        goal = Goal(max_overhead=price)
        prediction = choose(profile, goal, QUICK_MARKS).prediction
        if prediction is None:
            continue
        point = point_of(prediction)
        if not found or point.peak_bytes < found[-1].peak_bytes:
            found.append(point)
    return found


def point_of(prediction: Prediction) -> Point:
    """Return the point of a plan: its overhead and its peak."""
    return Point(prediction.overhead, prediction.peak_bytes)
