"""A step of regions in which the device is held around every re-run and rebuild.

[Note: a held step of regions]
Where the plain step does not fit, or goes beyond a memory limit, no step that keeps
everything can be held ([Note: a step that is held] in paced.py). Its launches would
then be taken for the device's own times, and a CUDA graph's plan would copy into time
that a replay does not have: 2.3 times the plain graph of a 1.7B model. So one more step
runs all regions again and rebuilds what it can in them, as the observed one did, which
fits. The device waits before each of these until they are launched, and behind each
until the operators up to the next one are, and at the beginning of each region's
forward until that is: what lies between the beginnings of two regions is what the first
one's forward takes, and what lies between the re-runs, without the rebuilds, what the
region's backward does. A re-run by itself does not tell of the forward: it ends with
the last tensor that is saved, and in an eager step the host is further ahead of it.
(tests/ssdtrain/observe/test_heldregions.py)
"""

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

from ssdtrain.cache.course import Observer
from ssdtrain.cache.record import LaneCourse
from ssdtrain.cache.regions import REGION
from ssdtrain.observe.observer import prices
from ssdtrain.observe.paced import HOLD_FACTOR, HOLD_MS
from ssdtrain.plan.calibrate import RegionTime, rebuild_key
from ssdtrain.plan.profile import Phase, Profile
from ssdtrain.remat.budget import Span
from ssdtrain.remat.clock import Clock
from ssdtrain.transfer.device import Device


class HeldRegions(Observer):
    """Holds the device in one step, and tells what took how long.

    Args:
        seen: the observed step; how long its parts took is how far ahead to be.
    """

    listens = True
    """Recipes inside a region are only looked for where somebody does."""

    def __init__(self, clock: Clock, device: Device, seen: Profile) -> None:
        self._clock, self._device = clock, device
        self._hold_ms = HOLD_MS + HOLD_FACTOR * longest_ms(seen)
        forward_ms = longest_half_ms(seen, Phase.FORWARD)
        self._forward_hold_ms = HOLD_MS + HOLD_FACTOR * forward_ms
        self._came: list[Any] = []
        """When the device came to each re-run or rebuild."""
        self._resumed: list[Any] = []
        """When it went on behind each."""
        self._kinds: dict[int, str] = {}
        """Of lanes, by number."""
        self._entered: list[_Entered] = []

    def start(self) -> None:
        """Hold the device from now on."""
        self._clock.keep_spans = True
        self._clock.before_rebuild, self._clock.after_rebuild = (
            self._before,
            self._after,
        )

    def stop(self) -> None:
        """Hold it no more. Idempotent."""
        self._clock.keep_spans = False
        self._clock.before_rebuild = self._clock.after_rebuild = None

    def lane(self, course: LaneCourse, kind: str) -> None:
        """A lane begins."""
        self._kinds[course.number] = kind

    def region(self, lane: int, number: int, module: str) -> None:
        """The forward of a region begins."""
        came = self._clock.now()
        self._device.hold(self._forward_hold_ms)
        kind = self._kinds.get(lane, "")
        self._entered.append(_Entered(lane, kind, number, came, self._clock.now()))

    def _before(self) -> None:
        self._came.append(self._clock.now())
        self._device.hold(self._hold_ms)

    def _after(self) -> None:
        self._device.hold(self._hold_ms)
        self._resumed.append(self._clock.now())

    def rebuild_ms(self, empty_ms: float) -> dict[str, float]:
        """Return the time of each rebuild, by `rebuild_key`; waits for the device.

        Args:
            empty_ms: what the clock finds where there is nothing.
        """
        return middle_ms(
            [each for each in self._clock.last_spans() if each.recipe != REGION],
            empty_ms,
        )

    def region_times(self) -> dict[str, tuple[RegionTime, ...]]:
        """Return what each region call takes, by kind of lane; empty if one re-run lay
        in another. Waits for the device."""
        spans, ms = self._clock.last_spans(), self._clock.ms_between
        if not len(spans) == len(self._came) == len(self._resumed):
            return {}
        forward = self._forwards(
            prices(each for each in spans if each.recipe == REGION)
        )
        backward: defaultdict[Hashable, list[float]] = defaultdict(list)
        between = zip(spans, self._resumed, self._came[1:], strict=False)
        region: Any = None
        total_ms = 0.0
        for number, (span, resumed, came) in enumerate(between):
            if span.recipe == REGION:
                region, total_ms = span.place, 0.0
            total_ms += ms(resumed, came)
            if region is not None and _goes_on(region, spans[number + 1]):
                backward[region].append(total_ms)
        found: defaultdict[str, dict[int, RegionTime]] = defaultdict(dict)
        for place, forward_ms in forward.items():
            kind, _, number = cast("tuple[str, str, int]", place)
            # That of the last re-run has no end: as the others of the step.
            own = min(backward[place], default=0.0)
            found[kind][number] = RegionTime(forward_ms=forward_ms, backward_ms=own)
        return {
            kind: tuple(own[number] for number in sorted(own))
            for kind, own in found.items()
        }

    def _forwards(self, reruns: Mapping[Hashable, float]) -> dict[Hashable, float]:
        """Return what the forward of each region call that ran again takes; of one that
        no other follows, as much more than its re-run as usually."""
        entered: defaultdict[Hashable, list[float]] = defaultdict(list)
        for one, after in pairwise(self._entered):
            if one.lane == after.lane and one.number < after.number:
                own_ms = self._clock.ms_between(one.begins, after.came)
                entered[one.kind, REGION, one.number].append(own_ms)
        found = {place: min(each) for place, each in entered.items()}
        known = [place for place in found if reruns.get(place, 0.0) > 0.0]
        ratios = [found[place] / reruns[place] for place in known]
        usual = statistics.median(ratios) if ratios else 1.0
        return {place: found.get(place, usual * ms) for place, ms in reruns.items()}


class _Entered(NamedTuple):
    """The forward of a region call began."""

    lane: int
    kind: str
    number: int
    came: Any
    """When the device had come there."""
    begins: Any
    """When it went on."""


def _goes_on(region: Any, after: Span) -> bool:
    """Return whether the same backward comes to an earlier region call next: behind
    its last one the next forward may lie."""
    if after.recipe != REGION:
        return False
    place: Any = after.place
    return bool(place[0] == region[0] and place[2] < region[2])


def middle_ms(spans: Sequence[Span], empty_ms: float) -> dict[str, float]:
    """Return the middle of those that are alike, without what is no rebuild's."""
    alike: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans:
        alike[rebuild_key(span.recipe, span.num_bytes)].append(span.ms)
    return {
        key: max(0.0, statistics.median(every) - empty_ms)
        for key, every in alike.items()
    }


def longest_ms(seen: Profile) -> float:
    """Return the longest time that the host may take from one hold in backward to the
    next: of a rebuild, or of a region's re-run or backward."""
    rebuilds = (item.recipe_ms for items in seen.kinds.values() for item in items)
    reruns = (run.ms for runs in seen.regions.values() for run in runs)
    return max([*rebuilds, *reruns, longest_half_ms(seen, Phase.BACKWARD)])


def longest_half_ms(seen: Profile, phase: Phase) -> float:
    """Return the longest time of a region's forward or backward."""
    halves: defaultdict[tuple[int, int], float] = defaultdict(float)
    for mark in seen.marks:
        region = seen.items_of(mark.lane)[mark.item].region
        if mark.phase is phase and region >= 0:
            halves[mark.lane, region] += mark.ms
    return max(halves.values(), default=0.0)
