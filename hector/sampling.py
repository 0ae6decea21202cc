"""Neighbour sampling of relational graphs, on the device that they lie on.

The samplers of other packages serve as well: `HeteroGraph.from_batch` takes their
batches. This one needs nothing but PyTorch.
"""

from collections.abc import Sequence
from enum import Enum
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hector.graph import Grouping, HeteroGraph, sampled_subgraph
from hector.indexing import check_range, group_by, integers, segment_ptr
from hector.tracing import untraced

_BITS = 32
_WORD = (1 << _BITS) - 1


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
    replacement, one of each of as many stretches of its edges, whose first one lies
    anywhere: each edge is as likely as every other, though stretches may differ by one.

    [Note: sampled by hashing] Where the stretches begin, and which edge of one it is,
    says a hash of the call's key, the hop and the place of the stretch. So the CPU, the
    GPU and a captured draw, which looks at more places than it uses, draw the same.
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
        self._hops = len(self.fanouts)
        self._taken = torch.zeros(
            graph.num_nodes, dtype=torch.bool, device=graph.device
        )
        self._owner: Tensor | None = None
        if self.fanouts_of is FanoutOf.RELATION:
            # Stored edges lie relation by relation, and in it by destination.
            pairs = graph.unique_dst()
            self._pairs = group_by(pairs.unique_node, graph.num_nodes)
            self._pair_ptr = segment_ptr(pairs.edge_to_unique, pairs.num_unique)

    @untraced
    def sample(
        self, seeds: Tensor, generator: torch.Generator | None = None
    ) -> SampledBatch:
        """The subgraph around distinct `seeds` (int64, ids in the whole graph).

        `generator` lies on the graph's device. How many edges were drawn is read from
        the device once a hop. Raises ValueError for seeds that are no nodes, or twice
        there.
        """
        found = self.draw(seeds, generator)
        made = sampled_subgraph(self.graph, found.node_ids, found.edge_ids)
        return SampledBatch(made, found.node_ids, found.seeds, found.edge_ids)

    @untraced
    def draw(self, seeds: Tensor, generator: torch.Generator | None = None) -> Drawn:
        """The nodes and edges of `sample`, for `hector.CapturedBatches`."""
        seeds = self._checked(seeds)
        frontier, drawn = seeds, []
        key = self.key(generator)
        self._taken[seeds] = True
        for hop, fanout in enumerate(self.fanouts):
            edges = self._draw(frontier, fanout, _mixed(key + hop))
            drawn.append(edges)
            found = self.graph.src[edges]
            frontier = torch.unique(found[~self._taken[found]])
            self._taken[frontier] = True
        node_ids = self._taken.nonzero().flatten()
        self._taken[node_ids] = False
        edge_ids = torch.cat(drawn)
        return Drawn(node_ids, edge_ids, torch.searchsorted(node_ids, seeds))

    def _checked(self, seeds: Tensor) -> Tensor:
        seeds = integers("seeds", seeds).to(self.graph.device)
        check_range("seeds", seeds, self.graph.num_nodes, "num_nodes")
        if seeds.unique().numel() < seeds.numel():
            raise ValueError("expected distinct seeds, got a node twice")
        return seeds

    def key(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw what decides a call's edges: int64 [], on the device."""
        where = self.graph.device
        return torch.randint(_WORD + 1, (), generator=generator, device=where)

    def most_drawn(self, num_seeds: int) -> int | None:
        """Return the most edges that so many seeds can lead to; None where only the
        graph says it: all edges of a node, or fanouts of relations."""
        if -1 in self.fanouts or self.fanouts_of is not FanoutOf.NODE:
            return None
        return sum(num_seeds * prod(self.fanouts[: i + 1]) for i in range(self._hops))

    def draw_padded(self, seeds: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        """`draw` without waiting for the device, for graphs with edges and fanouts that
        `most_drawn` knows: node ids, edge ids (the same, in another order) and places
        of the seeds, with anything after them, and int64 [2], how many nodes and edges
        there are."""
        graph, last = self.graph, self._hops - 1
        slots, live, drawn = seeds, torch.ones_like(seeds, dtype=torch.bool), []
        self._taken.index_fill_(0, seeds, True)
        for hop, fanout in enumerate(self.fanouts):
            edges, slots, real = self.hop_padded(slots, live, key, hop, fanout)
            if hop < last:  # after it nobody asks
                fresh = real & ~self._taken[slots]
                live = fresh & self._first_of_each(slots, fresh)
            self._taken.index_fill_(0, torch.where(real, slots, seeds[:1]), True)
            drawn.append(edges)
        every = torch.cat(drawn)
        count = (every >= 0).cumsum(0)
        at = torch.searchsorted(count, _numbers_from_one(count))
        edge_ids = every[at.clamp(max=every.numel() - 1)]
        nodes = self._taken.cumsum(0)
        most = min(graph.num_nodes, seeds.numel() + every.numel())
        node_ids = torch.searchsorted(nodes, _numbers_from_one(nodes[:most]))
        self._taken.zero_()
        sizes = torch.stack((nodes[-1], count[-1]))
        return node_ids, edge_ids, nodes[seeds] - 1, sizes

    def hop_padded(
        self, slots: Tensor, live: Tensor, key: Tensor, hop: int, fanout: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In-edges of the live slots, `fanout` places for each: edges, -1 in places
        that are not used, the nodes that they come from, and which places are used."""
        graph, group = self.graph, self.graph.csc()
        if slots.is_cuda:
            from hector.drawing_kernels import padded_hop

            return padded_hop(slots, live, group, graph.src, key, fanout, hop)
        first = group.ptr[slots]
        degree = torch.where(live, group.ptr[slots + 1] - first, 0)
        places, real = _places(first, degree, fanout, _mixed(key + hop))
        real = real.flatten()
        edges = group.items[torch.where(real, places.flatten(), 0)]
        return torch.where(real, edges, -1), graph.src[edges], real

    def _first_of_each(self, nodes: Tensor, asked: Tensor) -> Tensor:
        """Whether no `asked` place before has the same node: bool [nodes]."""
        if self._owner is None:
            most = torch.iinfo(torch.int32).max
            count = self.graph.num_nodes
            self._owner = torch.full(
                (count,), most, dtype=torch.int32, device=nodes.device
            )
        most = torch.iinfo(torch.int32).max
        mine = torch.arange(nodes.numel(), dtype=torch.int32, device=nodes.device)
        claim = torch.where(asked, mine, most)
        self._owner.scatter_reduce_(0, nodes, claim, "amin")
        found = self._owner[nodes] == mine
        self._owner.index_fill_(0, nodes, most)
        return found

    def _draw(self, nodes: Tensor, fanout: int, key: Tensor) -> Tensor:
        """Stored edges into `nodes`."""
        group = self.graph.csc()
        if fanout == -1:
            return _members(group, nodes)
        if self.fanouts_of is FanoutOf.NODE:
            ptr, chosen = group.ptr, nodes
        else:
            ptr, chosen = self._pair_ptr, _members(self._pairs, nodes)
        first = ptr[chosen]
        places, real = _places(first, ptr[chosen + 1] - first, fanout, key)
        # The edges of a pair are stored side by side.
        found = places[real]
        return group.items[found] if self.fanouts_of is FanoutOf.NODE else found


def _places(
    first: Tensor, degree: Tensor, fanout: int, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Places in groups that begin at `first`, and which of them are drawn: [groups,
    fanout]; see [Note: sampled by hashing]."""
    draw = torch.arange(fanout, device=first.device)
    first, degree = first[:, None], degree[:, None]
    # Where all are taken, stretches are single edges.
    num = degree.clamp(max=fanout)
    some = num.clamp(min=1)
    low = draw * degree // some
    size = (draw + 1) * degree // some - low
    own = _mixed(first + key)
    turn = _mixed(own + fanout) * torch.where(degree > fanout, degree, 0) >> _BITS
    place = low + (_mixed(own + draw) * size >> _BITS) + turn
    return first + torch.where(place < degree, place, place - degree), draw < num


def _mixed(values: Tensor) -> Tensor:
    """Hash to 32 bits ("lowbias32", C. Wellons, Prospecting for hash functions)."""
    values = values & _WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        values = ((values ^ (values >> shift)) * factor) & _WORD
    return values ^ (values >> 16)


def _numbers_from_one(like: Tensor) -> Tensor:
    return torch.arange(1, like.numel() + 1, device=like.device)


def _members(group: Grouping, chosen: Tensor) -> Tensor:
    """The items of the chosen groups; waits for the device to count them."""
    first = group.ptr[chosen]
    size = group.ptr[chosen + 1] - first
    total = int(size.sum())
    begin = size.cumsum(0) - size
    shift = (first - begin).repeat_interleave(size, output_size=total)
    return group.items[shift + torch.arange(total, device=chosen.device)]
