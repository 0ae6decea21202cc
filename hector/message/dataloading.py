"""DGL's mini-batches: `NeighborSampler` makes blocks, `DataLoader` walks over seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, default_collate

from hector.message.batching import batch
from hector.message.blocks import (
    Hop,
    Nodes,
    block_of,
    check_direction,
    drawn,
    edges_by_type,
    fanouts_of,
    hop_of,
    nodes_by_type,
)
from hector.message.graph import EID, NID, Graph
from hector.message.hetero import HeteroGraph, as_hetero
from hector.message.typed import EdgeType
from hector.tracing import untraced

Fanout = int | Mapping[Any, int]
Names = Sequence[str] | Mapping[Any, Sequence[str]]


class Hops(Protocol):
    """Another sampler of one hop, such as `pydirect.integrations.hops.KeyedHops`."""

    def hop(self, seeds: Mapping[str, Tensor], fanouts: Mapping[EdgeType, int]) -> Any:
        """Return an object with `node_ids` by type, seeds first, and `edge_index` and
        `edge_ids` by edge type."""
        ...


class BlockSampler:
    """Base of samplers of one's own: `sample_blocks` makes input nodes, the seeds and
    blocks."""

    of_edges = False
    """Whether seeds are edges."""

    def sample_blocks(
        self, g: Graph | HeteroGraph, seed_nodes: Nodes, exclude_eids: Any = None
    ) -> Any:
        """Return input nodes, the seeds, and blocks, the first layer's first."""
        raise NotImplementedError(
            f"{type(self).__name__} expects a method sample_blocks(g, seed_nodes)"
        )

    def sample(
        self, g: Graph | HeteroGraph, seed_nodes: Nodes, exclude_eids: Any = None
    ) -> Any:
        """Return a batch, as `sample_blocks`, without the edges `exclude_eids`."""
        if exclude_eids is None:
            return self.sample_blocks(g, seed_nodes)
        return self.sample_blocks(g, seed_nodes, exclude_eids)


class NeighborSampler(BlockSampler):
    """Make a block for each layer, the last layer's seeds first: neighbours are drawn
    for all sources of the block after, as DGL's sampler of this name does.

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
        prefetch_node_feats: Names | None = None,
        prefetch_labels: Names | None = None,
        prefetch_edge_feats: Names | None = None,
        output_device: torch.device | str | None = None,
        *,
        hops: Hops | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`fanouts`: edges a node for each layer and edge type, an int or by type; -1
        takes all. `prob` and `mask` name an edge feature to draw by. `hops` draws
        instead, by seeds and keys of its own. `prefetch_...` do nothing: features are
        gathered when they are read. `output_device`: where blocks are sent.

        Raises ValueError on outgoing edges, and on options that `hops` has of its own.
        """
        check_direction(edge_dir)
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
        self.hops, self.generator, self.output_device = hops, generator, output_device

    def _hop(
        self,
        graph: HeteroGraph,
        seeds: Mapping[str, Tensor],
        fanout: Fanout,
        without: Mapping[EdgeType, Tensor],
    ) -> Hop:
        fanouts = fanouts_of(graph, fanout)
        if self.hops is not None:
            if without:
                raise ValueError("expected no edges to exclude with hops, got some")
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
            without=without,
            generator=self.generator,
        )
        return hop_of(graph, seeds, ids)

    @untraced
    def sample_blocks(
        self, g: Graph | HeteroGraph, seed_nodes: Nodes, exclude_eids: Any = None
    ) -> Any:
        """Return input nodes, the seeds, and blocks, the first layer's first. Nodes
        are ids, by type where the graph has several. `exclude_eids`: edges that are in
        no block."""
        graph = as_hetero(g)
        without = edges_by_type(graph, exclude_eids)
        seeds = nodes_by_type(graph, seed_nodes)
        outputs = seeds
        blocks: list[HeteroGraph] = []
        for fanout in reversed(self.fanouts):
            block = block_of(graph, self._hop(graph, seeds, fanout, without))
            blocks.insert(0, block)
            seeds = {n: block.srcnodes[n].data[NID] for n in graph.ntypes}
        found: Any = (seeds, outputs, blocks)
        if len(graph.ntypes) == 1:
            (name,) = graph.ntypes
            found = (seeds[name], outputs[name], blocks)
        return found if self.output_device is None else _sent(found, self.output_device)


MultiLayerNeighborSampler = NeighborSampler


class MultiLayerFullNeighborSampler(NeighborSampler):
    """Make blocks of all neighbours."""

    def __init__(self, num_layers: int, **named: Any) -> None:
        super().__init__([-1] * num_layers, **named)


