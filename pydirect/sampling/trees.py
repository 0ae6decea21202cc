"""Neighbourhoods that share no nodes: one tree a seed, by time if edges have one.

[Note: Draws of trees] Node i of tree t draws as node t * num_nodes + i would: trees
differ, and the first one is the neighbourhood that `HeteroDeviceSampler` draws of its
seed alone. Lists are sorted by time, so what a tree may see of one is a run from its
begin, and draws are those of a shorter list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from pydirect.sampling import philox
from pydirect.sampling.device import EdgeType, HeteroBatch, check_graphs
from pydirect.sampling.hop import Draw, drawn_edges
from pydirect.sampling.resident import ResidentGraph


@dataclass(frozen=True, kw_only=True)
class TreeBatch(HeteroBatch):
    """A subgraph of several types of nodes and edges, a tree a seed."""

    trees: dict[str, torch.Tensor]
    """int64: the tree of each node. Trees are counted over the types of the seeds."""


class _Numbers:
    """The numbers of one type's nodes in a batch, by (tree, node)."""

    def __init__(self, trees: torch.Tensor, nodes: torch.Tensor, num: int) -> None:
        self.num = max(num, 1)
        self.keys = trees * self.num + nodes
        """tree * num + node, by number."""
        self.bounds = [0, len(nodes)]
        """Where each hop's nodes begin; the last is how many there are."""

    def number(self, keys: torch.Tensor) -> torch.Tensor:
        """Numbers of drawn nodes; new ones are counted on in the order of the draws."""
        every, which = torch.cat((self.keys, keys)).unique(return_inverse=True)
        at = torch.arange(len(which), device=keys.device)
        first = torch.full_like(every, len(which))
        first.scatter_reduce_(0, which, at, "amin")
        order = torch.argsort(first)
        rank = torch.empty_like(order)
        rank[order] = at[: len(order)]
        found = rank[which[len(self.keys) :]]
        self.keys = every[order]
        return found


