"""What steps take, from the start of one to that of the next.

(tests/ssdtrain/observe/test_trials.py)
"""

from collections import deque
from typing import Any

from ssdtrain.cache.cache import TensorCache

MOST_STEPS = 16
"""Steps that are remembered."""


class StepTimes:
    """Times of steps that follow one plan, or none."""

    def __init__(self, cache: TensorCache) -> None:
        self._cache = cache
        self._starts: deque[Any] = deque(maxlen=MOST_STEPS + 1)
        self._are_alike: deque[bool] = deque(maxlen=MOST_STEPS)
        """Of each step that has ended, whether it had the plan's sizes."""
        self.num_steps = 0
        """That have ended since the last restart."""

    def restart(self) -> None:
        """The steps after this one are not like those before it."""
        self._starts.clear()
        self._are_alike.clear()
        self.num_steps = 0

    def step_starts(self) -> None:
        """A step starts, and the one before has ended."""
        cursor = self._cache.cursor
        if self._starts:
            self._are_alike.append(not (cursor.num_resized or cursor.num_beside))
            self.num_steps += 1
        self._starts.append(self._cache.ledger.clock.now())

    def ended_ms(self, num_new: int = 0) -> list[float]:
        """Return what the steps with the plan's sizes took, without the first ones
        since the last restart. Waits for the device."""
        starts, clock = list(self._starts), self._cache.ledger.clock
        first = self.num_steps - len(self._are_alike)
        return [
            clock.ms_between(start, end)
            for number, (start, end, is_alike) in enumerate(
                zip(starts, starts[1:], self._are_alike, strict=False), first
            )
            if is_alike and number >= num_new
        ]
