"""The frontier of a run: the least predicted step at each peak."""

from typing import NamedTuple

from ssdtrain.errors import ConfigError
from ssdtrain.plan.choose import QUICK_MARKS, choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import Prediction
from ssdtrain.plan.profile import Profile

NUM_BUDGETS = 8
"""From the peak that costs nothing to the least one."""


class Point(NamedTuple):
    """One plan, as predicted."""

    overhead: float
    """Fraction of the step with everything kept."""
    peak_bytes: int


def frontier(profile: Profile, num_budgets: int = NUM_BUDGETS) -> list[Point]:
    """Return the best plan within each memory budget, the least peak last, without
    dominated ones. Each costs a quick search."""
    free, least = (_best(profile, Goal(max_overhead=most)) for most in (0.0, 1.0))
    found = [free]
    for number in range(1, num_budgets + 1):
        share = number / num_budgets
        budget = free.peak_bytes + share * (least.peak_bytes - free.peak_bytes)
        try:
            goal = Goal(memory_budget_bytes=int(budget), budget_margin=0.0)
            point = _best(profile, goal)
        except ConfigError:  # a quick search found it under the other goal alone
            point = least
        if point.peak_bytes < found[-1].peak_bytes:
            found.append(point)
    return [
        point
        for at, point in enumerate(found)
        if all(point.overhead < later.overhead for later in found[at + 1 :])
    ]


def _best(profile: Profile, goal: Goal) -> Point:
    prediction = choose(profile, goal, QUICK_MARKS).prediction
    if prediction is None:
        raise ValueError("a plan that was searched for has a prediction")
    return point_of(prediction)


def point_of(prediction: Prediction) -> Point:
    """Return the point of a plan: its overhead and its peak."""
    return Point(prediction.overhead, prediction.peak_bytes)
