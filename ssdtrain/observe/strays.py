"""Steps that save other tensors than their plan expects.

(tests/ssdtrain/observe/test_trials.py)
"""

FIRST_PAUSE_STEPS = 4
SERVED_STEPS = 10
"""In a row, after which a plan was of use."""


class Strays:
    """Says when to observe a step again. Two equal steps in being other are a new
    shape, not one odd batch; after each time the next one comes twice as late."""

    def __init__(self) -> None:
        self.has_served = False
        """Whether steps in a row were as the plan in force expects."""
        self._in_a_row = self._num_alike = 0
        self._pause = FIRST_PAUSE_STEPS
        self._wait = 0

    def planned(self) -> None:
        """Another plan is in force."""
        self._in_a_row = self._num_alike = 0
        self.has_served = False

    def step(self, num_strayed: int) -> bool:
        """Count a step; return whether to observe the next one.

        Args:
            num_strayed: lanes that saved other tensors than the plan expects.
        """
        self._wait = max(0, self._wait - 1)
        self._in_a_row = self._in_a_row + 1 if num_strayed else 0
        self._num_alike = 0 if num_strayed else self._num_alike + 1
        self.has_served |= self._num_alike == SERVED_STEPS
        if self._in_a_row < 2 or self._wait:
            return False
        self._wait = self._pause
        self._pause *= 2
        return True
