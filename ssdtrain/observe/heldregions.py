"""A step of regions in which the device is held around every re-run and rebuild.

[Note: a held step of regions]
Where the plain step does not fit, or goes beyond a memory limit, no step that keeps
everything can be held. Its launches would
then be taken for the device's own times, and a CUDA graph's plan would copy into time
that a replay does not have: 2.3 times the plain graph of a 1.7B model. So two more
steps run all regions again and rebuild what they can in them, as the observed one did,
which fits. Both look at the clock before and after each re-run and rebuild, and at the
beginning of each lane and of each region's forward. The first one tells how long the
host takes from one look to the next, in the other the device waits at looks for half
as long again: however slow the host is, what comes next is launched by then. What lies
between the beginnings of two regions is what the first one's forward takes. What lies
between the re-runs, without the rebuilds, is what the region's backward takes. Each is
without what two looks take that have nothing between them. A re-run by itself does not
tell of the forward: it ends with the last tensor that is saved, and in an eager step
the host is further ahead of it.

[Note: looks that were late]
The host may be interrupted, or the held step may be another one than the first. Both
clocks are known, so it shows where the device went on before the host came to the next
look. What lies there is not known then: it takes what the others say, or what the
observed step had there (`captured` in plan/replays.py).
(tests/ssdtrain/observe/test_heldregions.py)
"""

