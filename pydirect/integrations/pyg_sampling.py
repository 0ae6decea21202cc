"""PyTorch Geometric: neighbours drawn on the GPU, behind PyG's own loaders.

``NodeLoader(data, node_sampler=KeyedNeighborSampler(data, [15, 10]))`` and
``LinkLoader`` work as with PyG's sampler. Importing this imports torch_geometric.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from pydirect.region import in_forked_worker
from pydirect.sampling import (
    Graph,
    HeteroDeviceSampler,
    Residence,
    settle,
)
from pydirect.sampling.device import EdgeType
from pydirect.sampling.graph import one_each, plain, widened

_MOST_WORKERS = 1024
_NODE = ""
_ONLY: EdgeType = (_NODE, _NODE, _NODE)
Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]


class _Drawer(NamedTuple):
    """The graphs on one device."""

    sampler: HeteroDeviceSampler
    original: dict[EdgeType, torch.Tensor]
    """The data's number of each edge, by type."""


class KeyedNeighborSampler(BaseSampler):  # type: ignore[misc]
    """Draws with numbers that depend on seed, batch and node: see `pydirect.sampling`.

    Batches are counted: those of the n-th epoch differ from the first's, and a run
    with the same seed, the same order of batches and as many workers repeats, on GPU
    and CPU alike.
    """

    def __init__(
        self,
        data: Data | HeteroData,
        num_neighbors: Fanouts,
        *,
        device: torch.device | str = "auto",
        residence: Residence | str = Residence.DEVICE,
        replace: bool = False,
        weight_attr: str | None = None,
        seed: int = 0,
        output_device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            data: its edges are copied into lists; the features stay with the loader.
            num_neighbors: neighbours a node, hop by hop; for each edge type, or one
                for all; -1 for all neighbours.
            device: that samples; "auto" takes the GPU if there is one, and in workers
                of a loader the CPU. With a GPU named, loaders need ``num_workers=0``.
            residence: where the edges lie.
            replace: draw with replacement.
            weight_attr: edge attribute to draw in proportion to.
            seed: of all draws.
            output_device: where the loader indexes features: "cpu" as long as ``data``
                lies there.

        Raises:
            ValueError: no such attribute, or see `HeteroDeviceSampler`.
        """
        super().__init__()
        self._device = None if device == "auto" else torch.device(device)
        self._residence = residence
        self._hetero = isinstance(data, HeteroData)
        self._output = torch.device(output_device)
        self._seed, self._batches, self._process = seed, 0, os.getpid()
        self._workers = torch.zeros(
            _MOST_WORKERS, dtype=torch.int64, device="cpu"
        ).share_memory_()
        self._num_nodes = _num_nodes(data)
        self._is_weighted, self._replace = weight_attr is not None, replace
        self._graphs = {
            kind: _graph_of(data, kind, weight_attr) for kind in _kinds(data)
        }
        fanouts = num_neighbors
        if not isinstance(fanouts, Mapping):
            fanouts = dict.fromkeys(self._graphs, fanouts)
        self._fanouts = fanouts
        self._drawers: dict[torch.device, _Drawer] = {}
        self._drawer()  # what is wrong with the arguments is told here

    def _drawer(self) -> "_Drawer":
        """What draws in this process; made when it is asked for first."""
        device = self._device
        if device is None:
            # A forked process has no CUDA, and of others each would have a copy.
            is_worker = get_worker_info() is not None or in_forked_worker()
            is_gpu = not is_worker and torch.cuda.is_available()
            device = torch.device("cuda" if is_gpu else "cpu")
        found = self._drawers.get(device)
        if found is None:
            graphs, original = {}, {}
            for kind, (graph, order) in self._graphs.items():
                graphs[kind] = settle(
                    graph, device, self._residence, weighted=self._is_weighted
                )
                original[kind] = order.to(graphs[kind].device)
            sampler = HeteroDeviceSampler(
                graphs,
                self._num_nodes,
                self._fanouts,
                replace=self._replace,
                weighted=self._is_weighted,
            )
            found = self._drawers[device] = _Drawer(sampler, original)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Without what lies on a device: a started process makes its own."""
        return {**self.__dict__, "_drawers": {}}

    def sample_from_nodes(
        self, index: NodeSamplerInput, **_: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """See PyG's ``BaseSampler``.

        Raises:
            ValueError: times, which this sampler does not know.
        """
        _refuse_time(index.time)
        return node_sample(index, self._sample)

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        """See PyG's ``BaseSampler``.

        Raises:
            ValueError: times, which this sampler does not know.
        """
        _refuse_time(index.time)
        num_nodes = self._num_nodes if self._hetero else self._num_nodes[_NODE]
        return edge_sample(
            index, self._sample, num_nodes, False, neg_sampling=neg_sampling
        )

    @property
    def edge_permutation(self) -> None:
        """None: edges come out as the data numbers them."""
        return None

    def _sample(
        self, seed: torch.Tensor | dict[str, torch.Tensor], seed_time: object
    ) -> SamplerOutput | HeteroSamplerOutput:
        seeds = seed if isinstance(seed, dict) else {_NODE: seed}
        number = self._count()
        sampler, original = self._drawer()
        found = sampler.sample(seeds, self._seed, number)
        edges = {k: original[k][ids] for k, ids in found.edge_ids.items()}
        out = self._output
        if self._hetero:
            return HeteroSamplerOutput(
                node={t: ids.to(out) for t, ids in found.node_ids.items()},
                row={k: pair[0].to(out) for k, pair in found.edge_index.items()},
                col={k: pair[1].to(out) for k, pair in found.edge_index.items()},
                edge={k: ids.to(out) for k, ids in edges.items()},
                num_sampled_nodes={
                    t: list(hops) for t, hops in found.num_nodes_per_hop.items()
                },
                num_sampled_edges={
                    k: list(hops) for k, hops in found.num_edges_per_hop.items()
                },
            )
        source, target = found.edge_index[_ONLY].to(out)
        return SamplerOutput(
            node=found.node_ids[_NODE].to(out),
            row=source,
            col=target,
            edge=edges[_ONLY].to(out),
            num_sampled_nodes=list(found.num_nodes_per_hop[_NODE]),
            num_sampled_edges=list(found.num_edges_per_hop[_ONLY]),
        )

    def _count(self) -> int:
        """Number the batch: one number a batch of this sampler, whoever draws it.

        PyG's loader starts its workers anew for each epoch, each with a copy of this
        object as it was; so the n-th process that draws as worker i counts itself in
        memory that all of them share.
        """
        batch, worker = self._batches, get_worker_info()
        self._batches += 1
        if worker is None:
            return batch
        if worker.id >= _MOST_WORKERS:
            raise ValueError(
                f"num_workers: expects {_MOST_WORKERS} at most, got "
                f"{worker.num_workers}"
            )
        if self._process != os.getpid():
            self._process = os.getpid()
            self._workers[worker.id] += 1
        first = int(self._workers[worker.id]) << 32
        return (first + batch) * worker.num_workers + worker.id


def _refuse_time(time: torch.Tensor | None) -> None:
    if time is not None:
        raise ValueError(
            "time: KeyedNeighborSampler does not sample by time: use PyG's "
            "NeighborSampler for temporal graphs"
        )


def _kinds(data: Data | HeteroData) -> list[EdgeType]:
    return list(data.edge_types) if isinstance(data, HeteroData) else [_ONLY]


def _num_nodes(data: Data | HeteroData) -> dict[str, int]:
    if isinstance(data, HeteroData):
        return {t: int(data[t].num_nodes) for t in data.node_types}
    return {_NODE: int(data.num_nodes)}


def _graph_of(
    data: Data | HeteroData, kind: EdgeType, weight_attr: str | None
) -> tuple[Graph, torch.Tensor]:
    """The lists of one edge type, and the data's number of each of their edges."""
    store = data[kind] if isinstance(data, HeteroData) else data
    if store.edge_index is None:
        raise ValueError(f"data: expects edge_index of {kind}, got none")
    sizes = _num_nodes(data)
    source, target = plain(store.edge_index.cpu())
    order = torch.argsort(target, stable=True)
    offsets = torch.zeros(sizes[kind[2]] + 1, dtype=torch.int64, device="cpu")
    if len(target):
        low, high = (int(v) for v in torch.aminmax(target))
        if low < 0 or high >= sizes[kind[2]]:
            raise ValueError(
                f"data: expects targets of {kind} of 0 to {sizes[kind[2]] - 1}, got "
                f"{low} to {high}"
            )
    counts = torch.bincount(target, minlength=sizes[kind[2]])
    torch.cumsum(counts, 0, out=offsets[1:])
    neighbors = source[order]
    weights = None
    if weight_attr is not None:
        if weight_attr not in store:
            raise ValueError(
                f"weight_attr: expects an attribute of {kind}, got {weight_attr!r}"
            )
        weights = widened(one_each(store[weight_attr].cpu()))
        if weights.shape != order.shape:
            raise ValueError(
                f"weight_attr: expects one for each of {len(order)} edges of {kind}, "
                f"got {weight_attr!r} of shape {list(weights.shape)}"
            )
        weights = weights[order].contiguous()
    graph = Graph(
        offsets=offsets,
        neighbors=neighbors.int() if sizes[kind[0]] < 2**31 else neighbors,
        weights=weights,
        num_sources=sizes[kind[0]],
    )
    return graph, order
