"""Random walks and PinSAGE's neighbours with DGL's arguments, by PyTorch's numbers.

`pydirect.sampling.KeyedWalks` walks the same ways on a GPU, by keys.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hector.indexing import group_by
from hector.message.frame import ids_of
from hector.message.graph import Graph
from hector.message.hetero import HeteroGraph
from hector.message.relation import Relation
from hector.tracing import untraced

AnyGraph = Graph | HeteroGraph


@untraced
def random_walk(
    g: AnyGraph,
    nodes: Any,
    *,
    metapath: Sequence[Any] | None = None,
    length: int | None = None,
    prob: str | None = None,
    restart_prob: float | Tensor | None = None,
    return_eids: bool = False,
) -> Any:
    """Walk from each of `nodes` along `metapath`, types of edges, or `length` edges of
    the only type.

    Returns nodes [walks, steps + 1], -1 after the end of a walk; with `return_eids`
    edges [walks, steps]; and the type of the nodes of each column. `prob` names an edge
    feature that steps are in proportion to. `restart_prob`: of ending before a
    step, one or one a step.
    """
    if (metapath is None) is (length is None):
        raise ValueError("expected metapath or length, one of them")
    path = [g.to_canonical_etype(e) for e in metapath or [None] * (length or 0)]
    for one, other in pairwise(path):
        if one[2] != other[0]:
            raise ValueError(f"expected {other} to begin at {one[2]!r}")
    start = path[0][0] if path else g.ntypes[0]
    node = ids_of("nodes", nodes, g.num_nodes(start), g.device)
    ending = 0.0 if restart_prob is None else restart_prob
    stop = torch.as_tensor(ending, device="cpu").expand(len(path))
    traces, edges = [node], []
    for kind, chance in zip(path, stop.tolist(), strict=True):
        if chance:
            ends = torch.rand(node.shape, device=node.device) < chance
            node = torch.where(ends, -1, node)
        edge = _step(g[kind], node, prob)
        if g.num_edges(kind):
            end = g[kind].edges()[1][edge.clamp(min=0)]
            node = torch.where(edge < 0, -1, end)
        else:
            node = edge
        traces.append(node)
        edges.append(edge)
    names = [start, *(k[2] for k in path)]
    types = torch.tensor([g.ntypes.index(n) for n in names], device=g.device)
    found = torch.stack(traces, 1)
    if not return_eids:
        return found, types
    none = node.new_empty(node.numel(), 0)
    return found, torch.stack(edges, 1) if edges else none, types


def _step(r: Relation, node: Tensor, prob: str | None) -> Tensor:
    """Return an edge out of each node, -1 where there is none."""
    grouping = r.derived(_out)
    if not r.num_edges():
        return torch.full_like(node, -1)
    here = node.clamp(min=0)
    first, size = grouping.ptr[here], grouping.ptr.diff()[here]
    part = torch.rand(node.shape, dtype=torch.float64, device=node.device)
    if prob is None:
        at = first + (part * size).long()
        none = (size == 0) | (node < 0)
    else:
        weight = r.edata[prob].detach().double().flatten()[grouping.items]
        total = torch.cat((weight.new_zeros(1), weight.cumsum(0)))
        low, high = total[first], total[first + size]
        at = torch.searchsorted(total, low + part * (high - low), right=True) - 1
        at = torch.minimum(torch.maximum(at, first), first + size - 1)
        none = (high <= low) | (node < 0)
    at = at.clamp(0, r.num_edges() - 1)
    return torch.where(none, -1, grouping.items[at])


def _out(r: Relation) -> Any:
    return group_by(r.edges()[0], r.num_src_nodes())


@untraced
def node2vec_random_walk(
    g: Graph,
    nodes: Any,
    p: float,
    q: float,
    walk_length: int,
    prob: str | None = None,
    return_eids: bool = False,
) -> Any:
    """Walk `walk_length` edges from each of `nodes`, where a step back is 1 / p as
    likely, and one to a node that no edge from the node before leads to 1 / q
    (arXiv 1607.00653); see `random_walk`."""
    if p <= 0 or q <= 0:
        raise ValueError(f"expected positive p and q, got {p} and {q}")
    node = ids_of("nodes", nodes, g.num_nodes(), g.device)
    dst, count, grouping = g.edges()[1], max(g.num_nodes(), 1), g.derived(_out)
    weight = None if prob is None else g.edata[prob].detach().double().flatten()
    there = (g.edges()[0] * count + dst).unique()
    traces, edges, size = [node], [], grouping.ptr.diff()
    for _ in range(walk_length):
        many = torch.where(node < 0, 0, size[node.clamp(min=0)])
        owner = torch.arange(node.numel(), device=g.device).repeat_interleave(many)
        first = many.cumsum(0) - many
        inside = torch.arange(owner.numel(), device=g.device) - first[owner]
        ids = grouping.items[grouping.ptr[node.clamp(min=0)][owner] + inside]
        chance = torch.ones(ids.numel(), dtype=torch.float64, device=g.device)
        if len(traces) > 1:
            before = traces[-2][owner]
            near = torch.isin(before * count + dst[ids], there)
            chance = torch.where(near, chance, 1 / q)
            chance = torch.where(dst[ids] == before, 1 / p, chance)
        chance = chance if weight is None else chance * weight[ids]
        total = torch.cat((chance.new_zeros(1), chance.cumsum(0)))
        low, high = total[first], total[first + many]
        part = torch.rand(node.shape, dtype=torch.float64, device=g.device)
        at = torch.searchsorted(total, low + part * (high - low), right=True) - 1
        at = torch.minimum(torch.maximum(at, first), (first + many - 1).clamp(min=0))
        none = high <= low
        edge = node.new_full(node.shape, -1)
        if ids.numel():
            edge = torch.where(none, -1, ids[at.clamp(max=ids.numel() - 1)])
            node = torch.where(none, -1, dst[edge.clamp(min=0)])
        else:
            node = edge
        traces.append(node)
        edges.append(edge)
    found = torch.stack(traces, 1)
    none = node.new_empty(node.numel(), 0)
    return (found, torch.stack(edges, 1) if edges else none) if return_eids else found


def pack_traces(traces: Tensor, types: Tensor) -> tuple[Tensor, ...]:
    """Return the nodes of all walks in a row without the -1 after their ends, their
    types, each walk's length, and where it begins."""
    there = traces >= 0
    sizes = there.sum(1)
    kinds = types.expand_as(traces)[there]
    return traces[there], kinds, sizes, sizes.cumsum(0) - sizes


