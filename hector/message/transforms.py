"""Graphs made of graphs, with DGL's names: parts, both directions, one type of all."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hector.message.frame import ids_of
from hector.message.graph import EID, NID, Graph
from hector.message.hetero import HeteroGraph
from hector.message.typed import EdgeType
from hector.tracing import untraced

NTYPE = ETYPE = "_TYPE"
"""Feature of a graph of one type that holds the type which a row had."""
AnyGraph = Graph | HeteroGraph


def _nodes(g: AnyGraph, nodes: Any) -> dict[str, Tensor]:
    """Return ids by type of ids or masks."""
    if not isinstance(nodes, Mapping):
        if len(g.ntypes) != 1:
            raise ValueError(f"expected nodes by type of {g.ntypes}, got one list")
        nodes = {g.ntypes[0]: nodes}
    return {n: ids_of(n, nodes.get(n, []), g.num_nodes(n), g.device) for n in g.ntypes}


def _of_edges(
    g: AnyGraph, chosen: dict[EdgeType, Tensor], relabel_nodes: bool, store_ids: bool
) -> Any:
    given: Any = chosen if isinstance(g, HeteroGraph) else next(iter(chosen.values()))
    return _stored(g.edge_subgraph(given, relabel_nodes), store_ids)


def _stored(made: AnyGraph, store_ids: bool) -> AnyGraph:
    if not store_ids:
        for n in made.ntypes:
            made.frame_of(n).pop(NID, None)
        for k in made.canonical_etypes:
            made[k].edata.pop(EID, None)
    return made


@untraced
def node_subgraph(
    g: AnyGraph, nodes: Any, *, relabel_nodes: bool = True, store_ids: bool = True
) -> Any:
    """Return the graph of some nodes and the edges between them; of all nodes without
    `relabel_nodes`. `store_ids`: features `NID` and `EID` hold ids in `g`."""
    if relabel_nodes:
        return _stored(g.subgraph(nodes), store_ids)
    inside = {}
    for n, ids in _nodes(g, nodes).items():
        inside[n] = torch.zeros(g.num_nodes(n), dtype=torch.bool, device=g.device)
        inside[n][ids] = True
    chosen = {}
    for k in g.canonical_etypes:
        src, dst = g[k].edges()
        chosen[k] = (inside[k[0]][src] & inside[k[2]][dst]).nonzero().flatten()
    return _of_edges(g, chosen, False, store_ids)


@untraced
def edge_subgraph(
    g: AnyGraph, edges: Any, *, relabel_nodes: bool = True, store_ids: bool = True
) -> Any:
    """Return the graph of some edges and their ends; see `node_subgraph`."""
    return _stored(g.edge_subgraph(edges, relabel_nodes), store_ids)


@untraced
def in_subgraph(
    g: AnyGraph, nodes: Any, *, relabel_nodes: bool = False, store_ids: bool = True
) -> Any:
    """Return the graph of all nodes and the edges into some; of the ends of those edges
    with `relabel_nodes`."""
    ids = _nodes(g, nodes)
    into = {k: g[k].in_edges(ids[k[2]], "eid") for k in g.canonical_etypes}
    return _of_edges(g, into, relabel_nodes, store_ids)


@untraced
def out_subgraph(
    g: AnyGraph, nodes: Any, *, relabel_nodes: bool = False, store_ids: bool = True
) -> Any:
    """Return the graph of all nodes and the edges out of some; see `in_subgraph`."""
    ids = _nodes(g, nodes)
    out = {k: g[k].out_edges(ids[k[0]], "eid") for k in g.canonical_etypes}
    return _of_edges(g, out, relabel_nodes, store_ids)


@untraced
def khop_in_subgraph(
    g: AnyGraph,
    nodes: Any,
    k: int,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
) -> tuple[Any, Any]:
    """Return the graph of the nodes within `k` edges before some, and those nodes'
    ids in it."""
    return _near(g, nodes, k, True, relabel_nodes, store_ids)


@untraced
def khop_out_subgraph(
    g: AnyGraph,
    nodes: Any,
    k: int,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
) -> tuple[Any, Any]:
    """Return the graph of the nodes within `k` edges after some; see
    `khop_in_subgraph`."""
    return _near(g, nodes, k, False, relabel_nodes, store_ids)


def _near(
    g: AnyGraph, nodes: Any, k: int, before: bool, relabel_nodes: bool, store_ids: bool
) -> tuple[Any, Any]:
    single = not isinstance(nodes, Mapping)
    seeds = _nodes(g, nodes)
    last, seen = seeds, {n: ids.unique() for n, ids in seeds.items()}
    for _ in range(k):
        found: dict[str, list[Tensor]] = {n: [] for n in g.ntypes}
        for kind in g.canonical_etypes:
            if before:
                found[kind[0]].append(g[kind].in_edges(last[kind[2]])[0])
            else:
                found[kind[2]].append(g[kind].out_edges(last[kind[0]])[1])
        last = {n: torch.cat([seeds[n][:0], *f]).unique() for n, f in found.items()}
        seen = {n: torch.cat((seen[n], last[n])).unique() for n in seen}
    given: Any = seen if isinstance(g, HeteroGraph) else seen[g.ntypes[0]]
    made = node_subgraph(g, given, relabel_nodes=relabel_nodes, store_ids=store_ids)
    place = seeds
    if relabel_nodes:
        place = {n: torch.searchsorted(seen[n], ids) for n, ids in seeds.items()}
    return made, place[g.ntypes[0]] if single else place


@untraced
def add_reverse_edges(
    g: AnyGraph,
    readonly: bool | None = None,
    copy_ndata: bool = True,
    copy_edata: bool = False,
    ignore_bipartite: bool = False,
    exclude_self: bool = True,
) -> Any:
    """Return the graph with an edge back for each edge, after its own; `exclude_self`:
    but for those from a node to itself.

    Types between nodes of two types have no edges back: ValueError, unless
    `ignore_bipartite` leaves them as they are.
    """
    edges, ids = {}, {}
    for k in g.canonical_etypes:
        src, dst = g[k].edges()
        every = torch.arange(src.numel(), device=g.device)
        if k[0] != k[2]:
            if not ignore_bipartite:
                raise ValueError(
                    f"expected edges between nodes of one type, got {k}; add the type "
                    "that leads back, or set ignore_bipartite=True"
                )
            edges[k], ids[k] = (src, dst), every
            continue
        back = (src != dst).nonzero().flatten() if exclude_self else every
        edges[k] = torch.cat((src, dst[back])), torch.cat((dst, src[back]))
        ids[k] = torch.cat((every, back))
    made = _like(g, edges, copy_ndata)
    if copy_edata:
        for k, at in ids.items():
            made[k].edata.update(g[k].edata.part(at))
    return made


def _like(
    g: AnyGraph, edges: Mapping[EdgeType, tuple[Tensor, Tensor]], copy_ndata: bool
) -> Any:
    """Return a graph of the same nodes and other edges."""
    sizes = {n: g.num_nodes(n) for n in g.ntypes}
    made: Any
    if isinstance(g, HeteroGraph):
        made = HeteroGraph(edges, sizes, programs=g.programs)
    else:
        ((src, dst),) = edges.values()
        made = Graph(src, dst, num_nodes=g.num_nodes(), programs=g.programs)
    if copy_ndata:
        for n in g.ntypes:
            made.frame_of(n).update(g.frame_of(n))
    return made


@untraced
def to_simple(
    g: AnyGraph,
    return_counts: str | None = "count",
    writeback_mapping: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = False,
    aggregator: str = "arbitrary",
) -> Any:
    """Return the graph with one edge where there are several, sorted by source and
    destination; edge feature `return_counts` says how many. `writeback_mapping`: also
    the new id of each edge, by type where there are several. `copy_edata`: features of
    edges are those of the last of several, or their "sum" or "mean".

    Raises ValueError for another `aggregator`.
    """
    if aggregator not in ("arbitrary", "sum", "mean"):
        raise ValueError(
            f"expected aggregator 'arbitrary', 'sum' or 'mean', got {aggregator!r}"
        )
    edges, counts, mapping = {}, {}, {}
    for k in g.canonical_etypes:
        src, dst = g[k].edges()
        width = max(g.num_nodes(k[2]), 1)
        pairs, mapping[k], counts[k] = (src * width + dst).unique(
            return_inverse=True, return_counts=True
        )
        edges[k] = pairs // width, pairs % width
    made = _like(g, edges, copy_ndata)
    for k, number in counts.items():
        for name, rows in g[k].edata.items() if copy_edata else ():
            made[k].edata[name] = _one_of(rows, mapping[k], number, aggregator)
        if return_counts is not None:
            made[k].edata[return_counts] = number
    if not writeback_mapping:
        return made
    return made, mapping if len(mapping) > 1 else next(iter(mapping.values()))


def _one_of(rows: Tensor, place: Tensor, counts: Tensor, how: str) -> Tensor:
    """Return a row for each of `counts` edges, of the rows that go to its `place`."""
    if how == "arbitrary":
        ids = torch.arange(len(place), device=place.device)
        last = torch.zeros_like(counts).scatter_reduce(0, place, ids, "amax")
        return rows.index_select(0, last)
    total = rows.new_zeros(len(counts), *rows.shape[1:]).index_add(0, place, rows)
    if how == "sum":
        return total
    return total / counts.view(-1, *(1,) * (rows.dim() - 1))


@untraced
def to_bidirected(g: AnyGraph, copy_ndata: bool = False) -> Any:
    """Return the simple graph with an edge both ways wherever `g` has one; edge
    features are dropped."""
    both = add_reverse_edges(g, copy_ndata=copy_ndata)
    return to_simple(both, return_counts=None, copy_ndata=copy_ndata)


@untraced
def compact_graphs(
    graphs: Any, always_preserve: Any = None, copy_ndata: bool = True
) -> Any:
    """Return graphs of the same nodes without those that no edge of any joins (but for
    `always_preserve`), all numbered the same; `ndata[NID]` holds the ids before."""
    single = not isinstance(graphs, Sequence)
    given: list[AnyGraph] = [graphs] if single else list(graphs)
    joined = _joined(given)
    if always_preserve is not None:
        for n, ids in _nodes(given[0], always_preserve).items():
            joined[n][ids] = True
    kept = {n: mask.nonzero().flatten() for n, mask in joined.items()}
    found = []
    for g in given:
        made: AnyGraph
        if isinstance(g, HeteroGraph):
            made = g.subgraph(kept)
        else:
            made = g.subgraph(kept[g.ntypes[0]])
        for n in g.ntypes:
            if not copy_ndata:
                made.frame_of(n).clear()
            made.frame_of(n)[NID] = kept[n]
        found.append(made)
    return found[0] if single else found


def _joined(graphs: Sequence[AnyGraph]) -> dict[str, Tensor]:
    """Return a mask by type of the nodes at the ends of edges of any graph."""
    first = graphs[0]
    found = {
        n: torch.zeros(first.num_nodes(n), dtype=torch.bool, device=first.device)
        for n in first.ntypes
    }
    for g in graphs:
        for k in g.canonical_etypes:
            src, dst = g[k].edges()
            found[k[0]][src] = True
            found[k[2]][dst] = True
    return found


@untraced
def to_homogeneous(
    g: AnyGraph,
    ndata: Sequence[str] | None = None,
    edata: Sequence[str] | None = None,
    store_type: bool = True,
    return_count: bool = False,
) -> Any:
    """Return a graph of one type: nodes and edges of all types joined, type by type,
    with the features that are named. `NTYPE` and `ETYPE` hold a row's type before,
    `NID` and `EID` its id there. `return_count`: also the numbers of nodes and edges by
    type."""
    counts = [g.num_nodes(n) for n in g.ntypes]
    many = [g.num_edges(k) for k in g.canonical_etypes]
    begin, total = {}, 0
    for n, count in zip(g.ntypes, counts, strict=True):
        begin[n], total = total, total + count
    none = torch.empty(0, dtype=torch.int64, device=g.device)
    src, dst = [none], [none]
    for k in g.canonical_etypes:
        u, v = g[k].edges()
        src.append(u + begin[k[0]])
        dst.append(v + begin[k[2]])
    made = Graph(torch.cat(src), torch.cat(dst), num_nodes=total, programs=g.programs)
    nodes = [g.frame_of(n) for n in g.ntypes]
    edges = [g[k].edata for k in g.canonical_etypes]
    for frames, to, names, sizes, kinds, ids in (
        (nodes, made.ndata, ndata, counts, NTYPE, NID),
        (edges, made.edata, edata, many, ETYPE, EID),
    ):
        for name in names or ():
            to[name] = torch.cat([f[name] for f in frames])
        lengths = torch.tensor(sizes, device=g.device)
        if store_type:
            numbers = torch.arange(len(sizes), device=g.device)
            to[kinds] = numbers.repeat_interleave(lengths)
        to[ids] = torch.cat([none, *(torch.arange(s, device=g.device) for s in sizes)])
    return (made, counts, many) if return_count else made
