"""PageRank by power iteration.

[Note: Ranks in fixed point] Floating-point sums depend on the order of their terms, and
atomics have none. So a node's share of its rank travels as an integer, in units of
2**-62: sums are then the same in any order, and a run repeats bit by bit. Shares are at
most 1 in all, so a sum fits; the rounding, 2**-63 a share, is that of a double at ranks
of 1e-3 and finer than a float's at ranks of 1e-11.
"""

import torch

from pydirect.sampling import Graph
from pydirect.traversal.compressed import CompressedGraph
from pydirect.traversal.passes import Passes
from pydirect.traversal.placed import PlacedGraph
from pydirect.traversal.visits import Pull, Push, Visitor
from pydirect.traversal.walk import Trace

_ONE = float(1 << 62)


def pagerank(
    graph: Graph | CompressedGraph | PlacedGraph,
    *,
    damping: float = 0.85,
    tolerance: float = 1e-6,
    max_iterations: int = 100,
    trace: Trace | None = None,
    visitor: Visitor | None = None,
) -> torch.Tensor:
    """Rank each node; nodes without edges give their rank to all (as networkx).

    Args:
        graph: lists of targets; an edge that is there twice counts twice, and weights
            are not read (networkx's ``weight=None``).
        damping: chance of following an edge, 0 to 1.
        tolerance: stop when ranks change by less than ``num_nodes * tolerance`` in all.
        max_iterations: stop there at the latest; ``len(trace.steps)`` tells.
        trace: collects what each iteration read.
        visitor: see `Passes`.

    Returns:
        float64, shape (num_nodes,), on the graph's device, with the sum 1.

    Raises:
        ValueError: ``damping`` outside 0 to 1, ``tolerance`` below 0, or
            ``max_iterations`` below 1.
    """
    if not 0 <= damping <= 1:
        raise ValueError(f"damping: expects 0 to 1, got {damping}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance: expects 0 or more, got {tolerance}")
    if max_iterations < 1:
        raise ValueError(f"max_iterations: expects at least 1, got {max_iterations}")
    passes = Passes(graph, trace, visitor)
    placed, device = passes.placed, passes.placed.device
    num_nodes = placed.num_nodes
    rank = torch.full(
        (num_nodes,), 1.0 / max(1, num_nodes), dtype=torch.float64, device=device
    )
    degree = (placed.offsets[1:] - placed.offsets[:-1]).clamp(min=1)
    sums = torch.empty(num_nodes, dtype=torch.int64, device=device)
    # Backwards, one sum a list is written; forwards, one an edge.
    over, visit = (placed, Push) if placed.back is None else (placed.back, Pull)
    for _ in range(max_iterations):
        begun = passes.clock()
        sums.zero_()
        shares = (rank / degree * _ONE).long()
        lost = shares[~placed.has_edges].sum()
        operation = visit(sums=sums, shares=shares)
        passes.visit(operation, over.whole, begun=begun, over=over)
        received = (sums + lost // max(1, num_nodes)).double() / _ONE
        following = received * damping + (1.0 - damping) / max(1, num_nodes)
        # What rounding down has lost is dealt out again.
        following /= following.sum()
        change = float((following - rank).abs().sum())
        rank = following
        if change < num_nodes * tolerance:
            break
    return rank
