"""One hop at a time, for samplers that make a block of each: DGL's mini-batches.

``hector.message.dataloading.NeighborSampler(fanouts, hops=KeyedHops(...))`` draws its
blocks here: on the GPU if there is one, by keys, bit for bit as on a CPU.
"""

from collections.abc import Mapping

import torch

from pydirect.sampling import HeteroBatch, HeteroDeviceSampler, Residence, settle
from pydirect.sampling.device import EdgeType
from pydirect.sampling.graph import lists_of


class KeyedHops:
    """Draws the neighbours of given nodes, along edges of several types.

    Each call is a batch of its own: draws depend on seed, number of the call, node and
    relation alone.
    """

    def __init__(
        self,
        edges: Mapping[EdgeType, tuple[torch.Tensor, torch.Tensor]],
        num_nodes: Mapping[str, int],
        *,
        device: torch.device | str = "auto",
        residence: Residence | str = Residence.DEVICE,
        replace: bool = False,
        weights: Mapping[EdgeType, torch.Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            edges: sources and destinations by type, copied into lists.
            num_nodes: of each type.
            device: that samples; "auto" takes the GPU if there is one.
            residence: where the edges lie.
            replace: draw with replacement.
            weights: of the edges of every type, to draw in proportion to.
            seed: of all draws.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.seed, self.calls = seed, 0
        self._replace, self._weighted = replace, weights is not None
        self._num_nodes = dict(num_nodes)
        self._graphs, self._order = {}, {}
        for kind, (src, dst) in edges.items():
            graph, order = lists_of(
                dst,
                src,
                num_nodes[kind[2]],
                num_nodes[kind[0]],
                weights=None if weights is None else weights[kind],
            )
            self._graphs[kind] = settle(
                graph, device, residence, weighted=self._weighted
            )
            self._order[kind] = order.to(self._graphs[kind].device)
        self._samplers: dict[tuple[int, ...], HeteroDeviceSampler] = {}

    def hop(
        self, seeds: Mapping[str, torch.Tensor], fanouts: Mapping[EdgeType, int]
    ) -> HeteroBatch:
        """Neighbours of the seeds: at most ``fanouts`` of each type a node, -1 for all.

        Edges are numbered as the caller gave them, nodes seeds first.
        """
        key = tuple(fanouts[kind] for kind in self._graphs)
        sampler = self._samplers.get(key)
        if sampler is None:
            sampler = self._samplers[key] = HeteroDeviceSampler(
                self._graphs,
                self._num_nodes,
                {kind: [fanouts[kind]] for kind in self._graphs},
                replace=self._replace,
                weighted=self._weighted,
            )
        made = sampler.sample(seeds, self.seed, self.calls)
        self.calls += 1
        ids = {kind: self._order[kind][e] for kind, e in made.edge_ids.items()}
        made.edge_ids.update(ids)
        return made
