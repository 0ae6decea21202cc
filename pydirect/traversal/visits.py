"""What happens at each edge of a frontier, and who runs it."""

from dataclasses import dataclass
from typing import Protocol

import torch

from pydirect.traversal.placed import Frontier, PlacedGraph


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Give neighbours that have no level the level ``now + 1``."""

    level: torch.Tensor
    """int32, shape (num_nodes,): -1 where not reached."""

    seen: torch.Tensor
    """int32: a bit for each node that has a level, as `seen_bits` makes them; kernels
    keep them, and forward steps of the CPU's code need none."""

    now: int


@dataclass(frozen=True, kw_only=True)
class Relax:
    """Lower the distances of neighbours; mark those that fell."""

    distance: torch.Tensor
    """int64, shape (num_nodes,): distances, or the bits of float64 distances; see
    [Note: Distances as integers] in visit.cu."""

    marks: torch.Tensor
    """uint8, shape (num_nodes,)."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Join the trees of a node and its neighbours."""

    parent: torch.Tensor
    """int64, shape (num_nodes,): roots are their own parents."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """Add a node's share to its neighbours."""

    sums: torch.Tensor
    """int64, shape (num_nodes,)."""

    shares: torch.Tensor
    """Shape (num_nodes,): int64, or with ``weighted`` float64, of each unit of weight;
    products are rounded towards 0."""

    weighted: bool = False
    """Multiply by the weight of the edge."""


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Add the neighbours' shares to a node."""

    sums: torch.Tensor
    shares: torch.Tensor
    weighted: bool = False


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Give nodes that look for one the smallest predecessor on a shortest path."""

    predecessor: torch.Tensor
    """int64, shape (num_nodes,): larger than any node where none is found."""

    distance: torch.Tensor
    """int64, or the bits of float64 distances, as in `Relax`."""

    wanted: torch.Tensor
    """uint8, shape (num_nodes,): the nodes that look for one."""

    level: bool
    """Whether to take edges that add nothing to the distance; the others if not."""

    weighted: bool
    """Edges add their weights; 1 if not."""


Operation = Mark | Relax | Link | Push | Pull | Tree


def reads_weights(operation: Operation) -> bool:
    """Return whether an operation reads the weights of edges."""
    if isinstance(operation, Push | Pull | Tree):
        return operation.weighted
    return isinstance(operation, Relax)


def seen_bits(level: torch.Tensor) -> torch.Tensor:
    """Set a bit for each node with a level: int32, 32 nodes a word, lowest first."""
    words = -(-len(level) // 32)
    reached = torch.zeros(32 * words, dtype=torch.bool, device=level.device)
    reached[: len(level)] = level >= 0
    place = torch.arange(32, dtype=torch.int64, device=level.device)
    parts = reached.view(words, 32) << place
    # The highest bit makes a word negative.
    return parts.sum(1).to(torch.int32)


class Visitor(Protocol):
    """Runs operations over the edges of a `PlacedGraph`."""

    def visit(
        self, placed: PlacedGraph, frontier: Frontier, operation: Operation
    ) -> None:
        """Apply ``operation`` to each edge of the frontier once."""
        ...

    def search(self, placed: PlacedGraph, frontier: Frontier, mark: Mark) -> int:
        """Give nodes of the frontier that have a neighbour of level ``mark.now`` the
        next level; returns the bytes read."""
        ...
