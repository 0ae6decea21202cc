"""One hop: draw neighbours of a frontier, read them, number the new nodes.

[Note: Order] Draws come node by node, in the order of the frontier. New nodes are
numbered in the order of their first draws. Both are the same on every device.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
        """Number the seeds of a batch; a node that is there twice has a row for each,
        and edges lead from the first (as PyG's and torch-sparse's samplers number).

        Raises:
            ValueError: a seed that is no node.
        """
        num = len(self.slot)
        inside = seeds.clamp(0, max(0, num - 1))
        if bool((inside != seeds).any()) or (num == 0 and len(seeds)):
            raise ValueError(
                f"seeds: expects nodes 0 to {num - 1}, got {int(seeds.min())} to "
                f"{int(seeds.max())}"
            )
        numbers = -1 - torch.arange(
            len(seeds), dtype=torch.int32, device=self.slot.device
        )
        self.slot[seeds] = torch.iinfo(torch.int32).min
        self.slot.scatter_reduce_(0, seeds, numbers, "amax")
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


def counts_of(
    graph: ResidentGraph, nodes: torch.Tensor, draw: Draw, degree: torch.Tensor
) -> torch.Tensor:
    """Draws a node of ``degree`` neighbours, int64, shape (len(nodes),)."""
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
        span = graph.offsets[nodes], graph.offsets[nodes + 1]
        edge, target = drawn_edges(graph, nodes, nodes, span, draw)
        neighbor = graph.neighbors_at(edge)
        position = torch.arange(len(edge), dtype=torch.int32, device="cpu")
        known.slot.scatter_reduce_(0, neighbor, position, "amin")
        fresh = known.slot[neighbor] == position
        added = neighbor[fresh]
        last = known.count + len(added)
        known.slot[added] = -1 - torch.arange(
            known.count, last, dtype=torch.int32, device="cpu"
        )
        source = -1 - known.slot[neighbor].long()
        return Hop(edge=edge, source=source, target=target, added=added)


def drawn_edges(
    graph: ResidentGraph,
    nodes: torch.Tensor,
    numbers: torch.Tensor,
    span: tuple[torch.Tensor, torch.Tensor],
    draw: Draw,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw edges from one to the other end of each node's ``span``.

    Args:
        graph: the lists.
        nodes: int64, shape (num_nodes,).
        numbers: int64, shape (num_nodes,): what draws are made of; see philox.py.
        span: begin and end of edges, int64, shape (num_nodes,) each: of weighted draws,
            whole lists.
        draw: what is drawn.

    Returns:
        Edges, and the position of each one's node: int64, shape (num_drawn,).
    """
    begin, end = span
    counts = counts_of(graph, nodes, draw, end - begin)
    target = torch.arange(len(nodes), device=nodes.device).repeat_interleave(counts)
    start = counts.cumsum(0) - counts
    rank = torch.arange(len(target), device=nodes.device) - start[target]
    edge = begin[target] + rank
    if draw.fanout <= 0:
        return edge, target
    if not draw.weighted:
        few = counts > 0 if draw.replace else counts < end - begin
        rows = few.nonzero().squeeze(1)
        chosen = _uniform(numbers, begin, end - begin, rows, draw)
    else:
        weights = _Weights.of(graph)
        few = counts > 0 if draw.replace else counts < weights.positive[nodes]
        rows = few.nonzero().squeeze(1)
        chosen = _weighted(weights, numbers, begin, end, rows, draw)
        # The others take every edge that has a weight.
        edge[~few[target]] = _with_weight(weights, begin[~few], end[~few])
    edge[few[target]] = chosen.flatten()
    return edge, target


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
    last = size[:, None] - num + torch.arange(num, device=nodes.device)
    chosen = (parts * (last + 1)).long()
    for j in range(1, num):  # Floyd's algorithm
        taken = (chosen[:, :j] == chosen[:, j : j + 1]).any(1)
        chosen[:, j] = torch.where(taken, last[:, j], chosen[:, j])
    return begin[rows][:, None] + chosen


