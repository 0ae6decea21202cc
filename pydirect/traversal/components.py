"""Connected components by hooking trees; an edge of a component in hand is not read.

[Note: One anchor] In a graph whose edges are stored in both directions most lists need
not be read: once a large component has formed, its nodes have nothing to tell about
edges inside it, and every edge that leaves it is also in a list of the other end. So
nodes are taken in rounds, and later rounds leave out those that hang together with an
anchor, a node of the first component that holds a share of the graph. The anchor must
stay the same: of an edge between two nodes left out in favour of different components
neither list would be read. (The sampling of Afforest, Sutton et al., IPDPS 2018, for
lists that cost by the line.) Test: test_the_anchor_stays.

Rounds grow, in directed graphs too: trees are flat before many edges climb them.
"""

import torch

from pydirect.sampling import Graph
from pydirect.traversal.compressed import CompressedGraph
from pydirect.traversal.passes import Passes
from pydirect.traversal.placed import PlacedGraph
from pydirect.traversal.trees import flatten
from pydirect.traversal.visits import Link, Visitor
from pydirect.traversal.walk import Trace

# Nodes of each round, of 128; some next to one another, so that lists share lines.
_ROUNDS = (1, 3, 12, 48, 64)
_CHUNK_NODES = 64
# Of all nodes: less may never meet the giant component.
_ANCHOR_SHARE = 0.05


def connected_components(
    graph: Graph | CompressedGraph | PlacedGraph,
    *,
    trace: Trace | None = None,
    visitor: Visitor | None = None,
) -> torch.Tensor:
    """Find the weakly connected component of each node.

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
    nodes = torch.arange(placed.num_nodes, device=placed.device)
    parent = nodes.clone()
    turn = nodes // _CHUNK_NODES % sum(_ROUNDS)
    anchor: torch.Tensor | None = None
    first = 0
    for size in _ROUNDS:
        begun = passes.clock()
        wanted = placed.has_edges & (turn >= first) & (turn < first + size)
        first += size
        if anchor is not None:
            wanted &= parent != parent[anchor]
        frontier = placed.frontier(wanted.nonzero().squeeze(1))
        if frontier.num_nodes == 0:
            continue
        passes.visit(Link(parent=parent), frontier, begun=begun)
        flatten(parent)
        if anchor is None and placed.graph.symmetric:
            anchor = _large(parent)
    smallest = torch.full_like(nodes, placed.num_nodes)
    smallest.scatter_reduce_(0, parent, nodes, "amin")
    return smallest[parent]


def _large(parent: torch.Tensor) -> torch.Tensor | None:
    """Find a node of the largest component, shape (); None while that is small."""
    sizes = torch.bincount(parent, minlength=len(parent))
    most = sizes.argmax()
    return most if int(sizes[most]) >= _ANCHOR_SHARE * len(parent) else None
