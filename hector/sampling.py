"""Neighbour sampling of relational graphs, on the device that they lie on.

The samplers of other packages serve as well: `HeteroGraph.from_batch` takes their
batches. This one needs nothing but PyTorch.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from hector.graph import Grouping, HeteroGraph, subgraph
from hector.indexing import group_by, segment_ptr


class SampledBatch(NamedTuple):
    """A sampled subgraph."""

    graph: HeteroGraph
    node_ids: Tensor
    """int64 [graph.num_nodes], ascending: each node's id in the whole graph."""
    seeds: Tensor
    """int64 [num_seeds]: the rows of the seeds in the subgraph."""
    edge_ids: Tensor
    """int64 [num_edges]: stored edges of the whole graph, in the caller's order."""


class Drawn(NamedTuple):
    """What was drawn, before a graph is made of it."""

    node_ids: Tensor
    """int64 [num_nodes], ascending ids in the whole graph."""
    edge_ids: Tensor
    """int64 [num_edges]: stored edges of the whole graph."""
    seeds: Tensor
    """int64 [num_seeds]: the places of the seeds among `node_ids`."""


class FanoutOf(str, Enum):
    """What a fanout counts the in-edges of."""

    NODE = "node"
    """Of a node: relations are drawn in proportion, small ones often not at all."""
    RELATION = "relation"
    """Of a node in each relation, as PyG's loaders of heterogeneous graphs count. A
    mean over a relation is then an estimate of the whole graph's."""


class NeighborSampler:
    """Draws in-edges of the seeds, then of the nodes that these lead to, hop by hop.

    Of a node with more in-edges than the hop's fanout, that many are drawn without
    replacement, one of each of as many equal stretches of its edges.
    """

    def __init__(
        self,
        graph: HeteroGraph,
        fanouts: Sequence[int],
        fanouts_of: FanoutOf | str = FanoutOf.NODE,
    ) -> None:
        """`fanouts`: edges for each hop; -1 takes all."""
        if not fanouts or any(f < 1 and f != -1 for f in fanouts):
            raise ValueError(f"expected fanouts of at least 1, or -1, got {fanouts}")
        self.graph, self.fanouts = graph, tuple(fanouts)
        self.fanouts_of = FanoutOf(fanouts_of)
        self._taken = torch.zeros(graph.num_nodes, dtype=torch.bool).to(graph.device)
        if self.fanouts_of is FanoutOf.RELATION:
            # Stored edges lie relation by relation, and in it by destination.
            pairs = graph.unique_dst()
            self._pairs = group_by(pairs.unique_node, graph.num_nodes)
            self._pair_ptr = segment_ptr(pairs.edge_to_unique, pairs.num_unique)

    def sample(
        self, seeds: Tensor, generator: torch.Generator | None = None
    ) -> SampledBatch:
        """The subgraph around distinct `seeds` (int64, ids in the whole graph).

        `generator` lies on the graph's device. How many edges were drawn is read from
        the device once a hop.
        """
        found = self.draw(seeds, generator)
        made = subgraph(self.graph, found.node_ids, found.edge_ids)
        return SampledBatch(made, found.node_ids, found.seeds, found.edge_ids)

    def draw(self, seeds: Tensor, generator: torch.Generator | None = None) -> Drawn:
        """The nodes and edges of `sample`, for `hector.CapturedBatches`."""
        frontier, drawn = seeds, []
        self._taken[seeds] = True
        for fanout in self.fanouts:
            edges = self._draw(frontier, fanout, generator)
            drawn.append(edges)
            found = self.graph.src[edges]
            frontier = torch.unique(found[~self._taken[found]])
            self._taken[frontier] = True
        node_ids = self._taken.nonzero().flatten()
        self._taken[node_ids] = False
        edge_ids = torch.cat(drawn)
        return Drawn(node_ids, edge_ids, torch.searchsorted(node_ids, seeds))

    def _draw(
        self, nodes: Tensor, fanout: int, generator: torch.Generator | None
    ) -> Tensor:
        """Stored edges into `nodes`."""
        group = self.graph.csc()
        if fanout == -1:
            return _members(group, nodes)
        if self.fanouts_of is FanoutOf.NODE:
            ptr, chosen = group.ptr, nodes
        else:
            ptr, chosen = self._pair_ptr, _members(self._pairs, nodes)
        first = ptr[chosen]
        degree = (ptr[chosen + 1] - first)[:, None]
        draw = torch.arange(fanout, device=nodes.device)
        # Where all are taken, stretches are single edges.
        num = degree.clamp(max=fanout)
        low = draw * degree // num.clamp(min=1)
        size = (draw + 1) * degree // num.clamp(min=1) - low
        chance = torch.rand(low.shape, generator=generator, device=nodes.device)
        within = torch.minimum((chance * size).long(), size - 1)
        places = (first[:, None] + low + within)[draw < num]
        # The edges of a pair are stored side by side.
        return group.items[places] if self.fanouts_of is FanoutOf.NODE else places


def _members(group: Grouping, chosen: Tensor) -> Tensor:
    """The items of the chosen groups; waits for the device to count them."""
    first = group.ptr[chosen]
    size = group.ptr[chosen + 1] - first
    total = int(size.sum())
    begin = size.cumsum(0) - size
    shift = (first - begin).repeat_interleave(size, output_size=total)
    return group.items[shift + torch.arange(total, device=chosen.device)]
