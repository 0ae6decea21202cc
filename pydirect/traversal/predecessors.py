"""Who comes before each node on a shortest path, from the lengths of the paths.

[Note: Edges that add nothing] A predecessor is a neighbour whose distance and the edge
between add up to the node's. With edges of weight 0, or too small to change a sum, two
nodes may so precede one another. So nodes that an edge brought farther get theirs in
one pass, and the others in rounds, from nodes that have one already: a tree. Test:
test_predecessors.
"""

from collections.abc import Iterable

import torch

from pydirect.sampling import Graph
from pydirect.traversal.compressed import CompressedGraph
from pydirect.traversal.passes import Passes, sources_of
from pydirect.traversal.placed import PlacedGraph
from pydirect.traversal.visits import Tree, Visitor
from pydirect.traversal.walk import Trace

_NONE = torch.iinfo(torch.int64).max


def predecessors(
    graph: Graph | CompressedGraph | PlacedGraph,
    source: int | Iterable[int],
    result: torch.Tensor,
    *,
    trace: Trace | None = None,
    visitor: Visitor | None = None,
) -> torch.Tensor:
    """Find the node before each on a shortest path; the smallest of several.

    Reads the lists of all nodes that are reached once more, and those of nodes after
    edges of weight 0 again.

    Args:
        graph: as it was searched.
        source: as it was given.
        result: what `bfs` or `sssp` returned.
        trace: collects what each pass read.
        visitor: see `Passes`.

    Returns:
        int64, shape (num_nodes,), on the graph's device: -1 for sources and where no
        path leads.

    Raises:
        ValueError: a result of another graph or of other sources.
    """
    passes = Passes(graph, trace, visitor)
    placed = passes.placed
    sources = sources_of(source, placed.num_nodes)
    weighted = result.dtype != torch.int32
    _check(placed, sources, result)
    reached = result >= 0
    if result.is_floating_point():
        reached &= result < torch.inf
    distance = result.view(torch.int64) if weighted else result.long()
    wanted = reached.to(torch.uint8)
    wanted[sources] = 0
    found = torch.where(wanted > 0, _NONE, -1)
    frontier = reached & placed.has_edges
    level = False
    while bool(frontier.any()):
        begun = passes.clock()
        tree = Tree(
            predecessor=found,
            distance=distance,
            wanted=wanted,
            level=level,
            weighted=weighted,
        )
        nodes = frontier.nonzero().squeeze(1)
        passes.visit(tree, placed.frontier(nodes, weighted=weighted), begun=begun)
        fresh = (wanted > 0) & (found < _NONE)
        wanted[fresh] = 0
        if not bool(wanted.any()):
            return found
        frontier = (fresh if level else reached & (wanted == 0)) & placed.has_edges
        level = True
    if bool(wanted.any()):
        node = int(wanted.argmax())
        raise ValueError(
            "result: expects what bfs or sssp returned for this graph and source, got "
            f"{result[node].item()} for node {node}, where no edge leads"
        )
    return found


def _check(placed: PlacedGraph, sources: list[int], result: torch.Tensor) -> None:
    """
    Raises:
        ValueError: see `predecessors`.
    """
    kinds = [torch.int32]
    weights = placed.graph.weights
    if weights is not None:
        kinds.append(torch.float64 if weights.is_floating_point() else torch.int64)
    if result.shape != (placed.num_nodes,) or result.dtype not in kinds:
        raise ValueError(
            f"result: expects {' or '.join(map(str, kinds))} for each of "
            f"{placed.num_nodes} nodes, got {result.dtype} of shape "
            f"{list(result.shape)}: pass what bfs or sssp returned for this graph"
        )
    if bool((result[sources] != 0).any()):
        raise ValueError(
            f"result: expects 0 at its sources, got {result[sources].tolist()} at "
            f"{sources}"
        )
