"""Unique (edge type, node) pairs of a graph's edges (Wu, section 3.3.2)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hector.indexing import Grouping, group_by
from hector.kept import apart


@dataclass(frozen=True, kw_only=True, eq=False)
class CompactMap:
    """The unique (edge type, node) pairs of a graph's edges, sorted by edge type.

    A tensor that depends on nothing but the edge type and one endpoint needs one
    row a pair and not one an edge: compact materialization (Wu, section 3.3.2).
    """

    unique_node: Tensor
    """int64 [num_unique]: the node of each pair, ascending inside an edge type."""
    etype_ptr: Tensor
    """int64 [num_edge_types + 1]: segment of each edge type in `unique_node`."""
    edge_to_unique: Tensor
    """int64 [num_edges]: the pair of each stored edge."""
    num_nodes: int
    real: Tensor | None = None
    """bool [num_unique]: which pairs exist; None: all. The others stand after them:
    see `bounded_map`."""

    @property
    def num_unique(self) -> int:
        return self.unique_node.numel()

    @cached_property
    def etype_offsets(self) -> tuple[int, ...]:
        """`etype_ptr` on the host; one copy from the device, on first use."""
        return tuple(self.etype_ptr.tolist())

    @cached_property
    def _edges(self) -> Grouping:
        with apart():
            return group_by(self.edge_to_unique, self.num_unique)

    @cached_property
    def _by_node(self) -> Grouping:
        with apart():
            nodes = self.unique_node
            if self.real is not None:
                # Behind all nodes: in no node's group.
                nodes = nodes.masked_fill(~self.real, self.num_nodes)
            return group_by(nodes, self.num_nodes)

    def edges(self) -> Grouping:
        """The edges of each pair: the inverse of `edge_to_unique`."""
        return self._edges

    def by_node(self) -> Grouping:
        """The pairs of each node: what a node's gradient sums over."""
        return self._by_node


def compact_map(
    edge_type: Tensor, node: Tensor, num_edge_types: int, num_nodes: int
) -> CompactMap:
    """The pairs of parallel int64 arrays [num_edges] of types and nodes."""
    step = max(num_nodes, 1)
    # The combined key sorts by edge type first, then by node.
    pairs, inverse = torch.unique(
        edge_type * step + node, sorted=True, return_inverse=True
    )
    bounds = torch.arange(num_edge_types + 1, device=node.device) * step
    ptr = torch.searchsorted(pairs, bounds)
    return CompactMap(
        unique_node=pairs % step,
        etype_ptr=ptr,
        edge_to_unique=inverse,
        num_nodes=num_nodes,
    )


def bounded_map(
    edge_type: Tensor, node: Tensor, num_edge_types: int, num_nodes: int
) -> CompactMap:
    """The same map with one row an edge, without waiting for the device.

    How many pairs there are is known to the device alone, so there are as many rows as
    edges; those after the pairs belong to no edge type, edge or node.
    """
    step = max(num_nodes, 1)
    ordered, order = torch.sort(edge_type * step + node)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    number = first.cumsum(0) - 1
    beyond = num_edge_types * step
    pairs = torch.full_like(ordered, beyond).scatter_(0, number, ordered)
    bounds = torch.arange(num_edge_types + 1, device=node.device) * step
    return CompactMap(
        unique_node=pairs % step,
        etype_ptr=torch.searchsorted(pairs, bounds),
        edge_to_unique=torch.empty_like(order).scatter_(0, order, number),
        num_nodes=num_nodes,
        real=pairs < beyond,
    )
