"""Breadth-first search (EMOGI, section 2.3), in both directions."""

from collections.abc import Iterable

import torch

from pydirect.sampling import Graph
from pydirect.traversal.compressed import CompressedGraph
from pydirect.traversal.passes import Passes, sources_of
from pydirect.traversal.placed import Frontier, PlacedGraph
from pydirect.traversal.visits import Mark, Visitor, seen_bits
from pydirect.traversal.walk import Direction, Trace


def bfs(
    graph: Graph | CompressedGraph | PlacedGraph,
    source: int | Iterable[int],
    *,
    direction: Direction | str = Direction.AUTO,
    trace: Trace | None = None,
    visitor: Visitor | None = None,
) -> torch.Tensor:
    """Count the edges from ``source``, or the nearest of several, to each node.

    Args:
        graph: lists of targets; `place` it once for several searches.
        source: node, or several.
        direction: a search may read backwards where ``graph.symmetric``, or where the
            graph is placed with its reverse.
        trace: collects what each level read.
        visitor: see `Passes`.

    Returns:
        int32, shape (num_nodes,), on the graph's device: -1 where no path leads.

    Raises:
        ValueError: ``source`` out of range, or backwards in a directed graph.
    """
    passes = Passes(graph, trace, visitor)
    placed, way = passes.placed, Direction(direction)
    sources = sources_of(source, placed.num_nodes)
    back = None if way is Direction.FORWARD else placed.back
    if way is Direction.BACKWARD and back is None:
        raise ValueError(
            "direction: expects forward for a graph whose edges are stored in one "
            "direction, got backward: make the graph with symmetric=True if it is, or "
            "place it with reverse=graph.reverse()"
        )
    level = torch.full((placed.num_nodes,), -1, dtype=torch.int32, device=placed.device)
    level[sources] = 0
    seen = seen_bits(level)
    ahead = None if back is None else _Ahead(back)
    now = 0
    while True:
        begun = passes.clock()
        active = level == now
        frontier = placed.frontier((active & placed.has_edges).nonzero().squeeze(1))
        if frontier.num_nodes == 0:
            return level
        mark = Mark(level=level, seen=seen, now=now)
        backward = way is Direction.BACKWARD
        if way is Direction.AUTO and ahead is not None:
            ahead.leave(active)
            backward = ahead.backward_units(frontier) < frontier.num_units
        if backward and back is not None:
            unreached = ((level < 0) & back.has_edges).nonzero().squeeze(1)
            passes.search(mark, back.frontier(unreached), begun=begun, over=back)
            seen = seen_bits(level)
        else:
            passes.visit(mark, frontier, begun=begun)
        now += 1


class _Ahead:
    """The nodes that are not reached yet, as far as counts tell."""

    def __init__(self, back: PlacedGraph) -> None:
        """``back``: the lists of sources."""
        self._back = back
        self._unit = 1 << back.unit_shift(weighted=False)
        self._num_nodes = back.num_with_edges
        self._num_edges = back.num_edges

    def leave(self, active: torch.Tensor) -> None:
        """Leave out active nodes, which are reached now: bool, shape (num_nodes,)."""
        nodes = (active & self._back.has_edges).nonzero().squeeze(1)
        offsets = self._back.offsets
        self._num_nodes -= len(nodes)
        self._num_edges -= int((offsets[nodes + 1] - offsets[nodes]).sum())

    def backward_units(self, frontier: Frontier) -> float:
        """Units that a backward step is expected to read.

        An edge leads to the frontier with the frontier's share of all edges; a node's
        list is read unit by unit until one does. This is Beamer's switch with units
        for edges (Direction-optimizing breadth-first search, SC 2012).
        """
        if self._num_nodes <= 0:
            return 0.0
        chance = frontier.num_edges / self._back.num_edges
        stop: float = 1.0 - (1.0 - chance) ** self._unit
        lines = self._num_edges / self._num_nodes / self._unit + 1.0
        each: float = (1.0 - (1.0 - stop) ** lines) / stop
        return self._num_nodes * each
