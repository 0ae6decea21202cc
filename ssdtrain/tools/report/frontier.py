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
    dominated ones.

    Args:
        profile: an observed step.
        num_budgets: below the peak that costs nothing. Each costs a quick search.
    """
    free, least = (
        choose(profile, Goal(max_overhead=overhead), QUICK_MARKS).prediction
        for overhead in (0.0, 1.0)
    )
    assert free is not None and least is not None  # choose predicts
    found = [point_of(free)]
    for number in range(1, num_budgets + 1):
        share = number / num_budgets
        budget = free.peak_bytes + share * (least.peak_bytes - free.peak_bytes)
        goal = Goal(memory_budget_bytes=int(budget), budget_margin=0.0)
        try:
            prediction = choose(profile, goal, QUICK_MARKS).prediction
        except ConfigError:  # what a limit in time may hide: none fits by memory
            prediction = least
        if prediction is not None and prediction.peak_bytes < found[-1].peak_bytes:
            found.append(point_of(prediction))
    return found


def point_of(prediction: Prediction) -> Point:
    """Return the point of a plan: its overhead and its peak."""
    return Point(prediction.overhead, prediction.peak_bytes)
