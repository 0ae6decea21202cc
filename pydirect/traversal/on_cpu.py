"""Visits in whole-tensor operations: what runs where there is no GPU."""

from collections.abc import Iterator

import torch

from pydirect.traversal.compressed import CompressedGraph
from pydirect.traversal.placed import Frontier, PlacedGraph
from pydirect.traversal.trees import flatten
from pydirect.traversal.visits import Link, Mark, Operation, Push, Relax, Tree

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
            elif isinstance(operation, Tree):
                _tree(placed, operation, node, following, edge)
            else:
                push = isinstance(operation, Push)
                sender, receiver = (node, following) if push else (following, node)
                sent = operation.shares[sender]
                if operation.weighted:
                    sent = (sent * _weights(placed)[edge].double()).long()
                operation.sums.index_add_(0, receiver, sent)

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
    distance = operation.distance
    through = _through(distance[node], _weights(placed)[edge])
    before = distance[following]
    distance.scatter_reduce_(0, following, through, "amin")
    operation.marks[following[distance[following] < before]] = 1


def _tree(
    placed: PlacedGraph,
    operation: Tree,
    node: torch.Tensor,
    following: torch.Tensor,
    edge: torch.Tensor,
) -> None:
    near, far = operation.distance[node], operation.distance[following]
    fits = (near == far) if operation.level else (near < far)
    fits &= operation.wanted[following] > 0
    through = near + 1
    if operation.weighted:
        through = _through(near, _weights(placed)[edge])
    fits &= through == far
    operation.predecessor.scatter_reduce_(0, following[fits], node[fits], "amin")


def _through(distance: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Distances over edges of these weights; see `Relax.distance`."""
    if weight.is_floating_point():
        return (distance.view(torch.float64) + weight).view(torch.int64)
    return distance + weight


def _weights(placed: PlacedGraph) -> torch.Tensor:
    if placed.weights is None:
        raise ValueError("weights: expects a graph that has them, got one without")
    return placed.weights


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
