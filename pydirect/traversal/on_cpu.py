"""Visits in whole-tensor operations: what runs where there is no GPU."""

from collections.abc import Iterator

import torch

from pydirect.traversal.compressed import CompressedGraph
from pydirect.traversal.placed import Frontier, PlacedGraph
from pydirect.traversal.trees import flatten
from pydirect.traversal.visits import Link, Mark, Operation, Push, Relax

_CHUNK_EDGES = 1 << 22


class CpuVisitor:
    """Visits edges a chunk at a time; the results are the kernels'."""

    def __init__(self, chunk_edges: int = _CHUNK_EDGES) -> None:
        """``chunk_edges``: expanded at once, some 40 bytes each."""
        self._chunk_edges = chunk_edges

    def visit(
        self, placed: PlacedGraph, frontier: Frontier, operation: Operation
    ) -> None:
        """See `Visitor.visit`."""
        for node, edge, following in self._edges(placed, frontier):
            if isinstance(operation, Mark):
                fresh = following[operation.level[following] < 0]
                operation.level[fresh] = operation.now + 1
            elif isinstance(operation, Relax):
                _relax(placed, operation, node, following, edge)
            elif isinstance(operation, Link):
                _link(operation.parent, node, following)
            elif isinstance(operation, Push):
                operation.sums.index_add_(0, following, operation.shares[node])
            else:
                operation.sums.index_add_(0, node, operation.shares[following])

    def search(self, placed: PlacedGraph, frontier: Frontier, mark: Mark) -> int:
        """See `Visitor.search`. Reads every list whole: nothing is to be saved here."""
        for node, _, following in self._edges(placed, frontier):
            hit = mark.level[following] == mark.now
            mark.level[node[hit]] = mark.now + 1
        return placed.union_bytes(frontier)

    def _edges(
        self, placed: PlacedGraph, frontier: Frontier
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Node, edge number and neighbour of every edge, in chunks of whole lists."""
        nodes = frontier.nodes
        if nodes is None:
            nodes = torch.arange(placed.num_nodes, device="cpu")
        begin = placed.offsets[nodes]
        counts = (placed.offsets[nodes + 1] - begin).clamp(max=frontier.limit)
        sums = counts.cumsum(0)
        first = 0
        while first < len(nodes):
            before = int(sums[first - 1]) if first else 0
            bound = torch.tensor(before + self._chunk_edges, device="cpu")
            last = max(first + 1, int(torch.searchsorted(sums, bound, right=True)))
            part = slice(first, last)
            item = torch.repeat_interleave(
                torch.arange(last - first, device="cpu"), counts[part]
            )
            start = begin[part] - (sums[part] - counts[part] - before)
            edge = torch.arange(len(item), device="cpu") + start[item]
            yield (
                nodes[part][item],
                edge,
                _neighbors(placed, nodes[part], counts[part], edge),
            )
            first = last


def _neighbors(
    placed: PlacedGraph, nodes: torch.Tensor, counts: torch.Tensor, edge: torch.Tensor
) -> torch.Tensor:
    """The neighbours at ``edge``, which are the first ``counts`` of each list."""
    if isinstance(placed.graph, CompressedGraph):
        return placed.graph.neighbors_of(nodes, placed.offsets[nodes] + counts)
    return placed.edges[edge].long()


def _relax(
    placed: PlacedGraph,
    operation: Relax,
    node: torch.Tensor,
    following: torch.Tensor,
    edge: torch.Tensor,
) -> None:
    if placed.weights is None:
        raise ValueError("weights: expects a graph that has them, got one without")
    weight = placed.weights[edge]
    distance = operation.distance
    if weight.is_floating_point():
        through = (distance[node].view(torch.float64) + weight).view(torch.int64)
    else:
        through = distance[node] + weight
    before = distance[following]
    distance.scatter_reduce_(0, following, through, "amin")
    operation.marks[following[distance[following] < before]] = 1


def _link(parent: torch.Tensor, node: torch.Tensor, following: torch.Tensor) -> None:
    """Hook larger roots under smaller ones until no edge joins two trees."""
    while True:
        flatten(parent)
        one, other = parent[node], parent[following]
        apart = one != other
        if not bool(apart.any()):
            return
        node, following = node[apart], following[apart]
        one, other = one[apart], other[apart]
        high, low = torch.maximum(one, other), torch.minimum(one, other)
        parent.scatter_reduce_(0, high, low, "amin")
