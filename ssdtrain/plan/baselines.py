"""The fixed policies a search must never lose to, priced by the same simulator."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ssdtrain.config import Target
from ssdtrain.plan.placement import AGAIN_PLACEMENTS, Placement, Placements
from ssdtrain.plan.profile import Item
from ssdtrain.plan.regions import by_yield, spread, with_regions
from ssdtrain.plan.schedule import Late, Style
from ssdtrain.plan.timeline import NEVER, Timeline

STAGED_TARGETS = frozenset(target.value for target in Target if target.behind.is_staged)
HOST_SHARE = 0.6
"""Share of the pinned memory that is planned with; the rest is for staging."""
WINDOW_LARGEST = 2
"""The release window of offload-all, in largest tensors (as in the cache)."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A fixed policy: the placements, and how strictly memory is freed."""

    name: str
    placements: Placements
    style: Style


def away(timeline: Timeline) -> Placement:
    """Return the placement of an offloaded item when no target is named."""
    has_ssd = timeline.profile.links.ssd_write is not None
    is_staged = has_ssd and timeline.profile.notes.get("target") in STAGED_TARGETS
    return Placement.OFFLOAD_SSD if is_staged else Placement.OFFLOAD


def spilled(timeline: Timeline, placements: Placements) -> Placements:
    """Move what exceeds pinned host memory to the SSD, if there is one.

    The first tensors of a lane go: backward asks for them last.
    """
    cap = timeline.profile.host_bytes
    if timeline.profile.links.ssd_write is None or cap is None:
        return placements
    kinds = timeline.profile.kinds
    excess = -HOST_SHARE * cap + sum(
        item.num_bytes
        for kind, items in kinds.items()
        for item, placement in zip(items, placements[kind], strict=True)
        if placement is Placement.OFFLOAD
    )
    found = {kind: list(placed) for kind, placed in placements.items()}
    for kind, items in kinds.items():
        for number, item in enumerate(items):
            if excess <= 0:
                return found
            if found[kind][number] is Placement.OFFLOAD:
                found[kind][number] = Placement.OFFLOAD_SSD
                excess -= item.num_bytes
    return found


def largest_bytes(timeline: Timeline) -> int:
    """Return the largest item of the step."""
    return max((item.num_bytes for item in timeline.items), default=0)


def placed_by(
    timeline: Timeline, choose: Callable[[str, int, Item], Placement]
) -> dict[str, tuple[Placement, ...]]:
    """Return placements from a function of lane kind, item number and item; what its
    owner holds anyway stays."""
    return {
        kind: tuple(
            Placement.KEEP if item.held else choose(kind, number, item)
            for number, item in enumerate(items)
        )
        for kind, items in timeline.profile.kinds.items()
    }


def with_tail_kept(
    timeline: Timeline, placements: Placements, tail_bytes: int
) -> dict[str, tuple[Placement, ...]]:
    """Keep what backward asks for first, up to `tail_bytes` of a lane that follows."""
    kept: dict[str, set[int]] = {kind: set() for kind in placements}
    flat = timeline.placements_by_id(placements)
    layout = timeline.layout(flat)
    first = layout.residency.first
    done: set[str] = set()
    for lane, kind in enumerate(timeline.profile.lanes):
        if kind in done:
            continue
        done.add(kind)
        base = timeline.first_id[lane]
        numbers = [
            n
            for n in range(len(timeline.profile.kinds[kind]))
            if first[base + n] != NEVER
            and flat[base + n] not in AGAIN_PLACEMENTS
            and layout.is_saved[base + n]
        ]
        left = tail_bytes
        for number in sorted(numbers, key=lambda n: (first[base + n], -n)):
            size = timeline.items[base + number].num_bytes
            if size > left:
                break
            left -= size
            kept[kind].add(number)
    return {
        kind: tuple(
            Placement.KEEP if number in kept[kind] else placement
            for number, placement in enumerate(placed)
        )
        for kind, placed in placements.items()
    }


def fixed_policies(timeline: Timeline) -> list[Fixed]:
    """Return every policy that ssdtrain can run, the simplest first."""
    target = away(timeline)
    window = WINDOW_LARGEST * largest_bytes(timeline)
    strict = Style(window_bytes=window, late=Late.WAIT)

    def recipe_or(placement: Placement) -> dict[str, tuple[Placement, ...]]:
        return placed_by(
            timeline,
            lambda kind, number, item: (
                Placement.RECOMPUTE if item.recipe is not None else placement
            ),
        )

    keep = placed_by(timeline, lambda *_: Placement.KEEP)
    move = placed_by(timeline, lambda *_: target)
    regions = [*checkpointing(timeline)]
    if every := spread(timeline):
        moved = with_tail_kept(timeline, with_regions(timeline, move, every), window)
        name = "regions + offload-all"
        regions.append(Fixed(name=name, placements=moved, style=strict))
    if every and (storing := by_yield(timeline)):
        moved = with_regions(timeline, move, every, storing)
        moved = with_tail_kept(timeline, moved, window)
        name = "regions + attention moved"
        regions.append(Fixed(name=name, placements=moved, style=strict))
    return [
        Fixed(name="keep-all", placements=keep, style=Style()),
        Fixed(
            name="offload-all",
            placements=with_tail_kept(timeline, move, window),
            style=strict,
        ),
        Fixed(name="recipes-only", placements=recipe_or(Placement.KEEP), style=Style()),
        Fixed(
            name="recipes + offload-all",
            placements=with_tail_kept(timeline, recipe_or(target), window),
            style=strict,
        ),
        *regions,
    ]


def checkpointing(timeline: Timeline) -> Iterator[Fixed]:
    """Yield the policies that run all regions again and keep the rest: without and with
    what attention gives."""
    every, keep = spread(timeline), placed_by(timeline, lambda *_: Placement.KEEP)
    if every:
        again = with_regions(timeline, keep, every)
        yield Fixed(name="regions", placements=again, style=Style())
    if every and (storing := by_yield(timeline)):
        again = with_regions(timeline, keep, every, storing)
        yield Fixed(name="regions + attention", placements=again, style=Style())
