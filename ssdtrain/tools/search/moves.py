"""How a tensor gets from one placement to another: collectives of one axis each.

[Note: nested cuts]
Cuts of one dimension on several axes nest, the outermost axis first, as DTensor's do. A
cut on an outer axis is made or undone only while no inner axis cuts that dimension:
else the inner pieces would be of the wrong rows. They are gathered before. What the
next level of a recursion pays for operands that were fetched whole follows from this:
a gather's message has their true size.
(tests/ssdtrain/tools/search/test_search.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.collectives import Collective, Fabric, bus_bytes
from ssdtrain.tools.search.placement import (
    COPIED,
    Copied,
    Cut,
    Placement,
    Placements,
    Unreduced,
)


class Move(NamedTuple):
    """One step of a change of placements."""

    axis: int
    kind: Collective | None
    """None: a worker drops what is not its piece."""
    share: float
    """Of the whole tensor's bytes: the collective's message."""
    after: Placements


@dataclass(frozen=True)
class WorkerAxis:
    """One axis of the mesh: how many workers, and what its links take."""

    ways: int
    fabric: Fabric | None = None
    """None: the cost is counted in bytes that a worker sends."""

    def __post_init__(self) -> None:
        if self.ways < 2:
            raise ConfigError(f"an axis expects 2 or more workers, got {self.ways}")

    def cost(self, kind: Collective, message_bytes: float) -> float:
        """Return microseconds, or bytes without a fabric."""
        if self.fabric is None:
            return bus_bytes(kind, message_bytes, self.ways)
        return self.fabric.microseconds(kind, message_bytes, self.ways)


def cost(steps: Sequence[Move], num_bytes: float, axes: Sequence[WorkerAxis]) -> float:
    """Return what moves of a tensor of so many bytes cost."""
    return sum(
        axes[step.axis].cost(step.kind, step.share * num_bytes)
        for step in steps
        if step.kind is not None
    )


def local_share(placements: Placements, ways: Sequence[int]) -> float:
    """Return the share of a tensor that one worker holds."""
    share = 1.0
    for placement, number in zip(placements, ways, strict=True):
        if isinstance(placement, Cut):
            share /= number
    return share


@cache
def moves(
    source: Placements,
    target: Placements,
    ways: tuple[int, ...],
    shape: tuple[int, ...],
) -> tuple[Move, ...]:
    """Return the steps from one placement to another, outermost axis first. See [Note:
    nested cuts]. `target`: no part is unreduced; `ways`: workers of each axis; `shape`:
    for halos."""
    goal = tuple(Cut(p.dim) if isinstance(p, Cut) else p for p in target)
    now, steps = list(source), []

    def step(axis: int, kind: Collective | None, to: Placement) -> None:
        before = local_share(tuple(now), ways)
        now[axis] = to
        after = local_share(tuple(now), ways)
        share = after if kind is Collective.ALL_GATHER else before
        steps.append(Move(axis, kind, share, tuple(now)))

    for axis in reversed(range(len(ways))):
        if _is_in_the_way(axis, source, goal):
            step(axis, Collective.ALL_GATHER, COPIED)
    for axis in range(len(ways)):
        if now[axis] != goal[axis]:
            step(axis, _kind(now[axis], goal[axis]), goal[axis])
    for axis, placement in enumerate(target):
        if isinstance(placement, Cut) and placement.has_halo:
            now[axis] = placement
            share = _halo(axis, placement, goal, ways, shape)
            steps.append(Move(axis, Collective.SEND, share, tuple(now)))
    return tuple(steps)


def _halo(
    axis: int, cut: Cut, goal: Placements, ways: Sequence[int], shape: Sequence[int]
) -> float:
    """Return the share of a tensor that a worker gets from its neighbours."""
    rows = cut.before + cut.after
    if ways[axis] == 2:  # each has one neighbour
        rows = max(cut.before, cut.after)
    others = [COPIED if p == Cut(cut.dim) else p for p in goal]
    return rows / shape[cut.dim] * local_share(tuple(others), ways)


def _is_in_the_way(axis: int, source: Placements, goal: Placements) -> bool:
    own = source[axis]
    if not isinstance(own, Cut):
        return False
    return any(
        source[outer] != goal[outer] and own in (source[outer], goal[outer])
        for outer in range(axis)
    )


def _kind(source: Placement, goal: Placement) -> Collective | None:
    """Return the collective that changes a placement; None: nothing is sent."""
    if isinstance(goal, Unreduced):
        raise ConfigError(f"a move expects a cut or copies as its goal, got {goal}")
    if isinstance(source, Copied):
        return None
    if isinstance(source, Unreduced):
        is_cut = isinstance(goal, Cut)
        return Collective.REDUCE_SCATTER if is_cut else Collective.ALL_REDUCE
    return Collective.ALL_TO_ALL if isinstance(goal, Cut) else Collective.ALL_GATHER