@untraced
def select_topk(
    g: AnyGraph,
    k: int,
    weight: str,
    nodes: Any = None,
    edge_dir: str = "in",
    ascending: bool = False,
) -> Any:
    """Return the graph of all nodes and the `k` edges into each node, or out of it, of
    the largest weights (the smallest if `ascending`); `nodes`: of these alone."""
    if edge_dir not in ("in", "out"):
        raise ValueError(f"expected edge_dir 'in' or 'out', got {edge_dir!r}")
    chosen = {}
    for kind in g.canonical_etypes:
        r, own = g[kind], kind[2] if edge_dir == "in" else kind[0]
        ends = r.edges()[edge_dir == "in"]
        ids = torch.argsort(
            r.edata[weight].flatten(), descending=not ascending, stable=True
        )
        if nodes is not None:
            given = nodes if isinstance(nodes, Mapping) else {own: nodes}
            limit = g.num_nodes(own)
            ids = ids[
                torch.isin(ends[ids], ids_of(own, given.get(own, []), limit, g.device))
            ]
        ids = ids[torch.sort(ends[ids], stable=True).indices]
        by = ends[ids]
        rank = torch.arange(ids.numel(), device=g.device) - torch.searchsorted(by, by)
        chosen[kind] = ids if k < 0 else ids[rank < k]
    given_edges: Any = chosen if isinstance(g, HeteroGraph) else chosen[kind]
    return g.edge_subgraph(given_edges, False)


class RandomWalkNeighborSampler:
    """Make a graph of the nodes that walks from seeds visit most, and the seeds."""

    def __init__(
        self,
        G: HeteroGraph,
        num_traversals: int,
        termination_prob: float,
        num_random_walks: int,
        num_neighbors: int,
        metapath: Sequence[Any] | None = None,
        weight_column: str = "weights",
    ) -> None:
        """`metapath` leads from the seeds' type back to it; a walk runs through it
        `num_traversals` times at most, and ends before each but the first with
        `termination_prob`. `weight_column` names the edge feature of visits."""
        path = [G.to_canonical_etype(e) for e in metapath or [None]]
        if path[0][0] != path[-1][2]:
            raise ValueError(f"expected a metapath that leads back, got {path}")
        self.graph, self.path, self.column = G, path, weight_column
        self.num_traversals, self.termination_prob = num_traversals, termination_prob
        self.num_random_walks, self.num_neighbors = num_random_walks, num_neighbors

    @untraced
    def __call__(self, seed_nodes: Any) -> Graph | HeteroGraph:
        """Return a graph of all nodes with an edge from each of the `num_neighbors`
        nodes most visited to its seed."""
        g, size = self.graph, len(self.path)
        ntype = self.path[0][0]
        count = g.num_nodes(ntype)
        seeds = ids_of("seed_nodes", seed_nodes, count, g.device)
        stop = torch.zeros(size * self.num_traversals, device="cpu")
        stop[size::size] = self.termination_prob
        walks = random_walk(
            g,
            seeds.repeat_interleave(self.num_random_walks),
            metapath=self.path * self.num_traversals,
            restart_prob=stop,
        )[0]
        visited = walks[:, size::size]
        owner = torch.arange(seeds.numel(), device=g.device)
        owner = owner.repeat_interleave(self.num_random_walks)[:, None]
        there = visited >= 0
        pairs = owner.expand_as(visited)[there] * max(count, 1) + visited[there]
        pairs, visits = pairs.unique(return_counts=True)
        at = pairs // max(count, 1)
        order = torch.sort(visits, descending=True, stable=True).indices
        order = order[torch.sort(at[order], stable=True).indices]
        at = at[order]
        rank = torch.arange(at.numel(), device=g.device) - torch.searchsorted(at, at)
        order = order[rank < self.num_neighbors]
        src, dst = pairs[order] % max(count, 1), seeds[pairs[order] // max(count, 1)]
        made = Graph(src, dst, num_nodes=count, programs=g.programs)
        made.edata[self.column] = visits[order]
        return made


class PinSAGESampler(RandomWalkNeighborSampler):
    """Make a graph of the nodes of `ntype` that walks over `other_type` visit most."""

    def __init__(
        self,
        G: HeteroGraph,
        ntype: str,
        other_type: str,
        num_traversals: int,
        termination_prob: float,
        num_random_walks: int,
        num_neighbors: int,
        weight_column: str = "weights",
    ) -> None:
        path = []
        for one, other in ((ntype, other_type), (other_type, ntype)):
            kinds = [k for k in G.canonical_etypes if (k[0], k[2]) == (one, other)]
            if len(kinds) != 1:
                raise ValueError(
                    f"expected one edge type from {one!r} to {other!r}, found {kinds}"
                )
            path += kinds
        super().__init__(
            G,
            num_traversals,
            termination_prob,
            num_random_walks,
            num_neighbors,
            path,
            weight_column,
        )
