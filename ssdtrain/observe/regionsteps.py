"""Steps in which all regions run again, and the one that is believed.

See [Note: the step of regions] in plan/calibrate.py. One such step may have waited for
what is over after it (pinned memory, a kernel's first run, another process): the keep
step of a 1.7B model was once believed 26 % too long for that, and a plan that was
chosen for it ran to the end. So a few are measured, and nothing is asked of the device
until the last one has run: after a wait for it a step starts on an idle device.

Where batches change their length none may be as long as the observed one. A plan is
made in the observed step's times, and its growth is by them, so a longer step's are
shortened by how much more it saved (`Growth.times_longer`): times of 5365 tokens were
once taken for those of 2379, and a plan for 7113, predicted at 3.2 times the plain
step, moved so much that steps took 1.9 times as long. The host launches as much for any
length.

[Note: how times grow]
Steps of different lengths also tell which part of their time grows (`fixed_share`).
Asked are their backwards, in which all forwards run once more: hooks make the first
ones as long as the host takes. Waits for copies are left out, and what comes after
backward, which no plan scales. Steps before count as well, until one that saves other
tensors is observed. One share holds for all operators and rebuilds: none of them is
measured by itself at two sizes.
(tests/ssdtrain/observe/test_measured.py)
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ssdtrain.cache.bypass import Bypass
from ssdtrain.cache.cursor import Observer
from ssdtrain.cache.record import LaneCursor
from ssdtrain.observe.hosttime import HostMeter
from ssdtrain.plan.calibrate import PlainTimes, RegionTimes
from ssdtrain.plan.scaled import FIXED_SHARE, Growth, StepTime, fixed_share
from ssdtrain.rebuild.clock import RebuildTime
from ssdtrain.transfer.device import Stalled

ALIKE = 0.01
"""Bytes saved in two steps that differ by less are of equal batches."""
MOST_TIMES = 32
"""Steps that are remembered."""


class Backwards:
    """Times of backwards, of steps of different sizes: [Note: how times grow]."""

    def __init__(self) -> None:
        self._steps: deque[StepTime] = deque(maxlen=MOST_TIMES)

    def note(self, step: StepTime) -> None:
        """One more was measured."""
        self._steps.append(step)

    def clear(self) -> None:
        """Steps are of another program from now on."""
        self._steps.clear()

    def fixed_share(self, num_bytes: int) -> float:
        """Return the part that does not grow, for a step that saves so many bytes."""
        found = fixed_share(self._steps, num_bytes)
        return FIXED_SHARE if found is None else found


class Reruns(Observer):
    """Regions that run again in one step: what they take the host, and when the last
    one has ended. In the observed step recipes are looked for inside of them, which
    takes the host as long again.

    Args:
        moment: a moment of the device.
    """

    hears_reruns = True

    def __init__(
        self, moment: Callable[[], Any], now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.spent_ns: dict[tuple[str, int], int] = {}
        """By kind of lane and number of the region call: the longest of the step."""
        self.ended: Any = None
        """When the last re-run so far had ended: a moment; None: none has."""
        self._moment = moment
        self._now = now
        self._kinds: list[str] = []
        self._since_ns = 0
        self._ended_ns: int | None = None
        """The same, by the host."""

    def lane(self, cursor: LaneCursor, kind: str) -> None:
        """Note the kind of a new lane."""
        self._kinds.append(kind)

    def runs_again(self) -> None:
        """Note when a region's forward runs again."""
        self._since_ns = self._now()

    def ran_again(self, lane: int, number: int) -> None:
        """Note what it took."""
        if lane >= len(self._kinds):
            return  # of a step before
        place = self._kinds[lane], number
        self._ended_ns = self._now()
        took_ns = self._ended_ns - self._since_ns
        self.spent_ns[place] = max(took_ns, self.spent_ns.get(place, 0))
        self.ended = self._moment()

    def host_behind_ms(self) -> float | None:
        """Return the host's time since the last re-run has ended; None: there was
        none."""
        if self._ended_ns is None:
            return None
        return (self._now() - self._ended_ns) / 1e6


def least_host_ms(
    steps: Sequence[Mapping[tuple[str, int], int]], place: tuple[str, int]
) -> float:
    """Return what the region call took the host at least, of these steps; 0: in none.
    One that was blocked by a device far after took longer."""
    found = [spent[place] for spent in steps if place in spent]
    return min(found, default=0) / 1e6


class RegionStep(NamedTuple):
    """One such step that has been launched."""

    timer: Bypass
    start: Any
    """The end of the step before: a moment of the clock."""
    end: Any
    spans: Callable[[], list[RebuildTime]]
    """Its re-runs and rebuilds; calling it waits for the device."""
    stalls: Callable[[], Stalled] | None
    meter: HostMeter | None
    num_bytes: int
    """Saved for backward."""
    reruns: Reruns | None = None
    tail_host_ms: float | None = None
    """Host time from the last re-run to the next step; None: not known."""

    def times(self) -> RegionTimes:
        """Wait for the device and return what the step took."""
        stalled = Stalled(0.0, 0.0) if self.stalls is None else self.stalls()
        return RegionTimes(
            step=self.timer.times(self.start, self.end),
            rerun_ms=sum(span.ms for span in self.spans()),
            stall_ms=stalled.ms,
            stall_out_ms=stalled.out_ms,
        )

    def behind_ms(self, num_bytes: int, growth: Growth) -> float:
        """Wait for the device and return its time after the last re-run; infinite if
        it is not known, of a step that saves so many bytes."""
        ended = None if self.reruns is None else self.reruns.ended
        if ended is None or self.factor(num_bytes, growth) != 1.0:
            return math.inf
        return self.timer.ms_between(ended, self.end)

    def backward(self, tail_ms: float) -> StepTime:
        """Wait for the device and return what its backward took: [Note: how times
        grow].

        Args:
            tail_ms: after backward.
        """
        times = self.times()
        waits_ms = times.stall_ms - times.stall_out_ms
        ms = times.step.step_ms - times.step.forward_ms - waits_ms - tail_ms
        return StepTime(self.num_bytes, ms)

    def plain(self, num_bytes: int, growth: Growth) -> PlainTimes:
        """Wait for the device and return what a step that saves so many bytes takes if
        it keeps everything."""
        found, factor = self.times().plain(), self.factor(num_bytes, growth)
        return found._replace(
            step_ms=found.step_ms * factor, forward_ms=found.forward_ms * factor
        )

    def factor(self, num_bytes: int, growth: Growth) -> float:
        """Return a step's times over this one's, for a step that saves so many bytes;
        1.0 where they are the same.

        Args:
            growth: of that step.
        """
        if abs(self.num_bytes - num_bytes) <= ALIKE * num_bytes or not num_bytes:
            return 1.0
        return 1.0 / growth.times_longer(self.num_bytes / num_bytes)


def fastest(steps: Sequence[RegionStep], num_bytes: int) -> RegionStep:
    """Return the step that has the least left without its re-runs and stalls, of those
    whose batches are the nearest to one that saves so many bytes. Waits for the
    device."""
    off = [abs(step.num_bytes - num_bytes) for step in steps]
    limit = min(off) + ALIKE * num_bytes
    alike = [step for step, each in zip(steps, off, strict=True) if each <= limit]
    return min(alike, key=lambda step: step.times().plain().step_ms)
