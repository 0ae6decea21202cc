"""What held steps of regions told, each of which was held in a part of them.

[Note: a held step of regions] in heldregions.py says what their looks tell, and which
of them are not known. Here those of all parts are taken together.
(tests/ssdtrain/observe/test_heldregions.py)
"""

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from ssdtrain.observe.observer import prices
from ssdtrain.plan.calibrate import RegionTime, rebuild_key
from ssdtrain.rebuild.clock import RebuildTime


class HeldPart(NamedTuple):
    """What one of these steps told."""

    head_ms: float
    """Up to the first region call; 0.0: not known."""
    rebuilds: list[RebuildTime]
    """That are known."""
    reruns: list[tuple[RebuildTime, bool]]
    """All, and whether each is known."""
    forwards: list[tuple[Hashable, float]]
    """Up to the next region call, by place."""
    backwards: list[tuple[Hashable, float]]
    """The same, without the rebuilds in them."""


class HeldTimes(NamedTuple):
    """What all of them told, by the names of `Corrections`."""

    rebuild_ms: Mapping[str, float]
    held_regions: Mapping[str, tuple[RegionTime, ...]]
    held_head_ms: float


def held_times(parts: Sequence[HeldPart], empty_ms: float) -> HeldTimes:
    """Return what the parts told together.

    Args:
        empty_ms: what the clock finds where there is nothing.
    """
    heads_ms = [part.head_ms for part in parts if part.head_ms > 0.0]
    spans = [span for part in parts for span in part.rebuilds]
    return HeldTimes(
        rebuild_ms=middle_ms(spans, empty_ms),
        held_regions=_region_times(parts),
        held_head_ms=min(heads_ms, default=0.0),
    )


def _region_times(parts: Sequence[HeldPart]) -> dict[str, tuple[RegionTime, ...]]:
    """Return what each region call takes, by kind of lane."""
    forwards = _forwards(parts)
    backwards = _least(each for part in parts for each in part.backwards)
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


def _forwards(parts: Sequence[HeldPart]) -> dict[Hashable, float]:
    """Return what the forward of each region call that ran again takes; of one that no
    other follows, as much more than its re-run as usually; 0.0: not known."""
    every = [each for part in parts for each in part.reruns]
    known = prices(span for span, is_known in every if is_known)
    reruns = {span.place: known.get(span.place, 0.0) for span, _ in every}
    found = _least(each for part in parts for each in part.forwards)
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
