"""PyTorch Geometric: neighbours drawn on the GPU, after PyG's own loaders.

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
from torch_geometric.sampler.base import NumNeighbors
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from pydirect.region import in_forked_worker
from pydirect.sampling import (
    Graph,
    HeteroBatch,
    HeteroDeviceSampler,
    Residence,
    settle,
)
from pydirect.sampling.device import EdgeType
from pydirect.sampling.graph import lists_of, one_each, plain, widened
from pydirect.sampling.trees import TreeSampler

_MOST_WORKERS = 1024
_NODE = ""
_ONLY: EdgeType = (_NODE, _NODE, _NODE)
Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]


class _Drawer(NamedTuple):
    """The graphs on one device."""

    sampler: HeteroDeviceSampler | TreeSampler
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
        num_neighbors: Fanouts | NumNeighbors,
        *,
        device: torch.device | str = "auto",
        residence: Residence | str = Residence.DEVICE,
        replace: bool = False,
        weight_attr: str | None = None,
        disjoint: bool = False,
        time_attr: str | None = None,
        temporal_strategy: str = "uniform",
        seed: int = 0,
        output_device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            data: its edges are copied into lists; the features stay with the loader.
            num_neighbors: neighbours a node, hop by hop; for each edge type, or one
                for all; -1 for all neighbours. None are drawn of types that a dict
                leaves out.
            device: that samples; "auto" takes the GPU if there is one, and in workers
                of a loader the CPU. With a GPU named, loaders need ``num_workers=0``.
            residence: where the edges lie.
            replace: draw with replacement.
            weight_attr: edge attribute to draw in proportion to.
            disjoint: each seed has a neighbourhood of its own; ``batch`` tells nodes'
                seeds.
            time_attr: attribute of edges or of nodes: a seed, whose neighbourhood is
                its own then, sees edges, or nodes, up to its time. Seeds without times
                have those of the nodes.
            temporal_strategy: "uniform" draws among what is seen, "last" takes the
                latest.
            seed: of all draws.
            output_device: where the loader indexes features: "cpu" as long as ``data``
                lies there.

        Raises:
            ValueError: no such attribute, or see `HeteroDeviceSampler` and
                `TreeSampler`.
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
        if temporal_strategy not in ("uniform", "last"):
            raise ValueError(
                f"temporal_strategy: expects uniform or last, got {temporal_strategy!r}"
            )
        self._latest = temporal_strategy == "last"
        self._disjoint = disjoint or time_attr is not None
        times = {k: _time_of(data, k, time_attr) for k in _kinds(data)}
        self._times = {k: t.cpu() for k, t in times.items() if t is not None}
        if time_attr is not None and not self._times:
            raise ValueError(
                f"time_attr: expects an attribute of edges or nodes, got {time_attr!r}"
            )
        self._node_times = _node_times(data, time_attr)
        self._graphs = {
            kind: _graph_of(data, kind, weight_attr, self._times.get(kind))
            for kind in _kinds(data)
        }
        self._fanouts = _fanouts_of(num_neighbors, list(self._graphs))
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
            graphs, original, times = {}, {}, {}
            for kind, (graph, order) in self._graphs.items():
                graphs[kind] = settle(
                    graph, device, self._residence, weighted=self._is_weighted
                )
                original[kind] = order.to(graphs[kind].device)
                if kind in self._times:
                    times[kind] = self._times[kind][order]
            sampler: HeteroDeviceSampler | TreeSampler
            if self._disjoint:
                sampler = TreeSampler(
                    graphs,
                    self._num_nodes,
                    self._fanouts,
                    times=times,
                    latest=self._latest,
                    replace=self._replace,
                    weighted=self._is_weighted,
                )
            else:
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
            ValueError: times of seeds, without ``time_attr``.
        """
        self._check_time(index.time)
        return node_sample(index, self._sample)

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        """See PyG's ``BaseSampler``.

        Raises:
            ValueError: times of seeds, without ``time_attr``.
        """
        self._check_time(index.time)
        num_nodes = self._num_nodes if self._hetero else self._num_nodes[_NODE]
        times = self._node_times
        return edge_sample(
            index,
            self._sample,
            num_nodes,
            self._disjoint,
            node_time=times if self._hetero else times.get(_NODE),
            neg_sampling=neg_sampling,
        )

    def _check_time(self, time: torch.Tensor | None) -> None:
        if time is not None and not self._times:
            raise ValueError(
                "time: expects a sampler with time_attr for times of seeds"
            )

    @property
    def edge_permutation(self) -> None:
        """None: edges come out as the data numbers them."""
        return None

    def _sample(
        self, seed: torch.Tensor | dict[str, torch.Tensor], seed_time: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        seeds = seed if isinstance(seed, dict) else {_NODE: seed}
        number = self._count()
        sampler, original = self._drawer()
        found: HeteroBatch
        trees: dict[str, torch.Tensor] = {}
        if isinstance(sampler, TreeSampler):
            times = self._seed_times(seeds, seed_time)
            made = sampler.sample(seeds, self._seed, number, times)
            trees = {t: ids.to(self._output) for t, ids in made.trees.items()}
            found = made
        else:
            found = sampler.sample(seeds, self._seed, number)
        edges = {k: original[k][ids] for k, ids in found.edge_ids.items()}
        out = self._output
        if self._hetero:
            return HeteroSamplerOutput(
                node={t: ids.to(out) for t, ids in found.node_ids.items()},
                row={k: pair[0].to(out) for k, pair in found.edge_index.items()},
                col={k: pair[1].to(out) for k, pair in found.edge_index.items()},
                edge={k: ids.to(out) for k, ids in edges.items()},
                batch=trees or None,
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
            batch=trees.get(_NODE),
            num_sampled_nodes=list(found.num_nodes_per_hop[_NODE]),
            num_sampled_edges=list(found.num_edges_per_hop[_ONLY]),
        )

    def _seed_times(
        self, seeds: dict[str, torch.Tensor], given: Any
    ) -> dict[str, torch.Tensor] | None:
        """Times of the seeds: as given, else those of the nodes."""
        if not self._times:
            return None
        if given is not None:
            return given if isinstance(given, dict) else {_NODE: given}
        missing = [t for t in seeds if t not in self._node_times]
        if missing:
            raise ValueError(
                f"time: expects times of the seeds (input_time=), nodes {missing} have "
                "none"
            )
        return {t: self._node_times[t][ids.cpu()] for t, ids in seeds.items()}

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


def _node_times(
    data: Data | HeteroData, time_attr: str | None
) -> dict[str, torch.Tensor]:
    if time_attr is None:
        return {}
    if isinstance(data, HeteroData):
        stores = {t: data[t] for t in data.node_types if time_attr in data[t]}
    else:
        stores = {_NODE: data} if data.is_node_attr(time_attr) else {}
    return {t: store[time_attr].cpu() for t, store in stores.items()}


def _fanouts_of(
    given: Fanouts | NumNeighbors, kinds: list[EdgeType]
) -> Mapping[EdgeType, Sequence[int]]:
    if isinstance(given, NumNeighbors):
        given = given.get_values(None if kinds == [_ONLY] else kinds)
    if not isinstance(given, Mapping):
        return dict.fromkeys(kinds, given)
    none = [0] * max(map(len, given.values()), default=1)
    return {**dict.fromkeys((k for k in kinds if k not in given), none), **given}


def _kinds(data: Data | HeteroData) -> list[EdgeType]:
    return list(data.edge_types) if isinstance(data, HeteroData) else [_ONLY]


def _num_nodes(data: Data | HeteroData) -> dict[str, int]:
    if isinstance(data, HeteroData):
        return {t: int(data[t].num_nodes) for t in data.node_types}
    return {_NODE: int(data.num_nodes)}


def _graph_of(
    data: Data | HeteroData,
    kind: EdgeType,
    weight_attr: str | None,
    time: torch.Tensor | None,
) -> tuple[Graph, torch.Tensor]:
    """The lists of one edge type, and the data's number of each of their edges."""
    store = data[kind] if isinstance(data, HeteroData) else data
    sizes = _num_nodes(data)
    source, target = _ends_of(store, kind)
    weights = None
    if weight_attr is not None:
        if weight_attr not in store:
            raise ValueError(
                f"weight_attr: expects an attribute of {kind}, got {weight_attr!r}"
            )
        weights = widened(one_each(store[weight_attr].cpu()))
        if weights.shape != target.shape:
            raise ValueError(
                f"weight_attr: expects one for each of {len(target)} edges of {kind}, "
                f"got {weight_attr!r} of shape {list(weights.shape)}"
            )
    try:
        return lists_of(
            target, source, sizes[kind[2]], sizes[kind[0]], weights=weights, by=time
        )
    except ValueError as error:
        raise ValueError(f"data: {kind}: {error}") from error


def _ends_of(store: Any, kind: EdgeType) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets: of ``edge_index``, or of ``adj_t`` alone, whose edges PyG
    numbers row by row."""
    if store.get("edge_index") is not None:
        source, target = plain(store.edge_index.cpu())
        return source, target
    adj = store.get("adj_t")
    if adj is None:
        raise ValueError(f"data: expects edge_index or adj_t of {kind}, got neither")
    if isinstance(adj, torch.Tensor):
        target, source = adj.cpu().to_sparse_coo().coalesce().indices()
    else:
        target, source, _ = adj.cpu().coo()
    return source, target


def _time_of(
    data: Data | HeteroData, kind: EdgeType, time_attr: str | None
) -> torch.Tensor | None:
    """The time of each edge: its own, or its source's; None where neither has one."""
    if time_attr is None:
        return None
    store = data[kind] if isinstance(data, HeteroData) else data
    if time_attr in store and store.is_edge_attr(time_attr):
        found: torch.Tensor = store[time_attr]
        return found
    nodes = data[kind[0]] if isinstance(data, HeteroData) else data
    if time_attr not in nodes:
        return None
    times: torch.Tensor = nodes[time_attr].cpu()[_ends_of(store, kind)[0]]
    return times
