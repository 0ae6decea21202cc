"""The fixed policies a search must never lose to, priced by the same simulator."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ssdtrain.config import Target
from ssdtrain.plan.placement import AGAIN_PLACEMENTS, Placement, Placements
from ssdtrain.plan.profile import Item, Phase
from ssdtrain.plan.regions import by_yield, spread, with_regions
from ssdtrain.plan.schedule import Late, Style
from ssdtrain.plan.simulate import Outcome, Run, keep_all
from ssdtrain.plan.timeline import NEVER, Timeline

STAGED_TARGETS = frozenset(target.value for target in Target if target.is_staged)
HOST_SHARE = 0.6
"""Share of the pinned memory that is planned with; the rest is for staging."""
ATTENTION = ("Attention",)
PRODUCTS = ("MmBackward", "AddmmBackward", "LinearBackward", "UnsafeViewBackward")
"""Producers by name: an attention, and products of matrices or views of them."""
WINDOW_LARGEST = 2
"""The release window of offload-all, in largest tensors (as in the cache)."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A fixed policy: the placements, and how strictly memory is freed."""

    name: str
    placements: Placements
    style: Style


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A policy that ssdtrain does not run itself: step time and peak alone."""

    name: str
    step_ms: float
    peak_bytes: int


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
    regions = []
    if every := spread(timeline):
        again = with_regions(timeline, keep, every)
        moved = with_tail_kept(timeline, with_regions(timeline, move, every), window)
        regions = [
            Fixed(name="regions", placements=again, style=Style()),
            Fixed(name="regions + offload-all", placements=moved, style=strict),
        ]
    if every and (storing := by_yield(timeline)):
        again = with_regions(timeline, keep, every, storing)
        moved = with_regions(timeline, move, every, storing)
        moved = with_tail_kept(timeline, moved, window)
        regions += [
            Fixed(name="regions + attention", placements=again, style=Style()),
            Fixed(name="regions + attention moved", placements=moved, style=strict),
        ]
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
        Fixed(name="last-module", placements=last_module(timeline), style=Style()),
        *regions,
    ]


def last_module(timeline: Timeline) -> dict[str, tuple[Placement, ...]]:
    """Wu's rule (5.3.5): offload up to the last module m for which
    (bytes before m + 2 x bytes of m) / (time until m's backward) stays within the
    measured write bandwidth, backward taken as twice forward.
    """
    profile = timeline.profile
    links = profile.links
    target = away(timeline)
    curve = links.d2h
    if target is Placement.OFFLOAD_SSD and links.ssd_write is not None:
        curve = links.ssd_write
    chosen: dict[str, set[int]] = {}
    for lane, kind in enumerate(profile.lanes):
        starts = _forward_ms(timeline, lane)
        if kind in chosen or not starts:  # an interrupt came before its first tensor
            continue
        chosen[kind] = set()
        total_ms = sum(
            mark.ms
            for mark in profile.marks
            if mark.lane == lane and mark.phase is Phase.FORWARD
        )
        before = 0
        groups = _modules(profile.kinds[kind], starts)
        ends = [starts[number] for number, _ in groups[1:]] + [total_ms]
        for (_, group), end_ms in zip(groups, ends, strict=True):
            size = sum(profile.kinds[kind][n].num_bytes for n in group)
            until_ms = total_ms + 2 * (total_ms - end_ms)
            if (before + 2 * size) > curve.bytes_per_second * until_ms / 1e3:
                break
            before += size
            chosen[kind].update(group)
    return placed_by(
        timeline,
        lambda kind, number, item: (
            target if number in chosen.get(kind, ()) else Placement.KEEP
        ),
    )


def _forward_ms(timeline: Timeline, lane: int) -> dict[int, float]:
    """Return when each item of a lane is packed, counted from the lane's first pack."""
    now, starts = 0.0, {}
    for mark in timeline.profile.marks:
        if mark.lane == lane and mark.phase is Phase.FORWARD:
            starts[mark.item] = now
            now += mark.ms
    return starts


def _modules(
    items: tuple[Item, ...], starts: dict[int, float]
) -> list[tuple[int, list[int]]]:
    """(first item, items) of each run of items saved in one module."""
    groups: list[tuple[int, list[int]]] = []
    for number in sorted(starts):
        module = items[number].module
        if groups and module and items[groups[-1][0]].module == module:
            groups[-1][1].append(number)
        else:
            groups.append((number, [number]))
    return groups


def references(timeline: Timeline) -> list[Reference]:
    """Price full recompute, plain and with its checkpoints offloaded, of every second
    block, and selective; empty if the profile names no repeated blocks.

    Each block is checkpointed at its input: its forward runs again before its
    backward, and only then are its saved tensors alive.
    """
    profile = timeline.profile
    blocks = _blocks(timeline)
    if len(blocks) < 2:
        return []
    inputs = [_own_bytes(timeline, block[0]) for block in blocks]
    full = _checkpointed(timeline, "full recompute", blocks, blocks)
    out_ms = sum(timeline.copy_out_ms[block[0]] for block in blocks)
    moved_ms = full.step_ms + max(0.0, out_ms - profile.forward_ms)
    return [
        full,
        Reference(
            name="full recompute, checkpoints offloaded",
            step_ms=moved_ms,
            # Of the others nothing is there; two inputs are on their way.
            peak_bytes=_peak(timeline, blocks, [0] * len(blocks)) + 2 * max(inputs),
        ),
        _checkpointed(
            timeline,
            "every second layer recomputed",
            blocks,
            _every_second(timeline, blocks),
        ),
        _selective(timeline, blocks),
    ]


def _every_second(
    timeline: Timeline, blocks: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Return every second block of each lane, from its first on."""
    found: list[Sequence[int]] = []
    for lane in range(len(timeline.profile.lanes)):
        own = [block for block in blocks if timeline.lane_of[block[0]] == lane]
        found += own[::2]
    return found


def _checkpointed(
    timeline: Timeline,
    name: str,
    blocks: Sequence[Sequence[int]],
    again: Sequence[Sequence[int]],
) -> Reference:
    """Price checkpointing of some blocks; the others keep everything."""
    keep = Run(timeline, keep_all(timeline)).run()
    first = {block[0] for block in again}
    inside = {item for block in again for item in block}
    stays = [
        _own_bytes(timeline, block[0])
        if block[0] in first
        else sum(
            _own_bytes(timeline, item)
            for item in block
            if timeline.items[item].serves < 0
        )
        for block in blocks
    ]
    beside = [
        own if block[0] in first else 0
        for own, block in zip(stays, blocks, strict=True)
    ]
    step_ms = _with_again_ms(timeline, keep, inside)
    peak = _peak(timeline, blocks, stays, beside)
    return Reference(name=name, step_ms=step_ms, peak_bytes=peak)


def _selective(timeline: Timeline, blocks: Sequence[Sequence[int]]) -> Reference:
    """Store attention's results and every second product's; the rest of a block runs
    again (selective activation checkpointing, as torchtitan does it)."""
    keep = Run(timeline, keep_all(timeline)).run()
    stored: set[int] = set()
    for block in blocks:
        products = 0
        for item in block[1:]:
            name = timeline.items[item].name
            if any(word in name for word in ATTENTION):
                stored.add(item)
            elif any(word in name for word in PRODUCTS):
                products += 1
                if products % 2:
                    stored.add(item)
    stays = [
        sum(
            _own_bytes(timeline, item)
            for item in stored.intersection(block) | {block[0]}
        )
        for block in blocks
    ]
    inside = {item for block in blocks for item in block}
    step_ms = _with_again_ms(timeline, keep, inside, stored)
    peak = _peak(timeline, blocks, stays)
    return Reference(name="selective recompute", step_ms=step_ms, peak_bytes=peak)


def _peak(
    timeline: Timeline,
    blocks: Sequence[Sequence[int]],
    stays: Sequence[int],
    beside: Sequence[int] = (),
) -> int:
    """Return the most memory of any block's backward: its own, what stays of the blocks
    that have been packed and not yet used, in this lane or another one, and what no
    block saves.

    Args:
        stays: bytes of each block between its forward and its backward.
        beside: bytes that each block's backward needs beside its own tensors.
    """
    inside = {item for block in blocks for item in block}
    parts = [*blocks, *([n] for n in range(len(timeline.items)) if n not in inside)]
    sizes = [*stays, *(_own_bytes(timeline, n) for (n,) in parts[len(blocks) :])]
    spans = [
        (
            min(timeline.pack_mark[item] for item in part),
            max((at for item in part for at in timeline.uses[item]), default=-1),
        )
        for part in parts
    ]
    peak = 0
    for number, block in enumerate(blocks):
        uses = [at for item in block for at in timeline.uses[item]]
        begins = min(uses, default=spans[number][0])
        others = sum(
            size
            for other, (size, (packed, used)) in enumerate(
                zip(sizes, spans, strict=True)
            )
            if other != number and packed <= begins <= used
        )
        extra = beside[number] if beside else 0
        peak = max(peak, others + _worst(timeline, block) + extra)
    return peak


def _with_again_ms(
    timeline: Timeline, keep: Outcome, inside: set[int], stored: Iterable[int] = ()
) -> float:
    """Return a step's time in which the operators behind these items' packs run twice,
    but for those whose results are stored: their mark comes next."""
    profile = timeline.profile
    taken = {timeline.pack_mark[item] - 1 for item in stored}
    again = [
        mark
        for at, mark in enumerate(profile.marks)
        if mark.phase is Phase.FORWARD
        and timeline.item_of_mark[at] in inside
        and at not in taken
    ]
    device_ms = keep.step_ms - keep.host_wait_ms + sum(mark.ms for mark in again)
    host_ms = profile.host_ms + profile.tail_host_ms
    return max(device_ms, host_ms + sum(mark.host_ms for mark in again))


def block_of(module: str) -> str:
    """`blocks.3` of `blocks.3.mlp.up`; empty outside numbered modules."""
    parts = module.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ""


def _blocks(timeline: Timeline) -> list[list[int]]:
    """Return the items of each numbered module, its input first.

    What a region reads is saved before its module begins, and is its block's input
    all the same. What several regions read stays outside of them.
    """
    reads = Counter(item for inputs in timeline.read_by for item in inputs)
    read_in = {
        item: run.module
        for run, inputs in zip(timeline.runs, timeline.read_by, strict=True)
        for item in inputs
        if reads[item] == 1
    }
    found: dict[tuple[int, str], list[int]] = {}
    for item, what in enumerate(timeline.items):
        name = block_of(read_in.get(item, what.module))
        if name:
            found.setdefault((timeline.lane_of[item], name), []).append(item)
    return list(found.values())


def _own_bytes(timeline: Timeline, item: int) -> int:
    """Return the bytes that keeping an item adds to the peak."""
    found = timeline.items[item]
    return 0 if found.held else found.num_bytes


def _worst(timeline: Timeline, block: Iterable[int]) -> int:
    """Return the largest memory of one block's backward, without its input."""
    own = set(block)
    alive = sum(_own_bytes(timeline, item) for item in own)
    freed_behind: dict[int, list[int]] = {}
    for item in own:
        if timeline.uses[item]:
            freed_behind.setdefault(max(timeline.uses[item]), []).append(item)
    marks = sorted({at for item in own for at in timeline.uses[item]})
    worst = alive
    for mark in marks:
        worst = max(worst, alive + timeline.other_bytes[mark])
        for item in freed_behind.get(mark, []):
            alive -= _own_bytes(timeline, item)
    return worst
