"""Whether steps stay within a memory limit.

[Note: measured peaks]
A plan's peak is predicted from times: where a copy ends later than it should, or a
drive is too slow, something stays longer. So under a memory limit the allocator's
maximum at the end of each backward is compared with the limit. A step that used up half
of what plans leave free went beyond; by how much it did, the next plan leaves more
room. The maximum is the user's as well: it is started again only where a higher one of
before would hide the step's own.

[Note: retries]
An allocator that cannot serve a request waits for the device, gives back what it
caches, and tries again: the step goes on, but late, and a step that is a little larger
would end there. So a plan under which that happens leaves too little free, with or
without a limit; the next one leaves as much more as the reserve is. Where that is not
enough, the third leaves what the observed step had reserved beyond what it needed at
once: a step like it fits without a retry. The first steps under a plan do not count:
they begin with what the steps before have left.
(tests/ssdtrain/observe/test_peaks.py)
"""

from ssdtrain.cache.ledger import Ledger
from ssdtrain.plan.goal import Goal
from ssdtrain.transfer.device import Device, is_timed_step

ENOUGH = 4
"""Steps that tell whether most of them need a retry."""


class PeakWatch:
    """Compares the peaks of steps that follow a plan with a limit."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self._num_steps = 0
        """Since the plan was taken."""

    def planned(self) -> None:
        """Another plan is followed from now on."""
        self._num_steps = 0
        self._ledger.watches_peaks = True

    def step(self, goal: Goal, is_alike: bool) -> int:
        """Count the start of a step.

        Args:
            goal: with a memory limit.
            is_alike: whether the step before had sizes that the plan has room for.

        Returns:
            By how many bytes the step before went beyond the limit; 0 if it did not, or
            nobody can tell.
        """
        self._num_steps += 1
        start, end = self._ledger.levels
        if start is None or end is None:
            return 0
        was_higher = goal.beyond(start.max_allocated_bytes, start.allocated_bytes) > 0
        if was_higher and is_timed_step(self._num_steps):
            self._device.reset_peak()
        # The first one frees what the plan before has left.
        if was_higher or not is_alike or self._num_steps <= 2:
            return 0
        return goal.beyond(end.max_allocated_bytes, start.allocated_bytes)


class RetryWatch:
    """Sees whether the allocator had to empty its cache: [Note: retries]."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._num_steps = 0
        """Since the plan was taken."""
        self._first = 0, 0
        """Steps and retries when a look last saw no new ones."""
        self._last: tuple[int, int] | None = None
        """In the last look."""

    def planned(self) -> None:
        """Another plan is followed from now on."""
        self._num_steps, self._last = 0, None

    def step(self, *, grows: bool) -> bool:
        """Count the start of a step; whether the allocator had to try again since the
        last look, with the same plan.

        Args:
            grows: whether segments do: then, whether most steps make it do so.
        """
        self._num_steps += 1
        if self._num_steps <= 2 or not is_timed_step(self._num_steps):
            return False
        memory = self._device.memory()
        if memory is None:
            return False
        now = self._num_steps, memory.num_retries
        # Fewer: the user's program has set the allocator's counts to zero.
        if self._last is None or memory.num_retries <= self._last[1]:
            self._first = self._last = now
            return False
        self._last = now
        steps, retries = (now[n] - self._first[n] for n in range(2))
        return not grows or (steps >= ENOUGH and 2 * retries > steps)
