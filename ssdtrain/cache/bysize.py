"""Plans for batches of other sizes, next to the plan in force.

[Note: plans by size]
A plan with room for the largest batch moves and rebuilds what a smaller one could keep:
in a budget of half of what the longest batch needs, one of half its length fits as it
is. So under a memory limit there are further plans of the same observed step, each with
room for batches up to some size. A lane takes the one with the least room that is
enough. Until another plan is found, those that are too large for the one in force have
one as well.

That must be known before its first tensor, so it is told by how many elements the
tensors have that the model's forward is called with: a batch is taken to be no larger
than one that was met with no fewer of them. It is a guess. The first tensor tells
whether the lane is larger than its plan has room for, and then it leaves that plan as
it would leave any ([Note: sizes]); from then on nothing is guessed any more. Where no
plan has room by that guess, a lane follows none from its beginning: its first region
comes before its first tensor. What was never met is taken to grow with its arguments.
(tests/ssdtrain/cache/test_bysize.py)
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ssdtrain.cache.sizes import SLACK
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.scaled import UpTo

MOST_MET = 512
"""Sizes that are remembered."""


class SizedPlan(NamedTuple):
    """A plan, and up to which size of its lane it is followed."""

    plan: Plan | None
    most_ratio: float
    """Over the observed one's."""
    in_force: Plan | None
    """The plan in force meanwhile: this one, or one for lanes of other sizes."""

    @property
    def is_beside(self) -> bool:
        """Whether it is not the plan in force."""
        return self.plan is not self.in_force

    @property
    def key(self) -> float:
        """Which of the plans it is, of those that there are next to one another; the
        one in force may get more room."""
        return self.most_ratio if self.is_beside else math.inf


class PlansBySize:
    """Which plan a lane follows."""

    def __init__(self) -> None:
        self._in_force: Plan | None = None
        self._plans: Sequence[SizedPlan] = ()
        self._met: list[tuple[int, float]] = []
        """Elements of arguments, and the ratio of the lane's size to the observed
        one's; in order."""
        self.is_trusted = True
        """Whether arguments tell of a lane's size."""

    @property
    def ratios(self) -> list[float]:
        """Of the lanes that were met, one for each number of elements."""
        return [ratio for _, ratio in self._met]

    @property
    def most_elements(self) -> int:
        """Of the arguments of lanes no larger than the observed one; 0: they do not
        tell of a lane's size."""
        usual = (number for number, ratio in self._met if ratio <= 1.0 + SLACK)
        return max(usual, default=0) if self.is_trusted else 0

    def observed(self) -> None:
        """Ratios are to another step from now on."""
        self._met.clear()
        self.leave()

    def leave(self) -> None:
        """Let all lanes follow the plan in force."""
        self._plans = ()

    def follow(self, in_force: Plan | None, plans: Iterable[UpTo]) -> None:
        """Let lanes follow these next to the plan in force, or without one."""
        self._in_force = in_force
        ordered = sorted(plans, key=lambda each: each.ratio)
        self._plans = [SizedPlan(plan, ratio, in_force) for ratio, plan in ordered]

    def note(self, num_elements: int, ratio: float) -> None:
        """A lane with so many elements of arguments had this size."""
        if num_elements <= 0:
            return
        at = bisect_left(self._met, (num_elements, 0.0))
        if at < len(self._met) and self._met[at][0] == num_elements:
            self._met[at] = num_elements, max(ratio, self._met[at][1])
        elif len(self._met) < MOST_MET:
            insort(self._met, (num_elements, ratio))

    def misled(self) -> None:
        """A lane was larger than its arguments told."""
        self.is_trusted = False

    def of(self, plan: Plan | None, most_ratio: float, num_elements: int) -> SizedPlan:
        """Return what a lane follows while `plan` is in force, with so much room; no
        plan, if none has room for it."""
        if plan is None:
            most_ratio = math.inf  # everything leaves, or runs again
        usual = SizedPlan(plan, most_ratio, plan)
        if num_elements <= 0 or not self._met or not self.is_trusted:
            return usual
        most = most_ratio * (1 + SLACK)
        at = bisect_left(self._met, (num_elements, 0.0))
        if at < len(self._met):
            ratio = self._met[at][1]
            beside = self._plans if plan is self._in_force else ()
            may = [each for each in beside if ratio <= each.most_ratio]
        else:
            most_elements, met_ratio = self._met[-1]
            ratio, may = met_ratio * num_elements / most_elements, []
        if ratio <= most:
            may.append(usual)
        if may:
            return min(may, key=lambda each: each.most_ratio)
        fitting = max((number for number, each in self._met if each <= most), default=0)
        # Where lanes with as many elements differ, these do not tell.
        tells = 0 < fitting < num_elements
        return SizedPlan(None, math.inf, plan) if tells else usual
