"""Neighbour sampling of relational graphs, on the device that they lie on.

The samplers of other packages serve as well: `HeteroGraph.from_batch` takes their
batches. This one needs nothing but PyTorch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hector.graph import HeteroGraph, subgraph


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


class NeighborSampler:
    """Draws in-edges of the seeds, then of the nodes that these lead to, hop by hop.

    Of a node with more in-edges than the hop's fanout, that many are drawn without
    replacement, one of each of as many equal stretches of its edges. They lie relation
    by relation, so relations are drawn in proportion.
    """

    def __init__(self, graph: HeteroGraph, fanouts: Sequence[int]) -> None:
        """`fanouts`: edges a node for each hop; -1 takes all."""
        if not fanouts or any(f < 1 and f != -1 for f in fanouts):
            raise ValueError(f"expected fanouts of at least 1, or -1, got {fanouts}")
        self.graph, self.fanouts = graph, tuple(fanouts)
        self._taken = torch.zeros(graph.num_nodes, dtype=torch.bool).to(graph.device)

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
        first = group.ptr[nodes]
        degree = group.ptr[nodes + 1] - first
        if fanout == -1:
            total = int(degree.sum())
            begin = degree.cumsum(0) - degree
            shift = (first - begin).repeat_interleave(degree, output_size=total)
            return group.items[shift + torch.arange(total, device=nodes.device)]
        draw = torch.arange(fanout, device=nodes.device)
        degree = degree[:, None]
        # Where all are taken, stretches are single edges.
        num = degree.clamp(max=fanout)
        low = draw * degree // num.clamp(min=1)
        size = (draw + 1) * degree // num.clamp(min=1) - low
        chance = torch.rand(low.shape, generator=generator, device=nodes.device)
        within = torch.minimum((chance * size).long(), size - 1)
        places = (first[:, None] + low + within)[draw < num]
        return group.items[places]
