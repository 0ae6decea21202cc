"""One hop: draw neighbours of a frontier, read them, number the new nodes.

[Note: Order] Draws come node by node, in the order of the frontier. New nodes are
numbered in the order of their first draws. Both are the same on every device.
"""

import itertools
from dataclasses import dataclass
from typing import Protocol

import torch

from pydirect.sampling import philox
from pydirect.sampling.resident import ResidentGraph

_FREE = torch.iinfo(torch.int32).max
# Numbers that the CPU computes at once.
_AHEAD = 32


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What is drawn at each node of a frontier."""

    fanout: int
    """Neighbours a node, at most; -1 for all."""

    replace: bool
    weighted: bool
    key: int
    """See `philox.key_of`."""

    relation: int
    """Tells the draws of one edge type from those of another."""

    @property
    def patience(self) -> int:
        """Weighted draws without replacement are repeated until they differ; after so
        many the weights that are left are added up instead."""
        return 32 + 8 * self.fanout


@dataclass(frozen=True, kw_only=True)
class Hop:
    """What one hop has found."""

    edge: torch.Tensor
    """int64, shape (num_drawn,): edges, as numbered in the graph."""

    source: torch.Tensor
    """int64, shape (num_drawn,): the neighbours, as numbered in the batch."""

    target: torch.Tensor
    """int64, shape (num_drawn,): positions in the frontier."""

    added: torch.Tensor
    """int64, shape (num_added,): new nodes, in the order of their numbers."""


class Numbering:
    """The numbers that nodes of one type have in a batch."""

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        """Takes 4 bytes a node of the graph, and is used again for each batch."""
        self.slot = torch.full((num_nodes,), _FREE, dtype=torch.int32, device=device)
        """-1 - number; during a hop the first draw of a new node; else free."""
        self.count = 0
        self._parts: list[torch.Tensor] = []

    def begin(self, seeds: torch.Tensor) -> None:
        """Number the seeds of a batch.

        Raises:
            ValueError: a seed that is no node, or twice there.
        """
        num = len(self.slot)
        inside = seeds.clamp(0, max(0, num - 1))
        numbers = -1 - torch.arange(
            len(seeds), dtype=torch.int32, device=self.slot.device
        )
        if num:
            self.slot[inside] = numbers
            outside = (inside != seeds).any()
            twice = (self.slot[inside] != numbers).any()
            # One wait for the device.
            faults = torch.stack([outside, twice]).tolist()
        else:
            faults = [len(seeds) > 0, False]
        if any(faults):
            self.slot[inside if num else seeds[:0]] = _FREE
            found = f"{int(seeds.min())} to {int(seeds.max())}"
            raise ValueError(
                f"seeds: expects nodes 0 to {num - 1}, got {found}"
                if faults[0]
                else "seeds: expects distinct nodes, got a node twice"
            )
        self._parts, self.count = [seeds], len(seeds)

    def add(self, nodes: torch.Tensor) -> None:
        """Nodes that a hop has numbered."""
        self._parts.append(nodes)
        self.count += len(nodes)

    def end(self) -> torch.Tensor:
        """The nodes of the batch; the numbering is free for the next one."""
        nodes = torch.cat(self._parts) if self._parts else self.slot.new_empty(0).long()
        self.slot[nodes] = _FREE
        self._parts, self.count = [], 0
        return nodes


class Hopper(Protocol):
    """Takes hops on a device."""

    def hop(
        self, graph: ResidentGraph, nodes: torch.Tensor, draw: Draw, known: Numbering
    ) -> Hop:
        """Draw neighbours of ``nodes`` and number those that ``known`` does not have;
        the caller adds them."""
        ...


def nothing(device: torch.device) -> Hop:
    """A hop that draws none."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    return Hop(edge=none, source=none, target=none, added=none)


