"""Ranks that wait for each other inside every layer follow one plan.

[Note: agreement]
Ranks of a tensor-parallel or sharded model meet in every layer, so a wait of one is a
wait of all: two plans that wait at different places cost both. The profiles of such
ranks differ in their times only; merged to the slowest of each, and with a search that
reads no clock, they give the same plan everywhere. Links need no other division: every
rank observes the same step, in which all of them copy, so a link that they share is
already measured at this rank's part of it. Stages of a pipeline never merge: the first
holds more micro-batches and has other gaps in its time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ssdtrain.curves import Curve, Links
from ssdtrain.plan.profile import (
    AttentionPart,
    HostCosts,
    Item,
    Mark,
    Profile,
    RegionRun,
)

Part = TypeVar("Part", Profile, Item, Mark, RegionRun, Links)

PROBE_BYTES = 64 * 1024 * 1024
"""At this size two curves are compared."""


class Peers:
    """The ranks that must follow one plan. Of this class: this rank alone."""

    @property
    def agree(self) -> bool:
        """Whether plans are made from what all of them observed."""
        return True

    @property
    def leads(self) -> bool:
        """Whether this rank searches for plans; else it takes what is offered."""
        return True

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return True

    def agreed(
        self, own: Profile | None, step: int, *, is_last: bool
    ) -> Profile | None:
        """Return the profile of this step that all of them plan from; `own` where they
        do not agree. None: a rank has none, and all of them are to observe again.

        Args:
            own: None: this rank has none.
            is_last: none of them observes again: each goes on with its own.
        """
        return own

    def all_agree(self, own: bool, topic: str, step: int) -> bool:
        """Return whether all ranks say yes."""
        return own

    def longest(self, own: Sequence[float], topic: str, step: int) -> tuple[float, ...]:
        """Return the element-wise maximum of all ranks' times."""
        return tuple(own)

    def offer(self, answer: str) -> None:
        """Offer what was found, an `Answer` in parts: the others are to take it."""

    def offered(self) -> str | None:
        """Return the next answer that the leading rank has offered, if any."""
        return None

    def adopts(self, is_ready: bool, step: int) -> bool:
        """Return whether this step is the first one under the plan taken last. Asked in
        every step between two observed ones, and `observes` after it.

        is_ready: this rank has all that the plan needs.
        """
        return is_ready

    def exceeded(self, own_bytes: int, step: int) -> int:
        """Return by how many bytes more than this plan the next one stays below the
        memory limit; 0: this one stays. Asked in every step under a plan.

        own_bytes: by which this rank's step went beyond the limit.
        """
        return own_bytes

    def observes(self, wanted: bool, step: int) -> bool:
        """Return whether to observe this step. wanted: this rank does."""
        return wanted


def slowest(profiles: Sequence[Profile]) -> Profile | None:
    """Merge profiles: the slowest of each time and link, the most bytes.

    What copies cost compute is a property of the device, and the ranks' differ by noise
    alone: their mean counts. The most of several noisy numbers is mostly noise.

    None if the ranks saved other tensors, or in another order.
    """
    first = profiles[0]
    shape = _shape(first)
    if any(_shape(other) != shape for other in profiles[1:]):
        return None
    caps = [p.host_bytes for p in profiles if p.host_bytes is not None]
    times = "head_ms", "tail_ms", "head_host_ms", "tail_host_ms"
    return replace(
        _most(profiles, *times, "base_bytes", "rest_bytes"),
        kinds={
            kind: tuple(
                map(_item, zip(*(p.kinds[kind] for p in profiles), strict=True))
            )
            for kind in first.kinds
        },
        regions={
            kind: tuple(
                map(_region, zip(*(p.regions[kind] for p in profiles), strict=True))
            )
            for kind in first.regions
        },
        marks=tuple(map(_mark, zip(*(p.marks for p in profiles), strict=True))),
        links=_links([p.links for p in profiles]),
        host_lead_ms=min(p.host_lead_ms for p in profiles),
        host_costs=max((p.host_costs for p in profiles), key=_total_ms),
        host_bytes=min(caps) if caps else None,
    )


def _total_ms(costs: HostCosts) -> float:
    """Add up the host's time for one tensor of each kind."""
    every = (costs.keep, costs.host, costs.ssd, costs.rebuild)
    return sum(cost.pack_ms + cost.use_ms + cost.load_ms for cost in every)


def _shape(profile: Profile) -> object:
    recipes = [
        (kind, [(i.recipe, i.inputs, i.owner, i.held) for i in items])
        for kind, items in sorted(profile.kinds.items())
    ]
    marks = [(mark.lane, mark.phase, mark.item) for mark in profile.marks]
    regions = [(kind, len(runs)) for kind, runs in sorted(profile.regions.items())]
    return profile.signature(), recipes, marks, regions


def _most(parts: Sequence[Part], *names: str) -> Part:
    """Return the first part with the most of all for each of these fields."""
    most = {name: max(getattr(part, name) for part in parts) for name in names}
    return replace(parts[0], **most)


def _item(items: tuple[Item, ...]) -> Item:
    times = "recipe_ms", "made_ms", "recipe_host_ms"
    return _most(items, *times, "recipe_other_bytes", "frame_marks")


def _region(runs: tuple[RegionRun, ...]) -> RegionRun:
    # A collective inside takes the rank that is early longer, and no time of the late
    # one tells of that wait.
    most = _most(runs, "ms", "host_ms", "other_bytes", "small_bytes", "communicates")
    return replace(most, parts=tuple(_parts(runs)))


def _parts(runs: Sequence[RegionRun]) -> Iterator[AttentionPart]:
    """Yield what no rank need compute again, with the least time that this saves."""
    known = [{part.items: part.ms for part in run.parts} for run in runs]
    for part in runs[0].parts:
        if all(part.items in each for each in known):
            yield replace(part, ms=min(each[part.items] for each in known))


def _mark(marks: tuple[Mark, ...]) -> Mark:
    return _most(marks, "ms", "other_bytes", "host_ms")


def _links(links: Sequence[Links]) -> Links:
    writes = [link.ssd_write for link in links]
    reads = [link.ssd_read for link in links]
    slowdowns = "copy_slowdown", "duplex_slowdown", "ssd_duplex_slowdown"
    return replace(
        _most(links, *slowdowns, "event_ms", "ssd_direct"),
        d2h=_slower([link.d2h for link in links]),
        h2d=_slower([link.h2d for link in links]),
        ssd_write=_common(writes),
        ssd_read=_common(reads),
    )


def _common(curves: Sequence[Curve | None]) -> Curve | None:
    """Return the slowest; None where a rank lacks the drive: its plan could not use
    it."""
    found = [curve for curve in curves if curve is not None]
    return _slower(found) if len(found) == len(curves) else None


def _slower(curves: Sequence[Curve]) -> Curve:
    return max(curves, key=lambda curve: curve.seconds(PROBE_BYTES))
