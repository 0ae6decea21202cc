"""PageRank by power iteration.

[Note: Ranks in fixed point] Floating-point sums depend on the order of their terms, and
atomics have none. So a node's share of its rank travels as an integer, in units of
2**-62: sums are then the same in any order, and a run repeats bit by bit. Shares are at
most 1 in all, so a sum fits; the rounding, 2**-63 a share, is that of a double at ranks
of 1e-3 and finer than a float's at ranks of 1e-11. With weights the share of a unit
of weight is a double, and its product with a weight is rounded down to such an integer.

[Note: Pull and weights] A node that pulls reads the weights of its own list. In a graph
whose edges are stored in both directions the two may differ in weight, so only a graph
placed with its reverse pulls weighted shares. Test: test_weighted_ranks.
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
_CHUNK_EDGES = 1 << 22
_LEAST_SUM = 1e-250


def pagerank(
    graph: Graph | CompressedGraph | PlacedGraph,
    *,
    damping: float = 0.85,
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
    weighted: bool = False,
    personalization: torch.Tensor | None = None,
    trace: Trace | None = None,
    visitor: Visitor | None = None,
) -> torch.Tensor:
    """Rank each node; nodes without edges give their rank to all (as networkx).

    Args:
        graph: lists of targets; an edge that is there twice counts twice.
        damping: chance of following an edge, 0 to 1.
        tolerance: stop when the ranks, whose sum is 1, change by less than this in all
            (the L1 norm), whatever the number of nodes. networkx multiplies its ``tol``
            by that number. 0: run ``max_iterations`` without asking.
        max_iterations: stop there at the latest, with a warning. None: as many as any
            graph needs for ``tolerance`` with ``damping`` below 1; else 100.
        weighted: a node gives each neighbour the share that the edge's weight has
            of the weights in its list; one with none but zeros gives to all. False:
            the same to each (networkx's ``weight=None``).
        personalization: one number of 0 or more a node, on any device: where the walk
            begins anew, and what nodes without edges give to (networkx's argument of
            that name). None: all nodes the same.
        trace: collects what each iteration read, and ``trace.converged``.
        visitor: see `Passes`.

    Returns:
        float64, shape (num_nodes,), on the graph's device, with the sum 1.

    Warns:
        RuntimeWarning: the ranks still changed by ``tolerance`` or more in the last
            of ``max_iterations``.

    Raises:
        ValueError: ``damping`` outside 0 to 1, ``tolerance`` below 0,
            ``max_iterations`` below 1, weights that are missing, below 0 or not finite,
            or a personalization that is not finite, below 0 or 0 everywhere.
    """
    most = _most(damping, tolerance, max_iterations)
    passes = Passes(graph, trace, visitor)
    placed, device = passes.placed, passes.placed.device
    num_nodes = placed.num_nodes
    rank = torch.full(
        (num_nodes,), 1.0 / max(1, num_nodes), dtype=torch.float64, device=device
    )
    start = None if personalization is None else _normed(personalization, placed)
    degree = placed.offsets[1:] - placed.offsets[:-1]
    if weighted:
        degree = weight_sums(placed.graph).to(device)
    dangling = degree == 0
    degree[dangling] = 1
    sums = torch.empty(num_nodes, dtype=torch.int64, device=device)
    # Backwards, one sum a list is written; forwards, one an edge.
    back = _reverse_with_weights(placed) if weighted else placed.back
    over, visit = (placed, Push) if back is None else (back, Pull)
    whole = over.frontier(None, weighted=True) if weighted else over.whole
    change = 0.0
    for _ in range(most):
        begun = passes.clock()
        sums.zero_()
        shares = rank / degree * _ONE
        lost = shares[dangling].long().sum()
        operation = visit(
            sums=sums, shares=shares if weighted else shares.long(), weighted=weighted
        )
        passes.visit(operation, whole, begun=begun, over=over)
        if start is None:
            received = (sums + lost // max(1, num_nodes)).double() / _ONE
            following = received * damping + (1.0 - damping) / max(1, num_nodes)
        else:
            given = (lost.double() / _ONE) * damping + (1.0 - damping)
            following = sums.double() / _ONE * damping + start * given
        # What rounding down has lost is dealt out again.
        following /= following.sum()
        change = float((following - rank).abs().sum())
        rank = following
        if change < tolerance:
            break
    else:
        if tolerance > 0:
            warnings.warn(
                f"pagerank stopped after max_iterations={most} before it "
                f"converged: the ranks still change by {change:.3g} in all, tolerance "
                f"is {tolerance:.3g}. Set a larger max_iterations or tolerance",
                RuntimeWarning,
                stacklevel=2,
            )
    if trace is not None:
        trace.converged = change < tolerance
    return rank


def _most(damping: float, tolerance: float, max_iterations: int | None) -> int:
    """Return how many iterations there are at most.

    Raises:
        ValueError: see `pagerank`.
    """
    if not 0 <= damping <= 1:
        raise ValueError(f"damping: expects 0 to 1, got {damping}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance: expects 0 or more, got {tolerance}")
    if max_iterations is None:
        return _enough(damping, tolerance)
    if max_iterations < 1:
        raise ValueError(f"max_iterations: expects at least 1, got {max_iterations}")
    return max_iterations


def _reverse_with_weights(placed: PlacedGraph) -> PlacedGraph | None:
    """See [Note: Pull and weights]."""
    back = placed.back
    return None if back is None or back is placed or back.weights is None else back


def _normed(personalization: torch.Tensor, placed: PlacedGraph) -> torch.Tensor:
    """Return it as float64 on the graph's device, with the sum 1.

    Raises:
        ValueError: see `pagerank`.
    """
    start = personalization.detach().to(placed.device, torch.float64)
    if start.shape != (placed.num_nodes,):
        raise ValueError(
            f"personalization: expects one number for each of {placed.num_nodes} "
            f"nodes, got shape {list(start.shape)}"
        )
    bad = ~(torch.isfinite(start) & (start >= 0))
    if bool(bad.any()):
        node = int(bad.int().argmax())
        raise ValueError(
            "personalization: expects finite numbers of 0 or more, got "
            f"{start[node].item()} for node {node}"
        )
    total = start.sum()
    if not 0 < float(total) < math.inf:
        raise ValueError(
            f"personalization: expects a finite sum above 0, got {float(total)}"
        )
    return start / total


def weight_sums(graph: Graph | CompressedGraph) -> torch.Tensor:
    """Add up the weights of each list: float64, shape (num_nodes,), CPU.

    Raises:
        ValueError: no weights, one below 0 or not finite, or a sum that is too large
            or too small for shares of it.
    """
    weights, offsets = graph.weights, graph.offsets
    if weights is None:
        raise ValueError(
            "weights: pagerank with weighted=True expects a graph with weights, got "
            "one without: pass weights to Graph"
        )
    sums = torch.empty(graph.num_nodes, dtype=torch.float64, device="cpu")
    first = 0
    while first < graph.num_nodes:
        begin = int(offsets[first])
        bound = torch.tensor(begin + _CHUNK_EDGES, device="cpu")
        last = int(torch.searchsorted(offsets, bound, right=True)) - 1
        last = max(first + 1, min(last, graph.num_nodes))
        part = weights[begin : int(offsets[last])].double()
        bad = ~(torch.isfinite(part) & (part >= 0))
        if bool(bad.any()):
            at = int(bad.int().argmax())
            raise ValueError(
                "weights: pagerank expects finite numbers of 0 or more, got "
                f"{part[at].item()} at edge {begin + at}"
            )
        sums[first:last] = torch.segment_reduce(
            part, "sum", offsets=offsets[first : last + 1] - begin
        )
        first = last
    extreme = (sums > 0) & ~((sums >= _LEAST_SUM) & (sums < math.inf))
    if bool(extreme.any()):
        node = int(extreme.int().argmax())
        raise ValueError(
            f"weights: pagerank expects lists whose weights add up to {_LEAST_SUM} or "
            f"more and stay finite, got {sums[node].item()} at node {node}: scale them"
        )
    return sums


def _enough(damping: float, tolerance: float) -> int:
    """Iterations after which the ranks of any graph change by less than ``tolerance``:
    iteration k changes them by ``2 * damping**k`` at most."""
    if not (0 < damping < 1 and 0 < tolerance < 2):
        if damping == 0:
            return 2  # the second one shows that nothing changes any more
        return 1 if tolerance >= 2 else _MOST_ITERATIONS
    return 2 + math.ceil(math.log(tolerance / 2) / math.log(damping))