import statistics
import time
from collections import defaultdict
from collections.abc import (
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from itertools import pairwise
from typing import Any, NamedTuple, cast

from ssdtrain.cache.bypass import device_ms
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.cursor import Observer, Unobserved
from ssdtrain.cache.record import LaneCursor
from ssdtrain.cache.regioncall import REGION
from ssdtrain.observe.observer import prices
from ssdtrain.observe.plainsteps import Steps
from ssdtrain.plan.calibrate import RegionTime, rebuild_key
from ssdtrain.rebuild.clock import Clock, RebuildTime
from ssdtrain.transfer.device import Device

HOLD_MS, HOLD_FACTOR = 0.1, 1.5
"""For how long the device is held: at least, and over the host's time."""
NUM_EMPTY = 5
"""Times that nothing is timed; the least counts."""


class HeldTimes(NamedTuple):
    """What a held step told, by the names of `Corrections`."""

    rebuild_ms: Mapping[str, float]
    held_regions: Mapping[str, tuple[RegionTime, ...]]
    held_head_ms: float
    """0.0: not known."""


def held_steps(cache: TensorCache) -> Generator[None, None, HeldTimes]:
    """Run one step that is looked at, and one that is held; all regions run again in
    both. Each `yield` is one step of training."""
    clock, device = cache.ledger.clock, cache.device
    looking = HeldRegions(clock, device)
    yield from _looked_at(cache, looking)
    holds_ms = looking.holds_ms()
    empty_ms = _empty_ms(clock, device)
    held = HeldRegions(clock, device, holds_ms)
    yield from _looked_at(cache, held)
    return held.told(empty_ms)


def _looked_at(cache: TensorCache, regions: "HeldRegions") -> Steps:
    cache.cursor.observer = regions
    regions.start()
    try:
        yield
    finally:
        regions.stop()
        cache.cursor.observer = Unobserved()


def _empty_ms(clock: Clock, device: Device) -> float:
    """Return what a clock finds between two moments that nothing is between."""
    found = []
    for _ in range(NUM_EMPTY):
        device.hold(HOLD_MS)
        start = clock.now()
        found.append(clock.ms_between(start, clock.now()))
    return min(found)


class HeldRegions(Observer):
    """Looks at the clock in one step, holds the device at each look, and tells what
    took how long.

    Args:
        holds_ms: for how long, by the number of the look; at others not at all.
    """

    listens = True
    """Recipes inside a region are only looked for where somebody does."""

    def __init__(
        self,
        clock: Clock,
        device: Device,
        holds_ms: Mapping[int, float] | None = None,
    ) -> None:
        self._clock, self._device = clock, device
        self._holds_ms = holds_ms or {}
        self._looks: list[_Look] = []
        self._before: list[int] = []
        """The look before each re-run or rebuild."""
        self._behind: list[int] = []
        """The look after each."""
        self._kinds: dict[int, str] = {}
        """Of lanes, by number."""
        self._opened: dict[int, int] = {}
        """The look at the beginning of each lane, by its number."""
        self._entered: list[_Entered] = []

    def start(self) -> None:
        """Look at the clock from now on."""
        self._clock.keep_spans = True
        self._clock.before_rebuild = lambda: self._before.append(self._look())
        self._clock.after_rebuild = lambda: self._behind.append(self._look())

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._clock.keep_spans = False
        self._clock.before_rebuild = self._clock.after_rebuild = None

    def lane(self, cursor: LaneCursor, kind: str) -> None:
        """A lane begins."""
        self._kinds[cursor.number] = kind
        self._opened[cursor.number] = self._look()

    def region(self, lane: int, number: int, module: str) -> None:
        """The forward of a region begins."""
        kind = self._kinds.get(lane, "")
        self._entered.append(_Entered(lane, kind, number, self._look()))

    def _look(self) -> int:
        """Look at the clock, and hold the device; which look it is."""
        number = len(self._looks)
        host_ns, came = time.monotonic_ns(), self._clock.now()
        if number in self._holds_ms:
            self._device.hold(self._holds_ms[number])
        self._looks.append(_Look(host_ns, came, self._clock.now(), time.monotonic_ns()))
        return number

    def holds_ms(self) -> dict[int, float]:
        """Return for how long a step like this one is to be held at each look: longer
        than this one's host took to the next; empty if one re-run lay in another. Waits
        for the device."""
        if not self.is_whole:
            return {}
        return {
            number: HOLD_MS + HOLD_FACTOR * (after.host_ns - one.left_ns) / 1e6
            for number, (one, after) in enumerate(pairwise(self._looks))
        }

    @property
    def is_whole(self) -> bool:
        """Whether each re-run and rebuild has its looks: none lay in another. Waits for
        the device."""
        num_spans = len(self._clock.last_spans())
        return num_spans == len(self._before) == len(self._behind)

    def _late(self) -> Set[int]:
        """Return the looks of [Note: looks that were late]; none where the host is the
        device. Waits for the device."""
        if not self._looks or not self._device.runs_beside:
            return set()
        first = self._looks[0].begins
        since_ms = device_ms(self._clock, first)
        return {
            number
            for number, (one, after) in enumerate(pairwise(self._looks))
            if since_ms + self._clock.ms_between(first, one.begins)
            < after.host_ns / 1e6
        }

    def _ms_between(self, look: int, after: int, empty_ms: float) -> float:
        looks = self._looks
        ms = self._clock.ms_between(looks[look].begins, looks[after].came)
        return max(0.0, ms - empty_ms)

    def told(self, empty_ms: float) -> HeldTimes:
        """Return what this step told, before the next one ends. Waits for the device.

        Args:
            empty_ms: what the clock finds where there is nothing.
        """
        late, spans = self._late(), self._clock.last_spans()
        if not self.is_whole:
            spans = []
        known = [look not in late for look in self._before]
        both = list(zip(spans, known, strict=False))
        rebuilds = [span for span, told in both if told and span.recipe != REGION]
        reruns = [(span, told) for span, told in both if span.recipe == REGION]
        forwards = self._forwards_ms(late, empty_ms) if spans else ()
        return HeldTimes(
            rebuild_ms=middle_ms(rebuilds, empty_ms),
            held_regions=_region_times(
                _forwards(reruns, _least(forwards)),
                _least(self._backwards_ms(spans, late, empty_ms)),
            ),
            held_head_ms=self._head_ms(late, empty_ms),
        )

    def _head_ms(self, late: Set[int], empty_ms: float) -> float:
        """Return the time from the beginning of the first lane to its first region
        call; 0.0: not known."""
        if not self._entered or self._entered[0].lane not in self._opened:
            return 0.0
        first = self._entered[0]
        opened = self._opened[first.lane]
        return 0.0 if opened in late else self._ms_between(opened, first.look, empty_ms)

    def _forwards_ms(
        self, late: Set[int], empty_ms: float
    ) -> Iterator[tuple[Hashable, float]]:
        """Return what the forwards of region calls take up to the next one."""
        for one, after in pairwise(self._entered):
            if one.look in late:
                continue
            if one.lane == after.lane and one.number < after.number:
                own_ms = self._ms_between(one.look, after.look, empty_ms)
                yield (one.kind, REGION, one.number), own_ms

    def _backwards_ms(
        self, spans: Sequence[RebuildTime], late: Set[int], empty_ms: float
    ) -> Iterator[tuple[Hashable, float]]:
        """Return what the backwards of region calls take, without the rebuilds in
        them."""
        between = zip(spans, self._behind, self._before[1:], strict=False)
        region: Any = None
        total_ms, is_known = 0.0, True
        for number, (span, behind, before) in enumerate(between):
            if span.recipe == REGION:
                region, total_ms, is_known = span.place, 0.0, True
            total_ms += self._ms_between(behind, before, empty_ms)
            is_known = is_known and behind not in late
            if region is not None and is_known and _goes_on(region, spans[number + 1]):
                yield region, total_ms


class _Look(NamedTuple):
    """One look at the clock."""

    host_ns: int
    """When the host came there."""
    came: Any
    """When the device did."""
    begins: Any
    """When it went on: later than `came` where it was held."""
    left_ns: int
    """When the host went on."""


class _Entered(NamedTuple):
    """The forward of a region call began."""

    lane: int
    kind: str
    number: int
    look: int


def _goes_on(region: Any, after: RebuildTime) -> bool:
    """Return whether the same backward comes to an earlier region call next: after
    its last one the next forward may lie."""
    if after.recipe != REGION:
        return False
    place: Any = after.place
    return bool(place[0] == region[0] and place[2] < region[2])


def _region_times(
    forwards: Mapping[Hashable, float], backwards: Mapping[Hashable, float]
) -> dict[str, tuple[RegionTime, ...]]:
    """Return what each region call takes, by kind of lane."""
    found: defaultdict[str, dict[int, RegionTime]] = defaultdict(dict)
    for place, forward_ms in forwards.items():
        kind, _, number = cast("tuple[str, str, int]", place)
        # That of the last re-run has no end: as the others of the step.
        own = backwards.get(place, 0.0)
        found[kind][number] = RegionTime(forward_ms=forward_ms, backward_ms=own)
    return {
        kind: tuple(own[number] for number in sorted(own))
        for kind, own in found.items()
    }


def _forwards(
    every: Sequence[tuple[RebuildTime, bool]], found: Mapping[Hashable, float]
) -> dict[Hashable, float]:
    """Return what the forward of each region call that ran again takes; of one that no
    other follows, as much more than its re-run as usually; 0.0: not known.

    Args:
        every: re-runs, and whether each is known.
        found: forwards up to the next region call.
    """
    known = prices(span for span, is_known in every if is_known)
    reruns = {span.place: known.get(span.place, 0.0) for span, _ in every}
    ratios = [
        found[place] / reruns[place] for place in found if reruns.get(place, 0.0) > 0.0
    ]
    usual = statistics.median(ratios) if ratios else 1.0
    return {place: found.get(place, usual * ms) for place, ms in reruns.items()}


def _least(found: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """Return the least time of each place."""
    least: dict[Hashable, float] = {}
    for place, ms in found:
        least[place] = min(ms, least.get(place, ms))
    return least


def middle_ms(spans: Sequence[RebuildTime], empty_ms: float) -> dict[str, float]:
    """Return the middle of those that are the same, without what is no rebuild's."""
    alike: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans:
        alike[rebuild_key(span.recipe, span.num_bytes)].append(span.ms)
    return {
        key: max(0.0, statistics.median(every) - empty_ms)
        for key, every in alike.items()
    }