class TreeSampler:
    """Samples a tree of each seed; a seed that is there twice has two."""

    def __init__(
        self,
        graphs: Mapping[EdgeType, ResidentGraph],
        num_nodes: Mapping[str, int],
        fanouts: Mapping[EdgeType, Sequence[int]],
        *,
        times: Mapping[EdgeType, torch.Tensor] | None = None,
        latest: bool = False,
        replace: bool = False,
        weighted: bool = False,
    ) -> None:
        """
        Args:
            graphs: as of `HeteroDeviceSampler`.
            num_nodes: of each type.
            fanouts: neighbours a node for each type and hop; -1 for all.
            times: of the edges of some types, int64, ascending in each list; a tree
                sees edges up to its time. Edges of other types have none.
            latest: take the last edges that a tree sees instead of drawing.
            replace: draw with replacement.
            weighted: draw in proportion to the weights.

        Raises:
            ValueError: as `HeteroDeviceSampler`; times that fall inside a list; weights
                next to times, or latest without times.
        """
        check_graphs(graphs, num_nodes, fanouts, weighted=weighted)
        self._graphs, self._num_nodes = dict(graphs), dict(num_nodes)
        self._fanouts = {kind: tuple(fanouts[kind]) for kind in graphs}
        self.device = next(iter(graphs.values())).device
        self._times = {k: t.to(self.device) for k, t in (times or {}).items()}
        if self._times and weighted:
            raise ValueError("weighted: expects edges without times")
        if latest and (not self._times or replace):
            raise ValueError("latest: expects times, and draws without replacement")
        for kind, time in self._times.items():
            _check_times(kind, self._graphs[kind], time)
        self._latest, self._replace, self._weighted = latest, replace, weighted

    def sample(
        self,
        seeds: Mapping[str, torch.Tensor],
        seed: int,
        batch: int = 0,
        times: Mapping[str, torch.Tensor] | None = None,
    ) -> TreeBatch:
        """The trees of ``seeds``.

        Args:
            seeds: integers, nodes of each type.
            seed: random seed.
            batch: number of the batch: another one draws other numbers.
            times: of each seed.

        Raises:
            ValueError: seeds that are no nodes; times missing, or not one a seed.
        """
        if self._times and times is None:
            raise ValueError("times: expects one a seed where edges have times")
        key = philox.key_of(seed, batch)
        known, limit = self._begin(seeds, times)
        edges: dict[EdgeType, list[torch.Tensor]] = {k: [] for k in self._graphs}
        ids: dict[EdgeType, list[torch.Tensor]] = {k: [] for k in self._graphs}
        for hop in range(max(map(len, self._fanouts.values()))):
            for relation, kind in enumerate(self._graphs):
                begin, end = known[kind[2]].bounds[-2:]
                owners = known[kind[2]].keys[begin:end]
                draw = self._draw(kind, hop, key, relation)
                trees, edge, target = self._hop(kind, owners, limit, draw)
                other = known[kind[0]]
                drawn = self._graphs[kind].neighbors_at(edge)
                sources = other.number(trees[target] * other.num + drawn)
                edges[kind].append(torch.stack([sources, target + begin]))
                ids[kind].append(edge)
            for numbers in known.values():
                numbers.bounds.append(len(numbers.keys))
        return TreeBatch(
            node_ids={n: known[n].keys % known[n].num for n in self._num_nodes},
            edge_index={k: torch.cat(parts, dim=1) for k, parts in edges.items()},
            edge_ids={k: torch.cat(parts) for k, parts in ids.items()},
            num_nodes_per_hop={
                n: tuple(b - a for a, b in pairwise(known[n].bounds))
                for n in self._num_nodes
            },
            num_edges_per_hop={k: tuple(map(len, parts)) for k, parts in ids.items()},
            trees={n: known[n].keys // known[n].num for n in self._num_nodes},
        )

    def _begin(
        self,
        seeds: Mapping[str, torch.Tensor],
        times: Mapping[str, torch.Tensor] | None,
    ) -> tuple[dict[str, _Numbers], torch.Tensor]:
        """The seeds of each type, and the time of each tree."""
        known: dict[str, _Numbers] = {}
        ends, count = [], 0
        for name in (*seeds, *(n for n in self._num_nodes if n not in seeds)):
            nodes = self._checked(name, seeds.get(name))
            trees = torch.arange(count, count + len(nodes), device=self.device)
            known[name] = _Numbers(trees, nodes, self._num_nodes[name])
            count += len(nodes)
            ends.append(_times_of(name, times, nodes))
        return known, torch.cat(ends)

    def _hop(
        self, kind: EdgeType, owners: torch.Tensor, limit: torch.Tensor, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The trees of ``owners``, edges drawn for them, and the owner of each edge."""
        graph, num = self._graphs[kind], max(self._num_nodes[kind[2]], 1)
        trees, nodes = owners // num, owners % num
        low, high = graph.offsets[nodes], graph.offsets[nodes + 1]
        if kind in self._times:
            high = _upto(self._times[kind], low, high, limit[trees])
            if self._latest and draw.fanout >= 0:
                low = torch.maximum(low, high - draw.fanout)
        edge, target = drawn_edges(graph, nodes, owners, (low, high), draw)
        return trees, edge, target

    def _checked(self, name: str, nodes: torch.Tensor | None) -> torch.Tensor:
        if name not in self._num_nodes:
            raise ValueError(
                f"seeds: expects node types {list(self._num_nodes)}, got {name!r}"
            )
        if nodes is None:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        nodes = nodes.to(self.device, torch.int64)
        num = self._num_nodes[name]
        if len(nodes) and not 0 <= int(nodes.min()) <= int(nodes.max()) < num:
            raise ValueError(
                f"seeds: expects nodes 0 to {num - 1}, got {int(nodes.min())} to "
                f"{int(nodes.max())}"
            )
        return nodes

    def _draw(self, kind: EdgeType, hop: int, key: int, relation: int) -> Draw:
        hops = self._fanouts[kind]
        return Draw(
            fanout=hops[hop] if hop < len(hops) else 0,
            replace=self._replace,
            weighted=self._weighted,
            key=key,
            relation=relation,
        )


def _times_of(
    name: str, times: Mapping[str, torch.Tensor] | None, nodes: torch.Tensor
) -> torch.Tensor:
    if times is None or not len(nodes):
        return torch.zeros_like(nodes)
    found = times.get(name)
    if found is None or found.shape != nodes.shape:
        raise ValueError(f"times: expects one a seed of {name!r}, {len(nodes)}")
    return found.to(nodes.device)


def _check_times(kind: EdgeType, graph: ResidentGraph, time: torch.Tensor) -> None:
    if time.shape != (graph.num_edges,):
        raise ValueError(
            f"times: expects one for each of {graph.num_edges} edges of {kind}, got "
            f"shape {list(time.shape)}"
        )
    falls = time[1:] < time[:-1]
    begins = torch.zeros(graph.num_edges + 1, dtype=torch.bool, device=time.device)
    begins[graph.offsets] = True
    if bool((falls & ~begins[1 : graph.num_edges]).any()):
        raise ValueError(f"times: expects them to ascend in each list of {kind}")


def _upto(
    times: torch.Tensor, low: torch.Tensor, high: torch.Tensor, limit: torch.Tensor
) -> torch.Tensor:
    """Where each list's edges are later than ``limit``."""
    if not len(times):
        return high
    while bool((low < high).any()):
        middle = low + (high - low) // 2
        seen = (low < high) & (times[middle.clamp(max=len(times) - 1)] <= limit)
        low, high = torch.where(seen, middle + 1, low), torch.where(seen, high, middle)
    return low