class _Weights(NamedTuple):
    """What a weighted draw reads; see `ResidentGraph`."""

    values: torch.Tensor
    running: torch.Tensor
    positive: torch.Tensor

    @classmethod
    def of(cls, graph: ResidentGraph) -> "_Weights":
        weights, running, positive = graph.weights, graph.running, graph.positive
        if weights is None or running is None or positive is None:
            raise ValueError(
                "weighted: expects a graph settled with weighted=True, got one without"
            )
        return cls(weights, running, positive)


def _with_weight(
    weights: _Weights, begin: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """The edges of the lists that have a weight above 0, in order."""
    sizes = end - begin
    start = begin - (sizes.cumsum(0) - sizes)
    edge = torch.arange(int(sizes.sum()), device=begin.device)
    edge += start.repeat_interleave(sizes)
    return edge[weights.values[edge] > 0]


def _weighted(
    weights: _Weights,
    nodes: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    rows: torch.Tensor,
    draw: Draw,
) -> torch.Tensor:
    num = draw.fanout
    chosen = torch.full((len(rows), num), -1, device=nodes.device)
    if len(rows) == 0:
        return chosen
    nodes, begin, end = nodes[rows], begin[rows], end[rows]
    total = weights.running[end - 1]
    if draw.replace:
        parts = philox.uniform(nodes, 0, num, key=draw.key, relation=draw.relation)
        return _under(weights.running, begin, end, parts * total[:, None])
    found = torch.zeros(len(rows), dtype=torch.int64, device=nodes.device)
    rows = torch.arange(len(nodes), device=nodes.device)  # those that lack draws
    for number in range(draw.patience):
        if number % _AHEAD == 0:
            rows = rows[found[rows] < num]
            ahead = philox.uniform(
                nodes[rows], number, _AHEAD, key=draw.key, relation=draw.relation
            )
            place = torch.arange(len(rows), device=nodes.device)
        place = place[found[rows[place]] < num]
        if len(place) == 0:
            break
        left = rows[place]
        at = ahead[place, number % _AHEAD] * total[left]
        picked = _under(weights.running, begin[left], end[left], at[:, None])[:, 0]
        new = ~(chosen[left] == picked[:, None]).any(1)
        chosen[left[new], found[left[new]]] = picked[new]
        found[left[new]] += 1
    for row in (found < num).nonzero().squeeze(1).tolist():
        span = (int(begin[row]), int(end[row]))
        _rest(
            weights.values, span, nodes[row : row + 1], chosen[row], int(found[row]),
            draw,
        )  # fmt: skip
    return chosen


def _number(nodes: torch.Tensor, number: int, draw: Draw) -> torch.Tensor:
    """Draw ``number`` of each node."""
    pair = philox.uniform(
        nodes, number // 2 * 2, 2, key=draw.key, relation=draw.relation
    )
    return pair[:, number % 2]


def _under(
    running: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """The edge under whose weight ``at`` falls; the last with a weight if none.

    Args:
        running: of `ResidentGraph`.
        begin: int64, shape (num_lists,).
        end: as above.
        at: float64, shape (num_lists, num_draws).
    """
    low = begin[:, None].expand(at.shape)
    high = end[:, None].expand(at.shape) - 1
    top = running[high]
    while bool((low < high).any()):
        middle = low + (high - low) // 2
        sums = running[middle]
        right = (low < high) & torch.where(at < top, sums <= at, sums < top)
        low, high = (
            torch.where(right, middle + 1, low),
            torch.where(right, high, middle),
        )
    return low


def _rest(
    weights: torch.Tensor,
    span: tuple[int, int],
    node: torch.Tensor,
    chosen: torch.Tensor,
    found: int,
    draw: Draw,
) -> None:
    """Fill ``chosen`` by adding up the weights that are left, in order."""
    begin, end = span
    left = weights[begin:end].clone()
    left[chosen[:found] - begin] = 0.0
    for number, place in enumerate(range(found, draw.fanout), draw.patience):
        passed = left.cumsum(0)
        at = _number(node, number, draw) * passed[-1]
        beyond = (left > 0) & (passed > at)
        some = beyond if bool(beyond.any()) else left > 0
        ends = some.nonzero().squeeze(1)
        picked = int(ends[0] if some is beyond else ends[-1])
        chosen[place] = begin + picked
        left[picked] = 0.0
