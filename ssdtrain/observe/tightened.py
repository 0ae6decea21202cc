"""The goal, tighter each time that steps go beyond it.

(tests/ssdtrain/observe/test_peaks.py)
"""

from dataclasses import replace

from ssdtrain.plan.goal import Goal

MOST_TIGHTENED = 4
"""Plans that leave more room under a limit than the one before."""


class Tightened:
    """What plans are judged by now. One limit for memory and time: each plan is a
    search, and a long step where it is taken."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self._num = 0

    @property
    def was(self) -> bool:
        """Whether steps went beyond it."""
        return self._num > 0

    @property
    def can_be(self) -> bool:
        """Whether it may get tighter."""
        return self._num < MOST_TIGHTENED

    def tighten(self, goal: Goal) -> None:
        """Plans are judged by this from now on; steps went beyond what was before."""
        self._num += 1
        self.goal = goal

    def fit(self, capacity_bytes: int | None, torn_bytes: int) -> None:
        """This is what the device holds, and what blocks that are torn take of it."""
        self.goal = replace(
            self.goal, capacity_bytes=capacity_bytes, torn_bytes=torn_bytes
        )
