"""A step of regions in which the device is held around every re-run and rebuild.

[Note: a held step of regions]
Where the plain step does not fit, or goes beyond a memory limit, no step that keeps
everything can be held ([Note: a step that is held] in paced.py). Its launches would
then be taken for the device's own times, and a CUDA graph's plan would copy into time
that a replay does not have: 2.3 times the plain graph of a 1.7B model. So one more step
runs all regions again and rebuilds what it can in them, as the observed one did, which
fits. The device waits before each of these until they are launched, and behind each
until the operators up to the next one are: a re-run tells what a forward takes, and
what lies between the re-runs, without the rebuilds, what the region's backward does.
(tests/ssdtrain/observe/test_heldregions.py)
"""

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, cast

from ssdtrain.cache.course import Observer
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
        self._came: list[Any] = []
        """When the device came to each re-run or rebuild."""
        self._resumed: list[Any] = []
        """When it went on behind each."""

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
        forward = prices(each for each in spans if each.recipe == REGION)
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
    """Return the longest time that the host may take from one hold to the next: of a
    rebuild, or of a region's forward or backward."""
    backward: defaultdict[tuple[int, int], float] = defaultdict(float)
    for mark in seen.marks:
        region = seen.items_of(mark.lane)[mark.item].region
        if mark.phase is not Phase.FORWARD and region >= 0:
            backward[mark.lane, region] += mark.ms
    rebuilds = (item.recipe_ms for items in seen.kinds.values() for item in items)
    reruns = (run.ms for runs in seen.regions.values() for run in runs)
    return max([*rebuilds, *reruns, *backward.values()], default=0.0)
