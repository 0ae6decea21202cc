"""Steps without hooks, and the one that is believed.

See [Note: the plain step] in plan/calibrate.py. The steps after an observed one still
fetch memory from the driver that it gave back: two ranks' third step was 866 ms, and
all after it 660. A plan made for 866 was 1.4 times as long as it might be. So a step
counts when the one after it takes as long. The device is asked after the last one
only: after a wait for it a step starts on an idle device.
(tests/ssdtrain/observe/test_measured.py)
"""

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ssdtrain.cache.bypass import Bypass
from ssdtrain.cache.cache import TensorCache
from ssdtrain.plan.calibrate import PlainTimes
from ssdtrain.rebuild.clock import Clock

NUM_STEPS = 3
"""Of a round. The first one starts on an idle device; the others are measured."""
MOST_ROUNDS = 3
"""Where steps are never the same, as of lengths that change, the middle one counts."""
ALIKE = 0.03
"""By how much steps that take as long as one another may differ."""

Steps = Generator[None, None, None]
"""Each `yield` is one step of training."""


def in_place_of_hooks(cache: TensorCache, bypass: Bypass) -> Steps:
    """Run one step whose forwards have this around them, and no hooks."""
    cache.bypass = bypass
    try:
        yield
    finally:
        cache.bypass = None


class _Launched(NamedTuple):
    timer: Bypass
    start: Any
    end: Any


class PlainSteps:
    """Measures steps without hooks until two of them are the same."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start: Any = None
        self._launched: list[_Launched] = []
        """Of this round."""
        self._rounds: list[list[PlainTimes]] = []
        """As all ranks took them."""
        self._host_ms = float("inf")
        """The least of a forward: [Note: a host that is blocked]."""

    def begin(self, start: Any) -> Bypass:
        """Return what times the next step, which starts at this moment."""
        self._start = start
        return Bypass(self._clock)

    def ended(self, timer: Bypass, end: Any) -> None:
        """Take the step that has ended at this moment of the clock."""
        self._launched.append(_Launched(timer, self._start, end))
        self._host_ms = min(self._host_ms, timer.host_forward_ms)

    @property
    def round_is_over(self) -> bool:
        """Whether enough steps have run to ask what they took."""
        return len(self._launched) == NUM_STEPS

    def measured(self) -> list[float]:
        """End the round and return what its steps took here, as ranks exchange it: the
        longest of each counts, and of the host's lead the least. Waits for the
        device."""
        _, *launched = self._launched
        self._launched = []
        own: list[float] = []
        for timer, start, end in launched:
            times = timer.times(start, end)
            own += times.step_ms, times.forward_ms, self._host_ms, -times.host_lead_ms
        return own

    def believed(self, found: Sequence[float]) -> PlainTimes | None:
        """Take what a round's steps took, the longest of all ranks; return the plain
        step, or None: another round is needed."""
        each = iter(found)
        steps = [
            PlainTimes(step_ms, forward_ms, host_ms, -behind_ms)
            for step_ms, forward_ms, host_ms, behind_ms in zip(
                each, each, each, each, strict=True
            )
        ]
        self._rounds.append(steps)
        for both in pairwise(steps):
            least, most = sorted(both, key=lambda times: times.step_ms)
            if most.step_ms <= (1 + ALIKE) * least.step_ms:
                return least
        if len(self._rounds) < MOST_ROUNDS:
            return None
        every = sorted(times for steps in self._rounds for times in steps)
        return every[(len(every) - 1) // 2]
