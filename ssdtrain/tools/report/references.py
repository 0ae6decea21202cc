"""Ways to save memory that ssdtrain does not run itself, priced by its simulator."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ssdtrain.plan.profile import Phase
from ssdtrain.plan.simulate import Outcome, Run, keep_all
from ssdtrain.plan.timeline import Timeline
from ssdtrain.tools.foresight.parallel import unit_of

ATTENTION = ("Attention",)
PRODUCTS = ("MmBackward", "AddmmBackward", "LinearBackward", "UnsafeViewBackward")
"""Producers by name: an attention, and products of matrices or views of them."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A policy that ssdtrain does not run itself: step time and peak alone."""

    name: str
    step_ms: float
    peak_bytes: int


def references(timeline: Timeline) -> list[Reference]:
    """Price full recompute, plain and with its checkpoints offloaded, of every second
    block, and selective: each block runs again from its input before its backward.
    Empty if the profile names no repeated blocks."""
    profile = timeline.profile
    blocks = _blocks(timeline)
    if len(blocks) < 2:
        return []
    inputs = [_own_bytes(timeline, block[0]) for block in blocks]
    full = _checkpointed(timeline, "full recompute", blocks, blocks)
    out_ms = sum(timeline.copy_out_ms[block[0]] for block in blocks)
    moved_ms = full.step_ms + max(0.0, out_ms - profile.forward_ms)
    second = _every_second(timeline, blocks)
    return [
        full,
        Reference(
            name="full recompute, checkpoints offloaded",
            step_ms=moved_ms,
            # Of the others nothing is there; two inputs are on their way.
            peak_bytes=_peak(timeline, blocks, [0] * len(blocks)) + 2 * max(inputs),
        ),
        _checkpointed(timeline, "every second layer recomputed", blocks, second),
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
    stays, beside = [], []
    for block in blocks:
        own = [item for item in block if timeline.items[item].serves < 0]
        held = block[:1] if block[0] in first else own
        stays.append(sum(_own_bytes(timeline, item) for item in held))
        beside.append(stays[-1] if block[0] in first else 0)
    step_ms = _with_again_ms(timeline, keep, inside)
    peak = _peak(timeline, blocks, stays, beside)
    return Reference(name=name, step_ms=step_ms, peak_bytes=peak)


def _selective(timeline: Timeline, blocks: Sequence[Sequence[int]]) -> Reference:
    """Store attention's results and every second product's, as torchtitan does."""
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
    held = (stored.intersection(block) | {block[0]} for block in blocks)
    stays = [sum(_own_bytes(timeline, item) for item in own) for own in held]
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
    """Return the most memory of any block's backward: its own, what other blocks have
    packed and not yet used, and what no block saves. `stays`: bytes of each block
    between forward and backward; `next to`: what its backward needs more."""
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
        places = enumerate(zip(sizes, spans, strict=True))
        others = sum(
            size
            for other, (size, (packed, used)) in places
            if other != number and packed <= begins <= used
        )
        extra = beside[number] if beside else 0
        peak = max(peak, others + _worst(timeline, block) + extra)
    return peak


def _with_again_ms(
    timeline: Timeline, keep: Outcome, inside: set[int], stored: Iterable[int] = ()
) -> float:
    """Return a step's time in which the operators after these items' packs run twice,
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


def _blocks(timeline: Timeline) -> list[list[int]]:
    """Return the items of each numbered module, its input first: what its region alone
    reads."""
    reads = Counter(item for inputs in timeline.read_by for item in inputs)
    read_in = {
        item: run.module
        for run, inputs in zip(timeline.runs, timeline.read_by, strict=True)
        for item in inputs
        if reads[item] == 1
    }
    found: dict[tuple[int, str], list[int]] = {}
    for item, what in enumerate(timeline.items):
        name = unit_of(read_in.get(item, what.module))
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
