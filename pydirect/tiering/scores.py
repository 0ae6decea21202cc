"""Which rows neighbour sampling will ask for: scores from the graph alone.

A node is read when a node that aggregates from it is sampled. So score flows from a
node to its neighbours (its sources), evenly: that is PageRank on the reversed edges.
"""

import enum
import itertools

import torch

from pydirect.sampling import Graph
from pydirect.sampling.graph import check_nodes

DAMPING = 0.85
_CPU = torch.device("cpu")
# Expanded at once, 16 bytes each.
_PIECE_EDGES = 1 << 26


class Score(enum.Enum):
    """How the heat of a row is foretold."""

    DEGREE = "degree"
    REVERSE_PAGERANK = "reverse_pagerank"
    WEIGHTED_REVERSE_PAGERANK = "weighted_reverse_pagerank"


def score_nodes(
    kind: Score,
    graph: Graph,
    train_nodes: torch.Tensor,
    num_hops: int,
    device: torch.device = _CPU,
) -> torch.Tensor:
    """Score every node: float64, shape (num_nodes,).

    Args:
        kind: which score.
        graph: nodes aggregate from their neighbours.
        train_nodes: int64, shape (num_train,): where sampling starts.
        num_hops: how deep it goes.
        device: that computes it; a GPU takes the edges in pieces.
    """
    if kind is Score.DEGREE:
        return degree_score(graph)
    if kind is Score.REVERSE_PAGERANK:
        return reverse_pagerank(graph, num_iterations=num_hops, device=device)
    return weighted_reverse_pagerank(
        graph, train_nodes, num_iterations=num_hops, device=device
    )


def degree_score(graph: Graph) -> torch.Tensor:
    """Count the nodes that aggregate from each: float64, shape (num_nodes,)."""
    counts = torch.bincount(graph.neighbors, minlength=graph.num_nodes)
    return counts.double()


def reverse_pagerank(
    graph: Graph,
    *,
    num_iterations: int = 5,
    damping: float = DAMPING,
    device: torch.device = _CPU,
) -> torch.Tensor:
    """Reverse PageRank from every node the same; see `weighted_reverse_pagerank`."""
    share = 1.0 / max(1, graph.num_nodes)
    start = torch.full((graph.num_nodes,), share, dtype=torch.float64, device="cpu")
    return _iterate(graph, start, num_iterations, damping, device)


def weighted_reverse_pagerank(
    graph: Graph,
    train_nodes: torch.Tensor,
    *,
    num_iterations: int = 5,
    damping: float = DAMPING,
    device: torch.device = _CPU,
) -> torch.Tensor:
    """Reverse PageRank that starts heavier at the nodes batches are made of.

    A few iterations and not convergence: sampling goes a few hops deep, and where it
    starts must not be forgotten (Algorithm 2).

    Args:
        graph: nodes aggregate from their neighbours.
        train_nodes: int64, shape (num_train,): weigh num_nodes / num_train at first.
        num_iterations: about the number of hops.
        damping: share of a score that flows on; the source does not state it.
        device: that computes it; a GPU takes the edges in pieces.

    Returns:
        float64, shape (num_nodes,), on the CPU.

    Raises:
        ValueError: no training node, or one that the graph does not have.
    """
    check_nodes("train_nodes", train_nodes, graph.num_nodes)
    if len(train_nodes) == 0:
        raise ValueError("train_nodes: expects at least one node")
    start = torch.full(
        (graph.num_nodes,), 1.0 / graph.num_nodes, dtype=torch.float64, device="cpu"
    )
    start[train_nodes] *= graph.num_nodes / len(train_nodes)
    return _iterate(graph, start, num_iterations, damping, device)


def hit_ratio(accesses: torch.Tensor, score: torch.Tensor, share: float) -> float:
    """Return the share of accesses that fall on the ``share`` of nodes with the
    highest score; 0 without accesses.

    Args:
        accesses: how often each node was read, shape (num_nodes,).
        score: shape (num_nodes,).
        share: of the nodes that are kept near, 0 to 1.
    """
    if not bool((accesses > 0).any()):
        return 0.0
    kept = score.argsort(descending=True, stable=True)[: round(share * len(score))]
    return float(accesses[kept].double().sum() / accesses.double().sum())


def _iterate(
    graph: Graph,
    score: torch.Tensor,
    num_iterations: int,
    damping: float,
    device: torch.device,
) -> torch.Tensor:
    score = score.to(device)
    offsets = graph.offsets.to(device)
    degrees = offsets.diff()
    base = (1.0 - damping) / max(1, graph.num_nodes)
    pieces = [
        (first, last, int(graph.offsets[first]), int(graph.offsets[last]))
        for first, last in _pieces(graph.offsets)
    ]
    for _ in range(num_iterations):
        # A node without neighbours pulls nothing: its share goes nowhere.
        share = score / degrees.clamp(min=1)
        pulled = torch.zeros_like(score)
        for first, last, begin, end in pieces:
            flow = torch.repeat_interleave(
                share[first:last], degrees[first:last], output_size=end - begin
            )
            pulled.index_add_(0, graph.neighbors[begin:end].to(device), flow)
        score = base + damping * pulled
    return score.cpu()


def _pieces(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """Cut ranges of nodes with about `_PIECE_EDGES` edges each."""
    num_edges, num_nodes = int(offsets[-1]), len(offsets) - 1
    bounds = torch.tensor(
        list(range(_PIECE_EDGES, num_edges, _PIECE_EDGES)), device="cpu"
    ).long()
    cuts = torch.searchsorted(offsets, bounds).tolist()
    marks = sorted({0, *cuts, num_nodes})
    return list(itertools.pairwise(marks))
