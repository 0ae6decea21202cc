"""PageRank by power iteration.

[Note: Ranks in fixed point] Floating-point sums depend on the order of their terms, and
atomics have none. So a node's share of its rank travels as an integer, in units of
2**-62: sums are then the same in any order, and a run repeats bit by bit. Shares are at
most 1 in all, so a sum fits; the rounding, 2**-63 a share, is that of a double at ranks
of 1e-3 and finer than a float's at ranks of 1e-11.
"""

import math
import warnings

import torch

from pydirect.sampling import Graph
from pydirect.traversal.compressed import CompressedGraph
from pydirect.traversal.passes import Passes
from pydirect.traversal.placed import PlacedGraph
from pydirect.traversal.visits import Pull, Push, Visitor
from pydirect.traversal.walk import Trace

_ONE = float(1 << 62)
# Where no number of iterations is known to be enough.
_MOST_ITERATIONS = 100


def pagerank(
    graph: Graph | CompressedGraph | PlacedGraph,
    *,
    damping: float = 0.85,
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
    trace: Trace | None = None,
    visitor: Visitor | None = None,
) -> torch.Tensor:
    """Rank each node; nodes without edges give their rank to all (as networkx).

    Args:
        graph: lists of targets; an edge that is there twice counts twice, and weights
            are not read (networkx's ``weight=None``).
        damping: chance of following an edge, 0 to 1.
        tolerance: stop when the ranks, whose sum is 1, change by less than this in all
            (the L1 norm), whatever the number of nodes. networkx multiplies its ``tol``
            by that number. 0: run ``max_iterations`` without asking.
        max_iterations: stop there at the latest, with a warning. None: as many as any
            graph needs for ``tolerance`` with ``damping`` below 1; else 100.
        trace: collects what each iteration read, and ``trace.converged``.
        visitor: see `Passes`.

    Returns:
        float64, shape (num_nodes,), on the graph's device, with the sum 1.

    Warns:
        RuntimeWarning: the ranks still changed by ``tolerance`` or more in the last
            of ``max_iterations``.

    Raises:
        ValueError: ``damping`` outside 0 to 1, ``tolerance`` below 0, or
            ``max_iterations`` below 1.
    """
    if not 0 <= damping <= 1:
        raise ValueError(f"damping: expects 0 to 1, got {damping}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance: expects 0 or more, got {tolerance}")
    if max_iterations is None:
        max_iterations = _enough(damping, tolerance)
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
    change = 0.0
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
        if change < tolerance:
            break
    else:
        if tolerance > 0:
            warnings.warn(
                f"pagerank stopped after max_iterations={max_iterations} before it "
                f"converged: the ranks still change by {change:.3g} in all, tolerance "
                f"is {tolerance:.3g}. Set a larger max_iterations or tolerance",
                RuntimeWarning,
                stacklevel=2,
            )
    if trace is not None:
        trace.converged = change < tolerance
    return rank


def _enough(damping: float, tolerance: float) -> int:
    """Iterations after which the ranks of any graph change by less than ``tolerance``:
    iteration k changes them by ``2 * damping**k`` at most."""
    if not (0 < damping < 1 and 0 < tolerance < 2):
        return 1 if damping == 0 or tolerance >= 2 else _MOST_ITERATIONS
    return 2 + math.ceil(math.log(tolerance / 2) / math.log(damping))