class ShaDowKHopSampler(NeighborSampler):
    """Make the graph of all nodes that blocks of these fan-outs draw, the seeds first
    (arXiv 2012.01380): input nodes, the seeds and that graph."""

    @untraced
    def sample(self, g: Any, seed_nodes: Nodes, exclude_eids: Any = None) -> Any:
        """Return a batch."""
        inputs, outputs, _ = self.sample_blocks(g, seed_nodes, exclude_eids)
        part = g.subgraph(inputs)
        for kind, ids in edges_by_type(as_hetero(g), exclude_eids).items():
            part.remove_edges(torch.isin(part[kind].edata[EID], ids), etype=kind)
        if self.output_device is not None:
            part = part.to(self.output_device)
        return inputs, outputs, part


class DataLoader:
    """Walk over seeds in batches, and sample each: what the sampler returns, which are
    input nodes, seeds and blocks of a `NeighborSampler`.

    Ids by type are mixed, as DGL mixes them. Batches are drawn in this process; on a
    GPU graph that is the GPU.
    """

    def __init__(
        self,
        graph: Graph | HeteroGraph,
        indices: Nodes,
        graph_sampler: BlockSampler,
        device: torch.device | str | None = None,
        use_ddp: bool = False,
        ddp_seed: int = 0,
        batch_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        **ways: Any,
    ) -> None:
        """`device`: where batches are sent; None: they stay with the graph. `generator`
        shuffles, on the CPU. `ways`: DGL's arguments of how batches are prepared
        (`num_workers`, `use_uva`, ...) do nothing: sampling here needs none.

        Raises ValueError on `use_ddp`: a rank is given its part of `indices`.
        """
        strange = sorted(set(ways) - WAYS)
        if strange:
            raise TypeError(f"expected arguments of {sorted(WAYS)}, got {strange}")
        if use_ddp:
            raise ValueError(
                "expected use_ddp=False; give each rank indices[rank::world_size], "
                "shuffled alike on all"
            )
        if batch_size < 1:
            raise ValueError(f"expected a batch_size of at least 1, got {batch_size}")
        self.graph, self.sampler, self.device = graph, graph_sampler, device
        whole = as_hetero(graph)
        seeds: Mapping[Any, Tensor]
        if getattr(graph_sampler, "of_edges", False):
            seeds = edges_by_type(whole, indices)
            self._plain = not isinstance(indices, Mapping)
        else:
            seeds = nodes_by_type(whole, indices)
            self._plain = len(seeds) == 1
        self._names = list(seeds)
        self._ids = torch.cat([s.cpu() for s in seeds.values()])
        sizes = torch.tensor([s.numel() for s in seeds.values()], device="cpu")
        self._kinds = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
        self.batch_size, self.drop_last = batch_size, drop_last
        self.shuffle, self.generator = shuffle, generator

    @contextmanager
    def enable_cpu_affinity(self, *_: Any, **__: Any) -> Iterator[None]:
        """Do nothing: there are no workers to bind to cores."""
        yield

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
            kinds, ids = self._kinds[part], self._ids[part].to(self.graph.device)
            kinds = kinds.to(ids.device)
            seeds: Any = {n: ids[kinds == k] for k, n in enumerate(self._names)}
            if self._plain:
                seeds = seeds[self._names[0]]
            found = self.sampler.sample(self.graph, seeds)
            yield found if self.device is None else _sent(found, self.device)


WAYS = {
    *("num_workers", "use_uva", "use_prefetch_thread", "use_alternate_streams"),
    *("pin_prefetcher", "gpu_cache", "persistent_workers", "pin_memory"),
    *("prefetch_factor", "worker_init_fn"),
}
"""Arguments of DGL's loaders that change no batch."""


class GraphDataLoader(TorchLoader[Any]):
    """Walk over a data set of graphs, or of (graph, label, ...): graphs are batched,
    other items stacked by PyTorch."""

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        collate_fn: Callable[[Any], Any] | None = None,
        use_ddp: bool = False,
        ddp_seed: int = 0,
        **named: Any,
    ) -> None:
        if use_ddp:
            raise ValueError(
                "expected use_ddp=False; give a sampler, such as PyTorch's "
                "DistributedSampler"
            )
        named["collate_fn"] = collate_fn or _collated
        super().__init__(cast("Dataset[Any]", dataset), **named)


def _collated(items: Sequence[Any]) -> Any:
    first = items[0]
    if isinstance(first, Graph | HeteroGraph):
        return batch(items)
    if isinstance(first, tuple):
        return tuple(map(_collated, zip(*items, strict=True)))
    return default_collate(list(items))


def _sent(found: Any, device: torch.device | str) -> Any:
    """Return tensors and graphs on a device, in what holds them."""
    if isinstance(found, Mapping):
        return {k: _sent(v, device) for k, v in found.items()}
    if isinstance(found, tuple | list):
        return type(found)(_sent(v, device) for v in found)
    return found.to(device) if hasattr(found, "to") else found
