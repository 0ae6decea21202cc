"""Neighbour sampling on the device that trains.

The semantics are those of `NeighborSampler` (hop h samples neighbours of the nodes that
hop h - 1 has added; every node appears once in a batch), with draws that depend on
seed, batch, node and draw alone: see [Note: Keyed draws] in philox.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pydirect.sampling import philox
from pydirect.sampling.graph import check_one_type, is_integer
from pydirect.sampling.hop import CpuHopper, Draw, Hopper, Numbering
from pydirect.sampling.neighbor import SampledBatch
from pydirect.sampling.on_gpu import hopper_on
from pydirect.sampling.resident import ResidentGraph

EdgeType = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class HeteroBatch:
    """A sampled subgraph of several types of nodes and edges."""

    node_ids: dict[str, torch.Tensor]
    """int64: global ids of each type, the seeds first, as they were given, then hop by
    hop."""

    edge_index: dict[EdgeType, torch.Tensor]
    """int64, shape (2, num_edges): local sources and targets, hop by hop."""

    edge_ids: dict[EdgeType, torch.Tensor]
    """int64: the edges, as numbered in the graph of their type."""

    num_nodes_per_hop: dict[str, tuple[int, ...]]
    num_edges_per_hop: dict[EdgeType, tuple[int, ...]]


class HeteroDeviceSampler:
    """Samples batches of a heterogeneous graph. Holds scratch memory: one a thread."""

    def __init__(
        self,
        graphs: Mapping[EdgeType, ResidentGraph],
        num_nodes: Mapping[str, int],
        fanouts: Mapping[EdgeType, Sequence[int]],
        *,
        replace: bool = False,
        weighted: bool = False,
        hopper: Hopper | None = None,
    ) -> None:
        """
        Args:
            graphs: the sources of the edges of each type, listed at their targets; all
                on one device.
            num_nodes: of each type.
            fanouts: neighbours a node for each type and hop; -1 for all.
            replace: draw with replacement.
            weighted: draw in proportion to the weights.
            hopper: None takes the kernels on a GPU and CPU code elsewhere.

        Raises:
            ValueError: no edge types, fanouts that do not fit, weights missing, or
                several devices.
        """
        self._graphs = dict(graphs)
        check_graphs(graphs, num_nodes, fanouts, weighted=weighted)
        self._fanouts = {kind: tuple(fanouts[kind]) for kind in graphs}
        self.device = next(iter(self._graphs.values())).device
        self._replace, self._weighted = replace, weighted
        self._hopper = hopper or _hopper_of(self.device)
        self._known = {t: Numbering(n, self.device) for t, n in num_nodes.items()}

    @property
    def num_hops(self) -> int:
        return max(len(hops) for hops in self._fanouts.values())

    def sample(
        self, seeds: Mapping[str, torch.Tensor], seed: int, batch: int = 0
    ) -> HeteroBatch:
        """The neighbourhood of ``seeds``.

        Args:
            seeds: integers, nodes of each type; on any device. A node that is twice
                there has two rows, which draw the same neighbours.
            seed: random seed.
            batch: number of the batch: another one draws other numbers.

        Raises:
            ValueError: seeds that are not integers or no nodes, or of no known type.
        """
        key = philox.key_of(seed, batch)
        types = tuple(self._known)
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        for t in seeds:
            if t not in self._known:
                raise ValueError(f"seeds: expects node types {list(types)}, got {t!r}")
            if not is_integer(seeds[t].dtype) or seeds[t].dim() != 1:
                raise ValueError(
                    f"seeds: expects 1-D integers, got {seeds[t].dim()}-D "
                    f"{seeds[t].dtype}"
                )
        fresh = {
            t: seeds[t].to(self.device, torch.int64).contiguous()
            if t in seeds
            else empty
            for t in types
        }
        nodes: dict[str, list[torch.Tensor]] = {t: [fresh[t]] for t in types}
        edges: dict[EdgeType, list[torch.Tensor]] = {k: [] for k in self._graphs}
        ids: dict[EdgeType, list[torch.Tensor]] = {k: [] for k in self._graphs}
        begun: list[Numbering] = []
        try:
            for t in types:
                self._known[t].begin(fresh[t])
                begun.append(self._known[t])
            first = {t: 0 for t in types}
            for hop in range(self.num_hops):
                added: dict[str, list[torch.Tensor]] = {t: [] for t in types}
                numbered = {t: self._known[t].count for t in types}
                for relation, (kind, graph) in enumerate(self._graphs.items()):
                    draw = self._draw(kind, hop, key, relation)
                    frontier, known = fresh[kind[2]], self._known[kind[0]]
                    found = self._hopper.hop(graph, frontier, draw, known)
                    known.add(found.added)
                    added[kind[0]].append(found.added)
                    target = found.target + first[kind[2]]
                    edges[kind].append(torch.stack([found.source, target]))
                    ids[kind].append(found.edge)
                fresh = {t: torch.cat(added[t]) if added[t] else empty for t in types}
                first = numbered
                for t in types:
                    nodes[t].append(fresh[t])
        finally:
            ended = {t: k.end() for t, k in self._known.items() if k in begun}
        return HeteroBatch(
            node_ids=ended,
            edge_index={k: torch.cat(parts, dim=1) for k, parts in edges.items()},
            edge_ids={k: torch.cat(parts) for k, parts in ids.items()},
            num_nodes_per_hop={t: tuple(map(len, nodes[t])) for t in types},
            num_edges_per_hop={k: tuple(map(len, parts)) for k, parts in ids.items()},
        )

    def _draw(self, kind: EdgeType, hop: int, key: int, relation: int) -> Draw:
        hops = self._fanouts[kind]
        return Draw(
            fanout=hops[hop] if hop < len(hops) else 0,
            replace=self._replace,
            weighted=self._weighted,
            key=key,
            relation=relation,
        )


_NODE = ""
_ONLY: EdgeType = (_NODE, _NODE, _NODE)


class DeviceSampler:
    """Samples batches of one graph. Holds scratch memory: one a thread."""

    def __init__(
        self,
        graph: ResidentGraph,
        fanouts: Sequence[int],
        *,
        replace: bool = False,
        weighted: bool = False,
        hopper: Hopper | None = None,
    ) -> None:
        """See `HeteroDeviceSampler`; ``fanouts`` are neighbours a node, hop by hop."""
        check_one_type("DeviceSampler", graph)
        self._sampler = HeteroDeviceSampler(
            {_ONLY: graph},
            {_NODE: graph.num_nodes},
            {_ONLY: fanouts},
            replace=replace,
            weighted=weighted,
            hopper=hopper,
        )

    @property
    def device(self) -> torch.device:
        return self._sampler.device

    def sample(self, seeds: torch.Tensor, seed: int, batch: int = 0) -> SampledBatch:
        """The neighbourhood of ``seeds``, on the sampling device.

        Args:
            seeds: integers, shape (num_seeds,); on any device. A node that is twice
                there has two rows, which draw the same neighbours.
            seed: random seed.
            batch: number of the batch: another one draws other numbers.

        Raises:
            ValueError: seeds that are no nodes.
        """
        found = self._sampler.sample({_NODE: seeds}, seed, batch)
        return SampledBatch(
            node_ids=found.node_ids[_NODE],
            edge_index=found.edge_index[_ONLY],
            num_seeds=len(seeds),
            num_nodes_per_hop=found.num_nodes_per_hop[_NODE],
            num_edges_per_hop=found.num_edges_per_hop[_ONLY],
            edge_ids=found.edge_ids[_ONLY],
        )


def check_graphs(
    graphs: Mapping[EdgeType, ResidentGraph],
    num_nodes: Mapping[str, int],
    fanouts: Mapping[EdgeType, Sequence[int]],
    *,
    weighted: bool,
) -> None:
    """
    Raises:
        ValueError: no edge types, fanouts that do not fit, weights missing, or several
            devices.
    """
    if not graphs:
        raise ValueError("graphs: expects one for each edge type, got none")
    if fanouts.keys() != graphs.keys():
        raise ValueError(
            f"fanouts: expects one for each of {list(graphs)}, got {list(fanouts)}"
        )
    if len({graph.device for graph in graphs.values()}) > 1:
        raise ValueError("graphs: expects all on one device, got several")
    for kind, graph in graphs.items():
        hops = fanouts[kind]
        if not hops or any(k < -1 for k in hops):
            raise ValueError(
                f"fanouts: expects numbers of 0 or more (or -1) a hop, got {hops}"
            )
        if weighted and graph.running is None:
            raise ValueError(
                "weighted: expects a graph settled with weighted=True, got one without"
            )
        _check_sizes(kind, graph, num_nodes)


def _check_sizes(
    kind: EdgeType, graph: ResidentGraph, num_nodes: Mapping[str, int]
) -> None:
    for end in (kind[0], kind[2]):
        if end not in num_nodes:
            raise ValueError(f"num_nodes: expects the number of {end!r}, got none")
    if num_nodes[kind[2]] != graph.num_nodes:
        raise ValueError(
            f"num_nodes: expects {graph.num_nodes} of {kind[2]!r}, as the graph of "
            f"{kind} has, got {num_nodes[kind[2]]}"
        )
    sources = graph.num_nodes if graph.num_sources is None else graph.num_sources
    if num_nodes[kind[0]] != sources:
        raise ValueError(
            f"num_nodes: expects {sources} of {kind[0]!r}, as the sources of "
            f"{kind} are, got {num_nodes[kind[0]]}"
        )


def _hopper_of(device: torch.device) -> Hopper:
    return hopper_on(device) if device.type == "cuda" else CpuHopper()
