"""Mini-batches of typed graphs: frontiers of sampled edges, and blocks of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.message.frame import ids_of
from hector.message.graph import EID, NID, Graph
from hector.message.hetero import HeteroGraph, as_hetero
from hector.message.relation import Relation
from hector.message.typed import EdgeType
from hector.tracing import untraced

Nodes = Mapping[str, Any] | Any
"""Ids or masks by node type; of one type they need not be named."""


class Hop(NamedTuple):
    """What was drawn for the seeds of one block."""

    nodes: Mapping[str, Tensor]
    """int64 ids of each type in the whole graph: the seeds, then what edges add."""
    num_seeds: Mapping[str, int]
    edges: Mapping[EdgeType, tuple[Tensor, Tensor]]
    """Positions among the nodes: sources and destinations, which are seeds."""
    edge_ids: Mapping[EdgeType, Tensor]


def nodes_by_type(graph: HeteroGraph, nodes: Nodes) -> dict[str, Tensor]:
    """Return int64 ids of every type, none where none are named."""
    if not isinstance(nodes, Mapping):
        if len(graph.ntypes) != 1:
            raise ValueError(f"expected nodes by type of {graph.ntypes}, got one list")
        nodes = {graph.ntypes[0]: nodes}
    unknown = sorted(set(nodes) - set(graph.ntypes))
    if unknown:
        raise ValueError(f"expected node types of {graph.ntypes}, got {unknown}")
    return {
        n: ids_of(n, nodes.get(n, []), graph.num_nodes(n), graph.device)
        for n in graph.ntypes
    }


@untraced
def block_of(graph: HeteroGraph, hop: Hop) -> HeteroGraph:
    """Return the block of a hop. Features are those of the graph, gathered when they
    are read; `srcdata[NID]`, `dstdata[NID]` and `edata[EID]` hold its ids."""
    sources, ends = {}, {}
    for n, ids in hop.nodes.items():
        sources[n] = graph.frame_of(n, 0).part(ids)
        sources[n][NID] = ids
        seeds = ids[: hop.num_seeds.get(n, 0)]
        ends[n] = graph.frame_of(n, 0).part(seeds)
        ends[n][NID] = seeds
    edata = {}
    for kind, ids in hop.edge_ids.items():
        edata[kind] = graph[kind].edata.part(ids)
        edata[kind][EID] = ids
    return HeteroGraph.block(sources, ends, hop.edges, edata, graph.programs)


@untraced
def to_block(
    g: Graph | HeteroGraph, dst_nodes: Nodes = None, include_dst_in_src: bool = True
) -> HeteroGraph:
    """Return the edges of a graph as a block from sources to destinations, which are
    the first sources of their type.

    `dst_nodes`: ids by type, in the order of the block's destinations; None: all nodes
    with an edge into them. Raises ValueError where an edge leads elsewhere, and for
    `include_dst_in_src=False`, which layers with a row of their own need.
    """
    if not include_dst_in_src:
        raise ValueError("expected include_dst_in_src=True, got False")
    graph = as_hetero(g)
    ends = {k: graph[k].edges() for k in graph.canonical_etypes}
    if dst_nodes is None:
        into = {n: [v for k, (_, v) in ends.items() if k[2] == n] for n in graph.ntypes}
        none = torch.empty(0, dtype=torch.int64, device=graph.device)
        seeds = {n: torch.cat([none, *parts]).unique() for n, parts in into.items()}
    else:
        seeds = nodes_by_type(graph, dst_nodes)
    ids = {k: _all(graph[k]) for k in ends}
    return block_of(graph, hop_of(graph, seeds, ids))


def hop_of(
    graph: HeteroGraph, seeds: Mapping[str, Tensor], ids: Mapping[EdgeType, Tensor]
) -> Hop:
    """Number the ends of edges `ids`: the seeds, then other sources by their ids.

    Raises ValueError for seeds that are twice there, and edges that lead elsewhere.
    """
    place = {
        n: torch.full((graph.num_nodes(n),), -1, dtype=torch.int64, device=graph.device)
        for n in graph.ntypes
    }
    for n, chosen in seeds.items():
        place[n][chosen] = torch.arange(chosen.numel(), device=graph.device)
        if chosen.unique().numel() != chosen.numel():
            raise ValueError(f"expected distinct nodes {n!r} as seeds, got one twice")
    ends = {k: graph[k].find_edges(i) for k, i in ids.items()}
    dst = {k: place[k[2]][v] for k, (_, v) in ends.items()}
    for kind, positions in dst.items():
        if bool((positions < 0).any()):
            raise ValueError(
                f"expected dst_nodes with all nodes that edges {kind} lead to, some "
                "are missing"
            )
    nodes = {}
    for n, chosen in seeds.items():
        parts = [u for k, (u, _) in ends.items() if k[0] == n]
        others = torch.cat(parts).unique() if parts else chosen[:0]
        others = others[place[n][others] < 0]
        nodes[n] = torch.cat((chosen, others))
        place[n][others] = chosen.numel() + torch.arange(
            others.numel(), device=graph.device
        )
    edges = {k: (place[k[0]][u], dst[k]) for k, (u, _) in ends.items()}
    sizes = {n: chosen.numel() for n, chosen in seeds.items()}
    return Hop(nodes, sizes, edges, ids)


@untraced
def sample_neighbors(
    g: Graph | HeteroGraph,
    nodes: Nodes,
    fanout: int | Mapping[Any, int],
    edge_dir: str = "in",
    prob: str | None = None,
    replace: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    *,
    exclude_edges: Any = None,
    output_device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Return the graph of all nodes and of `fanout` edges into each of `nodes`, along
    each type; -1 takes all. `edata[EID]` holds ids in `g`.

    `prob`: an edge feature that draws are in proportion to; a mask as well. Edges of
    weight 0 are never drawn, and `exclude_edges`, ids by type, neither.
    """
    check_direction(edge_dir)
    graph = as_hetero(g)
    seeds = nodes_by_type(graph, nodes)
    fanouts = fanouts_of(graph, fanout)
    ids = drawn(
        graph,
        seeds,
        fanouts,
        prob=prob,
        replace=replace,
        without=edges_by_type(graph, exclude_edges),
        generator=generator,
    )
    given: Any = next(iter(ids.values())) if isinstance(g, Graph) else ids
    made: Any = g.edge_subgraph(given, relabel_nodes=False)
    for n in () if copy_ndata else made.ntypes:
        made.frame_of(n).clear()
    for k in () if copy_edata else made.canonical_etypes:
        kept = made[k].edata[EID]
        made[k].edata.clear()
        made[k].edata[EID] = kept
    return made if output_device is None else made.to(output_device)


