"""DGL's mini-batches: `NeighborSampler` makes blocks, `DataLoader` walks over seeds."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

from hector.message.blocks import (
    Hop,
    Nodes,
    block_of,
    drawn,
    fanouts_of,
    hop_of,
    nodes_by_type,
)
from hector.message.graph import NID, Graph
from hector.message.hetero import EdgeType, HeteroGraph, as_hetero
from hector.tracing import untraced

Fanout = int | Mapping[Any, int]


class Hops(Protocol):
    """Another sampler of one hop, such as `pydirect.integrations.hops.KeyedHops`."""

    def hop(self, seeds: Mapping[str, Tensor], fanouts: Mapping[EdgeType, int]) -> Any:
        """Return an object with `node_ids` by type, seeds first, and `edge_index` and
        `edge_ids` by edge type."""
        ...


class NeighborSampler:
    """Make a block for each layer, the last layer's seeds first: neighbours are drawn
    for all sources of the block behind, as DGL's sampler of this name does.

    For PyG's loaders, whose hops draw for new nodes alone, see `HeteroGraph.from_batch`
    of hector.
    """

    def __init__(
        self,
        fanouts: Sequence[Fanout],
        edge_dir: str = "in",
        prob: str | None = None,
        mask: str | None = None,
        replace: bool = False,
        *,
        hops: Hops | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`fanouts`: edges a node for each layer and edge type, an int or by type; -1
        takes all. `prob` and `mask` name an edge feature to draw by. `hops` draws
        instead, by seeds and keys of its own.

        Raises ValueError on outgoing edges, and on options that `hops` has of its own.
        """
        if edge_dir != "in":
            raise ValueError(
                f"expected edge_dir 'in', got {edge_dir!r}; sample from g.reverse()"
            )
        if prob is not None and mask is not None:
            raise ValueError("expected prob or mask, got both")
        if hops is not None and (prob or mask or replace or generator):
            raise ValueError(
                "expected hops without prob, mask, replace and generator, which are "
                "set where hops is made"
            )
        if not fanouts:
            raise ValueError("expected a fan-out for each layer, got none")
        self.fanouts, self.prob, self.replace = list(fanouts), prob or mask, replace
        self.hops, self.generator = hops, generator

    def _hop(
        self,
        graph: HeteroGraph,
        seeds: Mapping[str, Tensor],
        fanout: Fanout,
    ) -> Hop:
        fanouts = fanouts_of(graph, fanout)
        if self.hops is not None:
            made = self.hops.hop(seeds, fanouts)
            edges = {k: (e[0], e[1]) for k, e in made.edge_index.items()}
            sizes = {n: s.numel() for n, s in seeds.items()}
            return Hop(made.node_ids, sizes, edges, made.edge_ids)
        ids = drawn(
            graph,
            seeds,
            fanouts,
            prob=self.prob,
            replace=self.replace,
            generator=self.generator,
        )
        return hop_of(graph, seeds, ids)

    @untraced
    def sample(self, g: Graph | HeteroGraph, seed_nodes: Nodes) -> Any:
        """Return input nodes, the seeds, and blocks, the first layer's first. Nodes
        are ids, by type where the graph has several."""
        graph = as_hetero(g)
        seeds = nodes_by_type(graph, seed_nodes)
        outputs = seeds
        blocks: list[HeteroGraph] = []
        for fanout in reversed(self.fanouts):
            block = block_of(graph, self._hop(graph, seeds, fanout))
            blocks.insert(0, block)
            seeds = {n: block.srcnodes[n].data[NID] for n in graph.ntypes}
        if len(graph.ntypes) == 1:
            (name,) = graph.ntypes
            return seeds[name], outputs[name], blocks
        return seeds, outputs, blocks

    sample_blocks = sample


MultiLayerNeighborSampler = NeighborSampler


class MultiLayerFullNeighborSampler(NeighborSampler):
    """Make blocks of all neighbours."""

    def __init__(self, num_layers: int) -> None:
        super().__init__([-1] * num_layers)


class DataLoader:
    """Walk over seeds in batches, and sample each: input nodes, seeds, blocks.

    Ids by type are mixed, as DGL mixes them. Batches are drawn in this process; on a
    GPU graph that is the GPU.
    """

    def __init__(
        self,
        graph: Graph | HeteroGraph,
        indices: Nodes,
        graph_sampler: NeighborSampler,
        device: torch.device | str | None = None,
        *,
        batch_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        num_workers: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        """`device`: where blocks are sent; None: they stay with the graph. `generator`
        shuffles, on the CPU.

        Raises ValueError on workers: sampling here needs none.
        """
        if num_workers:
            raise ValueError(
                f"expected num_workers=0, got {num_workers}: blocks are sampled on the "
                "graph's device"
            )
        if batch_size < 1:
            raise ValueError(f"expected a batch_size of at least 1, got {batch_size}")
        self.graph, self.sampler, self.device = graph, graph_sampler, device
        whole = as_hetero(graph)
        seeds = nodes_by_type(whole, indices)
        self._names = list(seeds)
        self._ids = torch.cat([s.cpu() for s in seeds.values()])
        sizes = torch.tensor([s.numel() for s in seeds.values()], device="cpu")
        self._kinds = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
        self.batch_size, self.drop_last = batch_size, drop_last
        self.shuffle, self.generator = shuffle, generator

    def __len__(self) -> int:
        whole = self._ids.numel() / self.batch_size
        return int(whole) if self.drop_last else ceil(whole)

    def __iter__(self) -> Iterator[Any]:
        order = torch.arange(self._ids.numel(), device="cpu")
        if self.shuffle:
            order = torch.randperm(
                self._ids.numel(), generator=self.generator, device="cpu"
            )
        for i in range(len(self)):
            part = order[i * self.batch_size : (i + 1) * self.batch_size]
            kinds, ids = self._kinds[part], self._ids[part]
            seeds: Any = {n: ids[kinds == k] for k, n in enumerate(self._names)}
            if len(self._names) == 1:
                seeds = seeds[self._names[0]]
            inputs, outputs, blocks = self.sampler.sample(self.graph, seeds)
            if self.device is not None:
                inputs, outputs = (_sent(x, self.device) for x in (inputs, outputs))
                blocks = [b.to(self.device) for b in blocks]
            yield inputs, outputs, blocks


def _sent(nodes: Any, device: torch.device | str) -> Any:
    if isinstance(nodes, Tensor):
        return nodes.to(device)
    return {n: ids.to(device) for n, ids in nodes.items()}
