"""Regions in a plan: which forwards run again, and what becomes of their tensors.

A region is chosen as a whole: one re-run makes everything again that autograd saved in
its forward. Regions of a kind of lane are mostly the same, so how many matters more
than which; those that are chosen lie evenly over the lane, because the links then have
time between them for what the others move. The results of attention inside a region may
be stored all the same (`AttentionPart`): they are small, and its re-run is shorter by
that time.
"""

from collections.abc import Collection

from ssdtrain.plan.placement import Placement, Placements
from ssdtrain.plan.profile import Item
from ssdtrain.plan.timeline import Timeline

GOLDEN = 0.6180339887498949

Region = tuple[str, int]
"""Kind of lane, and number of the call in its lane."""


def spread(timeline: Timeline) -> list[Region]:
    """Order region calls so that each prefix is spread evenly over the step."""
    found: list[tuple[float, str, int]] = []
    for kind, runs in sorted(timeline.profile.regions.items()):
        saving = {item.region for item in timeline.profile.kinds[kind]}
        numbers = [number for number in range(len(runs)) if number in saving]
        ranks = sorted(range(len(numbers)), key=lambda at: (at * GOLDEN) % 1.0)
        # The `rank`-th place along the lane comes when its turn is.
        for place, turn in enumerate(ranks):
            found.append((turn / len(numbers), kind, numbers[place]))
    return [(kind, number) for _, kind, number in sorted(found)]


def as_they_run(timeline: Timeline) -> list[Region]:
    """Order region calls as they run: where a prefix runs again and nothing moves, what
    stays is what backward gives back first."""
    return sorted(spread(timeline), key=lambda region: (region[1], region[0]))


def is_made_again(kind: str, item: Item, chosen: Collection[Region]) -> bool:
    """Return whether re-running one of these regions produces the item."""
    return item.region >= 0 and not item.held and (kind, item.region) in chosen


def by_yield(timeline: Timeline) -> list[Region]:
    """Order region calls with attention inside: the most time for a stored byte comes
    first; equal ones lie evenly over the step."""
    worth: dict[Region, float] = {}
    for kind, number in spread(timeline):
        parts = timeline.profile.regions[kind][number].parts
        items = timeline.profile.kinds[kind]
        num_bytes = sum(items[item].num_bytes for part in parts for item in part.items)
        if num_bytes:
            worth[kind, number] = sum(part.ms for part in parts) / num_bytes
    # To two digits: what differs by less is alike.
    return sorted(worth, key=lambda region: -float(f"{worth[region]:.1e}"))


def part_items(timeline: Timeline, region: Region) -> list[int]:
    """Return the items of a region call that its re-run can take where stored."""
    kind, number = region
    parts = timeline.profile.regions[kind][number].parts
    return [item for part in parts for item in part.items]


def with_regions(
    timeline: Timeline,
    placements: Placements,
    chosen: Collection[Region],
    storing: Collection[Region] = (),
) -> dict[str, tuple[Placement, ...]]:
    """Return the placements with these regions' items marked as re-run.

    Args:
        storing: regions whose attention's results stay as they are placed.
    """
    stored = {
        (region[0], item) for region in storing for item in part_items(timeline, region)
    }
    return {
        kind: tuple(
            Placement.RERUN
            if is_made_again(kind, item, chosen) and (kind, number) not in stored
            else placement
            for number, (item, placement) in enumerate(
                zip(items, placements[kind], strict=True)
            )
        )
        for kind, items in timeline.profile.kinds.items()
    }


def running(timeline: Timeline, placements: Placements) -> frozenset[Region]:
    """Return the regions that run again under these placements."""
    return frozenset(
        (kind, item.region)
        for kind, items in timeline.profile.kinds.items()
        for item, placement in zip(items, placements[kind], strict=True)
        if placement is Placement.RERUN
    )
