"""Connected components by hooking trees; an edge of a component in hand is not read.

[Note: One anchor] In a graph whose edges are stored in both directions most lists need
not be read: once a large component has formed, its nodes have nothing to tell about
edges inside it, and every edge that leaves it is also in a list of the other end. So
nodes are taken in rounds, and each round leaves out those that hang together with an
anchor, the node of the largest component after the first round. The anchor must stay
the same: of an edge between two nodes left out in favour of different components
neither list would be read. (The sampling of Afforest, Sutton et al., IPDPS 2018, for
lists that cost by the line.) Test: test_the_anchor_stays.
"""

import torch

from pydirect.sampling import Graph
from pydirect.traversal.passes import Passes
from pydirect.traversal.place import PlacedGraph
from pydirect.traversal.trees import flatten
from pydirect.traversal.visits import Link, Visitor
from pydirect.traversal.walk import Trace

_ROUNDS = 16
# Nodes next to one another in a round, so that their lists share lines.
_CHUNK_NODES = 64


def connected_components(
    graph: Graph | PlacedGraph,
    *,
    trace: Trace | None = None,
    visitor: Visitor | None = None,
) -> torch.Tensor:
    """The weakly connected component of each node.

    Args:
        graph: of a directed one every list is read, once; of one with
            ``graph.symmetric`` a small part.
        trace: collects what each round read.
        visitor: see `Passes`.

    Returns:
        int64, shape (num_nodes,), on the graph's device: the smallest node of the
        component.
    """
    passes = Passes(graph, trace, visitor)
    placed = passes.placed
    parent = torch.arange(placed.num_nodes, device=placed.device)
    link = Link(parent=parent)
    if not placed.graph.symmetric:
        passes.visit(link, placed.whole)
        flatten(parent)
        return parent
    anchor: torch.Tensor | None = None
    turn = (
        torch.arange(placed.num_nodes, device=placed.device) // _CHUNK_NODES % _ROUNDS
    )
    for number in range(_ROUNDS):
        begun = passes.clock()
        wanted = placed.has_edges & (turn == number)
        if anchor is not None:
            wanted &= parent != parent[anchor]
        frontier = placed.frontier(wanted.nonzero().squeeze(1))
        if frontier.num_nodes == 0:
            continue
        passes.visit(link, frontier, begun=begun)
        flatten(parent)
        if anchor is None:
            anchor = _largest(parent)
    return parent


def _largest(parent: torch.Tensor) -> torch.Tensor:
    """A node of the largest component, shape ()."""
    return torch.bincount(parent, minlength=len(parent)).argmax()
