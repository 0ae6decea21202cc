"""Shortest paths from a source or several: Bellman-Ford by frontiers, nearest first."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pydirect.sampling import Graph
from pydirect.traversal.compressed import CompressedGraph
from pydirect.traversal.passes import Passes, sources_of
from pydirect.traversal.placed import PlacedGraph
from pydirect.traversal.visits import Relax, Visitor
from pydirect.traversal.walk import Trace

_LARGEST = torch.iinfo(torch.int64).max
_SAMPLE = 1 << 20


def sssp(
    graph: Graph | CompressedGraph | PlacedGraph,
    source: int | Iterable[int],
    *,
    delta: float | None = None,
    trace: Trace | None = None,
    visitor: Visitor | None = None,
) -> torch.Tensor:
    """Measure the shortest paths from ``source``, or the nearest of several.

    Nodes nearer than a moving bound go first, so that few lists are read twice (the
    near and far piles of Davidson et al., IPDPS 2014).

    Args:
        graph: lists of targets, with weights of 0 or more.
        source: node, or several.
        delta: how far the bound moves; None: the mean weight. It changes how much is
            read, not the result.
        trace: collects what each pass read.
        visitor: see `Passes`.

    Returns:
        Shape (num_nodes,), on the graph's device: int64 for integer weights, -1 where
        no path leads; float64 for others, infinite there.

    Raises:
        ValueError: no weights, a weight below 0 or not a number, integer weights whose
            path lengths may exceed int64, ``source`` out of range.
    """
    passes = Passes(graph, trace, visitor)
    placed = passes.placed
    sources = sources_of(source, placed.num_nodes)
    weights = check_weights(placed.graph)
    if delta is None:
        delta = weights.mean
    elif not delta > 0:
        raise ValueError(f"delta: expects more than 0, got {delta}")
    distance = _Distances(placed, sources, integer=weights.integer)
    marks = torch.zeros(placed.num_nodes, dtype=torch.uint8, device=placed.device)
    marks[sources] = 1
    relax = Relax(distance=distance.bits, marks=marks)
    bound = delta
    while True:
        begun = passes.clock()
        pending = (marks > 0) & placed.has_edges
        near = (pending & distance.below(bound)).nonzero().squeeze(1)
        if len(near) == 0:
            nearest = distance.least(pending)
            if nearest is None:
                return distance.result()
            bound = max(nearest + delta, math.nextafter(nearest, math.inf))
            continue
        marks[near] = 0
        passes.visit(relax, placed.frontier(near, weighted=True), begun=begun)


@dataclass(frozen=True, kw_only=True)
class _Weights:
    integer: bool
    mean: float


def check_weights(graph: Graph | CompressedGraph) -> _Weights:
    """Check what `sssp` asks of weights.

    Raises:
        ValueError: see `sssp`.
    """
    weights = graph.weights
    if weights is None:
        raise ValueError(
            "weights: sssp expects a graph with weights, got one without: pass "
            "weights to Graph, or use bfs"
        )
    if len(weights) == 0:
        return _Weights(integer=not weights.is_floating_point(), mean=1.0)
    low, high = (v.item() for v in torch.aminmax(weights))
    if not low >= 0:  # neither does NaN, which aminmax hands on
        at = int((~(weights >= 0)).nonzero()[0])
        raise ValueError(
            f"weights: sssp expects 0 or more, got {weights[at].item()} at edge {at}"
        )
    integer = not weights.is_floating_point()
    if integer and high * max(1, graph.num_nodes - 1) >= _LARGEST:
        raise ValueError(
            f"weights: paths over {graph.num_nodes} nodes with weights up to {high} "
            "may be longer than int64 holds: use float64 weights"
        )
    step = max(1, len(weights) // _SAMPLE)
    sample = weights[::step].double()
    mean = float(sample[torch.isfinite(sample)].mean().nan_to_num(1.0))
    return _Weights(integer=integer, mean=mean if mean > 0 else 1.0)


class _Distances:
    """Distances as the kernels keep them; see [Note: Distances as integers]."""

    def __init__(
        self, placed: PlacedGraph, sources: list[int], *, integer: bool
    ) -> None:
        self._integer = integer
        dtype = torch.int64 if integer else torch.float64
        self._values = torch.full(
            (placed.num_nodes,),
            _LARGEST if integer else torch.inf,
            dtype=dtype,
            device=placed.device,
        )
        self._values[sources] = 0
        self.bits = self._values.view(torch.int64)

    def below(self, bound: float) -> torch.Tensor:
        """Mark the nodes that are nearer than ``bound``."""
        if self._integer:
            bound = min(math.ceil(bound), _LARGEST) if bound < _LARGEST else _LARGEST
        return self._values < bound

    def least(self, pending: torch.Tensor) -> float | None:
        """Return the smallest distance of the pending nodes, None without any."""
        left = self._values[pending]
        return left.min().item() if len(left) else None

    def result(self) -> torch.Tensor:
        if self._integer:
            self._values[self._values == _LARGEST] = -1
        return self._values