def check_direction(edge_dir: str) -> None:
    """Raise ValueError unless edges are those into seeds."""
    if edge_dir != "in":
        raise ValueError(
            f"expected edge_dir 'in', got {edge_dir!r}; sample from g.reverse()"
        )


def edges_by_type(graph: HeteroGraph, edges: Any) -> dict[EdgeType, Tensor]:
    """Return ids by type of ids or masks, by type or of the only type; of None,
    nothing."""
    if edges is None:
        return {}
    given = edges if isinstance(edges, Mapping) else {None: edges}
    named = {graph.to_canonical_etype(k): ids for k, ids in given.items()}
    return {k: graph[k].edge_numbers(ids) for k, ids in named.items()}


def fanouts_of(
    graph: HeteroGraph, fanout: int | Mapping[Any, int]
) -> dict[EdgeType, int]:
    """Return a fan-out for each edge type; types that are not named have 0.

    Raises ValueError below -1.
    """
    if isinstance(fanout, Mapping):
        named = {graph.to_canonical_etype(k): int(f) for k, f in fanout.items()}
        found = {k: named.get(k, 0) for k in graph.canonical_etypes}
    else:
        found = dict.fromkeys(graph.canonical_etypes, int(fanout))
    if any(f < -1 for f in found.values()):
        raise ValueError(f"expected fan-outs of at least 0, or -1, got {fanout}")
    return found


def drawn(
    graph: HeteroGraph,
    seeds: Mapping[str, Tensor],
    fanouts: Mapping[EdgeType, int],
    *,
    prob: str | None = None,
    replace: bool = False,
    without: Mapping[EdgeType, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> dict[EdgeType, Tensor]:
    """Return the ids of edges drawn into the seeds, by type; none of `without`."""
    found = {}
    for kind, fanout in fanouts.items():
        relation = graph[kind]
        weight = None if prob is None else relation.edata[prob]
        ids, owner = relation.incoming(seeds[kind[2]])
        if without is not None and kind in without:
            left = ~torch.isin(ids, without[kind])
            ids, owner = ids[left], owner[left]
        size = seeds[kind[2]].numel()
        found[kind] = _drawn(ids, owner, size, fanout, weight, replace, generator)
    return found


def _drawn(
    ids: Tensor,
    owner: Tensor,
    num_seeds: int,
    fanout: int,
    weight: Tensor | None,
    replace: bool,
    generator: torch.Generator | None,
) -> Tensor:
    weights = None
    if weight is not None:
        weights = weight.detach().double().flatten()[ids]
        if bool((weights < 0).any()):
            raise ValueError("expected weights of at least 0 to draw by, got less")
        some = weights > 0
        ids, owner, weights = ids[some], owner[some], weights[some]
    if fanout == -1 or not ids.numel():
        return ids
    size = torch.bincount(owner, minlength=num_seeds)
    first = size.cumsum(0) - size
    if replace:
        there = (size > 0).nonzero().flatten()
        parts = _uniform((there.numel(), fanout), ids.device, generator)
        if weights is None:
            at = first[there, None] + (parts * size[there, None]).long()
        else:
            # Sums from one list to the next: one search finds the edge of each draw.
            total = torch.cat((weights.new_zeros(1), weights.cumsum(0)))
            low = total[first[there], None]
            high = total[(first + size)[there], None]
            at = torch.searchsorted(total, low + parts * (high - low), right=True) - 1
            last = (first + size)[there, None] - 1
            at = torch.minimum(torch.maximum(at, first[there, None]), last)
        return ids[at.flatten()]
    key = _uniform((ids.numel(),), ids.device, generator)
    if weights is not None:
        # A race of exponential times: the first to arrive are drawn by weight.
        key = -torch.log1p(-key) / weights
    order = torch.argsort(key)
    order = order[torch.sort(owner[order], stable=True).indices]
    rank = torch.arange(ids.numel(), device=ids.device) - first[owner]
    return ids[order[rank < fanout].sort().values]


def _uniform(
    shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=device)


def _all(relation: Relation) -> Tensor:
    return torch.arange(relation.num_edges(), device=relation.device)