def counts_of(graph: ResidentGraph, nodes: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Draws a node, int64, shape (len(nodes),)."""
    degree = graph.offsets[nodes + 1] - graph.offsets[nodes]
    if draw.fanout < 0:
        return degree
    if draw.weighted and graph.positive is not None:
        degree = graph.positive[nodes]
    if draw.replace:
        return torch.where(degree > 0, draw.fanout, 0)
    return degree.clamp(max=draw.fanout)


class CpuHopper:
    """Whole-tensor operations; what the kernels do, bit for bit."""

    def hop(
        self, graph: ResidentGraph, nodes: torch.Tensor, draw: Draw, known: Numbering
    ) -> Hop:
        """See `Hopper.hop`."""
        if draw.fanout == 0:
            return nothing(nodes.device)
        counts = counts_of(graph, nodes, draw)
        target = torch.repeat_interleave(torch.arange(len(nodes)), counts)
        start = counts.cumsum(0) - counts
        rank = torch.arange(len(target)) - start[target]
        edge = _draw(graph, nodes, counts, draw, rank, target)
        neighbor = graph.neighbors_at(edge)
        position = torch.arange(len(edge), dtype=torch.int32)
        known.slot.scatter_reduce_(0, neighbor, position, "amin")
        fresh = known.slot[neighbor] == position
        added = neighbor[fresh]
        last = known.count + len(added)
        known.slot[added] = -1 - torch.arange(known.count, last, dtype=torch.int32)
        source = -1 - known.slot[neighbor].long()
        return Hop(edge=edge, source=source, target=target, added=added)


def _draw(
    graph: ResidentGraph,
    nodes: torch.Tensor,
    counts: torch.Tensor,
    draw: Draw,
    rank: torch.Tensor,
    target: torch.Tensor,
) -> torch.Tensor:
    """Edge of every draw: draw ``rank`` of node ``nodes[target]``."""
    begin = graph.offsets[nodes]
    end = graph.offsets[nodes + 1]
    edge = begin[target] + rank
    if draw.fanout < 0:
        return edge
    running, positive = graph.running, graph.positive
    if not draw.weighted or running is None or positive is None:
        few = counts > 0 if draw.replace else counts < end - begin
        rows = few.nonzero().squeeze(1)
        chosen = _uniform(nodes, begin, end - begin, rows, draw)
    else:
        few = counts > 0 if draw.replace else counts < positive[nodes]
        rows = few.nonzero().squeeze(1)
        chosen = _weighted(running, nodes, begin, end, rows, draw)
        # The others take every edge that has a weight.
        edge[~few[target]] = _with_weight(running, begin[~few], end[~few])
    edge[few[target]] = chosen.flatten()
    return edge


def _uniform(
    nodes: torch.Tensor,
    begin: torch.Tensor,
    size: torch.Tensor,
    rows: torch.Tensor,
    draw: Draw,
) -> torch.Tensor:
    num, size = draw.fanout, size[rows]
    parts = philox.uniform(nodes[rows], 0, num, key=draw.key, relation=draw.relation)
    if draw.replace:
        return begin[rows][:, None] + (parts * size[:, None]).long()
    last = size[:, None] - num + torch.arange(num)
    chosen = (parts * (last + 1)).long()
    for j in range(1, num):  # Floyd's algorithm
        taken = (chosen[:, :j] == chosen[:, j : j + 1]).any(1)
        chosen[:, j] = torch.where(taken, last[:, j], chosen[:, j])
    return begin[rows][:, None] + chosen


def _with_weight(
    running: torch.Tensor, begin: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """The edges of the lists that have a weight above 0, in order."""
    sizes = end - begin
    start = begin - (sizes.cumsum(0) - sizes)
    edge = torch.arange(int(sizes.sum())) + start.repeat_interleave(sizes)
    before = torch.where(edge > 0, running[(edge - 1).clamp(min=0)], 0.0)
    return edge[running[edge] > before]


def _weighted(
    running: torch.Tensor,
    nodes: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    rows: torch.Tensor,
    draw: Draw,
) -> torch.Tensor:
    num = draw.fanout
    chosen = torch.full((len(rows), num), -1)
    if len(rows) == 0:
        return chosen
    nodes, begin, end = nodes[rows], begin[rows], end[rows]
    base = torch.where(begin > 0, running[(begin - 1).clamp(min=0)], 0.0)
    top = running[end - 1]
    if draw.replace:
        parts = philox.uniform(nodes, 0, num, key=draw.key, relation=draw.relation)
        return _under(
            running, base[:, None] + parts * (top - base)[:, None], top[:, None]
        )
    found = torch.zeros(len(rows), dtype=torch.int64)
    rows = torch.arange(len(nodes))  # those that lack draws
    for number in range(draw.patience):
        if number % _AHEAD == 0:
            rows = rows[found[rows] < num]
            ahead = philox.uniform(
                nodes[rows], number, _AHEAD, key=draw.key, relation=draw.relation
            )
            place = torch.arange(len(rows))
        place = place[found[rows[place]] < num]
        if len(place) == 0:
            break
        left = rows[place]
        at = base[left] + ahead[place, number % _AHEAD] * (top - base)[left]
        picked = _under(running, at, top[left])
        new = ~(chosen[left] == picked[:, None]).any(1)
        chosen[left[new], found[left[new]]] = picked[new]
        found[left[new]] += 1
    for row in (found < num).nonzero().squeeze(1).tolist():
        span = (int(begin[row]), int(end[row]))
        _rest(running, span, nodes[row : row + 1], chosen[row], int(found[row]), draw)
    return chosen


def _number(nodes: torch.Tensor, number: int, draw: Draw) -> torch.Tensor:
    """Draw ``number`` of each node."""
    pair = philox.uniform(
        nodes, number // 2 * 2, 2, key=draw.key, relation=draw.relation
    )
    return pair[:, number % 2]


def _under(running: torch.Tensor, at: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """The edge under whose weight ``at`` falls; the last with a weight if none."""
    inside = torch.searchsorted(running, at, right=True)
    last = torch.searchsorted(running, top.expand(at.shape).contiguous())
    return torch.where(at < top, inside, last)


def _rest(
    running: torch.Tensor,
    span: tuple[int, int],
    node: torch.Tensor,
    chosen: torch.Tensor,
    found: int,
    draw: Draw,
) -> None:
    """Fill ``chosen`` by adding up the weights that are left, in order."""
    begin, end = span
    sums = running[max(0, begin - 1) : end].tolist()
    if begin == 0:
        sums.insert(0, 0.0)
    weights = [after - before for before, after in itertools.pairwise(sums)]
    number = draw.patience
    for place in range(found, draw.fanout):
        taken = set(chosen[:place].tolist())
        total = 0.0
        for e in range(begin, end):
            if e not in taken:
                total += weights[e - begin]
        at = float(_number(node, number, draw)) * total
        passed, last = 0.0, -1
        for e in range(begin, end):
            if weights[e - begin] <= 0.0 or e in taken:
                continue
            passed += weights[e - begin]
            last = e
            if passed > at:
                break
        chosen[place] = last
        number += 1
