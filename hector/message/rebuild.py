"""Graphs that are made of typed graphs: parts of them, and changes by rebuilding."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hector.indexing import count
from hector.message.frame import EdgeFrame, Frame, ends_of, ids_of
from hector.message.graph import EID, NID, looped
from hector.message.relation import Relation
from hector.message.typed import EdgeType, Typed, TypedGraph
from hector.tracing import untraced


@untraced
def to(graph: Typed, device: torch.device | str) -> Typed:
    """Return the graph and its features on `device`."""
    where = torch.device(device)
    edges, edata = {}, {}
    for kind, r in _relations(graph):
        u, v = r.edges()
        edges[kind] = (u.to(where), v.to(where))
        edata[kind] = EdgeFrame(r.num_edges(), where)
        edata[kind].update({k: t.to(where) for k, t in r.edata.items()})
    sources = {n: _sent(f, where) for n, f in _frames(graph).items()}
    if not graph.is_block:
        made = _made(graph, edges, sources, edata)
        made.set_sizes(graph)
        return made
    ends = {n: _sent(graph.frame_of(n), where) for n in graph.ntypes}
    return type(graph).block(sources, ends, edges, edata, graph.programs)


def _sent(frame: Frame, device: torch.device) -> Frame:
    made = Frame(frame.num_rows, device, frame.rows)
    made.update({k: t.to(device) for k, t in frame.items()})
    return made


@untraced
def reverse(graph: Typed, copy_ndata: bool = True, copy_edata: bool = False) -> Typed:
    """Return the graph whose edges lead back: those of (a, r, b) are of
    (b, r, a)."""
    _whole(graph, "reverse")
    edges, edata = {}, {}
    for (start, name, end), r in _relations(graph):
        u, v = r.edges()
        edges[end, name, start] = (v, u)
        if copy_edata:
            edata[end, name, start] = r.edata.copied()
    frames = _frames(graph)
    if not copy_ndata:
        frames = {n: Frame(f.num_rows, f.device, "node") for n, f in frames.items()}
    return _made(graph, edges, frames, edata)


@untraced
def subgraph(graph: Typed, nodes: Mapping[str, Any]) -> Typed:
    """Return the graph of `nodes`, ids or masks by type, and the edges between
    them; types that are not named have no nodes. `nodes[type].data[NID]` and
    `edges[type].data[EID]` hold ids in this graph."""
    _whole(graph, "subgraph")
    nodes = _by_type(graph, nodes)
    kept, place, frames = {}, {}, {}
    for n, frame in _frames(graph).items():
        ids = ids_of(n, nodes.get(n, []), frame.num_rows, graph.device)
        kept[n], frames[n] = ids, frame.part(ids)
        place[n] = torch.full((frame.num_rows,), -1, device=graph.device)
        place[n][ids] = torch.arange(ids.numel(), device=graph.device)
    edges, edata, chosen = {}, {}, {}
    for kind, r in _relations(graph):
        u, v = r.edges()
        u, v = place[kind[0]][u], place[kind[2]][v]
        chosen[kind] = ((u >= 0) & (v >= 0)).nonzero().flatten()
        edges[kind] = (u[chosen[kind]], v[chosen[kind]])
        edata[kind] = r.edata.part(chosen[kind])
    made = _made(graph, edges, frames, edata)
    for n, ids in kept.items():
        made.nodes[n].data[NID] = ids
    for kind, ids in chosen.items():
        made[kind].edata[EID] = ids
    return made


def _with_edges(graph: Typed, chosen: Mapping[EdgeType, Tensor]) -> Typed:
    """Return the graph of all nodes and some edges by type."""
    edges, edata = {}, {}
    for kind, r in _relations(graph):
        edges[kind] = r.find_edges(chosen[kind])
        edata[kind] = r.edata.part(chosen[kind])
    return _made(graph, edges, _frames(graph), edata)


@untraced
def edge_subgraph(graph: Typed, edges: Any, relabel_nodes: bool = True) -> Typed:
    """Return the graph of `edges`, ids or masks by type (none of a type that is not
    named), and of their ends; of all nodes without `relabel_nodes`.
    `edges[type].data[EID]`, and `nodes[type].data[NID]` if nodes are others, hold ids
    in this graph."""
    _whole(graph, "edge_subgraph")
    given = edges if isinstance(edges, Mapping) else {None: edges}
    named = {graph.to_canonical_etype(e): ids for e, ids in given.items()}
    chosen = {k: r.edge_numbers(named.get(k, [])) for k, r in _relations(graph)}
    made = _with_edges(graph, chosen)
    if relabel_nodes:
        made = _ends_alone(made)
    for kind, ids in chosen.items():
        made[kind].edata[EID] = ids
    return made


def _ends_alone(graph: Typed) -> Typed:
    """Return the graph without nodes that no edge joins; the others' ids are `NID`."""
    kept, place, frames = {}, {}, {}
    for n, frame in _frames(graph).items():
        joined = torch.zeros(frame.num_rows, dtype=torch.bool, device=graph.device)
        for kind, r in _relations(graph):
            for name, ids in zip((kind[0], kind[2]), r.edges(), strict=True):
                if name == n:
                    joined[ids] = True
        kept[n], place[n] = joined.nonzero().flatten(), joined.cumsum(0) - 1
        frames[n] = frame.part(kept[n])
    edges = {}
    for kind, r in _relations(graph):
        u, v = r.edges()
        edges[kind] = (place[kind[0]][u], place[kind[2]][v])
    made = _made(graph, edges, frames, {k: r.edata for k, r in _relations(graph)})
    for n, ids in kept.items():
        made.nodes[n].data[NID] = ids
    return made


@untraced
def edge_type_subgraph(graph: Typed, etypes: Sequence[Any]) -> Typed:
    """Return the graph of the edges of some types, and of the node types at their
    ends."""
    _whole(graph, "edge_type_subgraph")
    kinds = [graph.to_canonical_etype(e) for e in etypes]
    ends = {n for k in kinds for n in (k[0], k[2])}
    edges = {k: r.edges() for k, r in _relations(graph) if k in kinds}
    frames = {n: f for n, f in _frames(graph).items() if n in ends}
    return _made(graph, edges, frames, {k: graph[k].edata.copied() for k in edges})


@untraced
def node_type_subgraph(graph: Typed, ntypes: Sequence[str]) -> Typed:
    """Return the graph of some types of nodes, and of the edges between them."""
    _whole(graph, "node_type_subgraph")
    frames = {n: graph.frame_of(n) for n in ntypes}
    edges = {
        k: r.edges() for k, r in _relations(graph) if k[0] in frames and k[2] in frames
    }
    return _made(graph, edges, frames, {k: graph[k].edata.copied() for k in edges})


@untraced
def add_edges(
    graph: TypedGraph,
    u: Any,
    v: Any,
    data: Mapping[str, Tensor] | None = None,
    etype: Any = None,
) -> None:
    """Add edges of a type, whose features are zeros, or `data`; new ids make new
    nodes."""
    _whole(graph, "add_edges")
    kind = graph.to_canonical_etype(etype)
    more = ends_of(u, v, graph.device)
    for name, ids in zip((kind[0], kind[2]), more, strict=True):
        add_nodes(graph, max(0, count(ids) - graph.num_nodes(name)), ntype=name)
    edges = {k: r.edges() for k, r in _relations(graph)}
    edata = {k: r.edata for k, r in _relations(graph)}
    ends = zip(edges[kind], more, strict=True)
    src, dst = (torch.cat(pair) for pair in ends)
    edges[kind] = (src, dst)
    before, edata[kind] = edata[kind].num_rows, edata[kind].padded(src.numel())
    _write(edata[kind], before, data)
    graph.become(_made(graph, edges, _frames(graph), edata))


@untraced
def remove_edges(graph: TypedGraph, eids: Any, etype: Any = None) -> None:
    """Remove edges of a type by ids or a mask; later ids become smaller."""
    _whole(graph, "remove_edges")
    kind = graph.to_canonical_etype(etype)
    kept = {k: torch.ones_like(_all(r), dtype=torch.bool) for k, r in _relations(graph)}
    kept[kind][graph[kind].edge_numbers(eids)] = False
    chosen = {k: mask.nonzero().flatten() for k, mask in kept.items()}
    made = _with_edges(graph, chosen)
    graph.keep_sizes(made, kept)
    graph.become(made)


@untraced
def add_nodes(
    graph: TypedGraph,
    num: int,
    data: Mapping[str, Tensor] | None = None,
    ntype: str | None = None,
) -> None:
    """Add nodes of a type without edges, whose features are zeros, or `data`."""
    _whole(graph, "add_nodes")
    if not num:
        return
    old = graph.frame_of(ntype)
    frames = {
        n: f.padded(f.num_rows + num) if f is old else f
        for n, f in _frames(graph).items()
    }
    for n, f in _frames(graph).items():
        if f is old:
            _write(frames[n], f.num_rows, data)
    edges = {k: r.edges() for k, r in _relations(graph)}
    edata = {k: r.edata for k, r in _relations(graph)}
    graph.become(_made(graph, edges, frames, edata))


@untraced
def remove_nodes(graph: TypedGraph, nids: Any, ntype: str | None = None) -> None:
    """Remove nodes of a type by ids or a mask, and their edges."""
    old = graph.frame_of(ntype)
    gone = ids_of("nids", nids, old.num_rows, graph.device)
    kept = {
        n: torch.ones(f.num_rows, dtype=torch.bool, device=graph.device)
        for n, f in _frames(graph).items()
    }
    for n, f in _frames(graph).items():
        if f is old:
            kept[n][gone] = False
    made = subgraph(graph, kept)
    for frame in _frames(made).values():
        del frame[NID]
    for _, r in _relations(made):
        del r.edata[EID]
    graph.become(made)


def add_self_loop(
    graph: Typed,
    edge_feat_names: Any = None,
    fill_data: float | str = 1.0,
    etype: Any = None,
) -> Typed:
    """Return the graph with an edge of a type, which leads between nodes of one
    type, from each node to itself; features as in `Graph.add_self_loop`."""
    kind = _loop_type(graph, etype)
    made = graph.local_var()
    ids = graph.nodes(kind[0])
    add_edges(made, ids, ids, etype=kind)
    r = graph[kind]
    made[kind].edata.update(
        looped(r.edata, r.edges()[1], ids.numel(), edge_feat_names, fill_data)
    )
    return made


def remove_self_loop(graph: Typed, etype: Any = None) -> Typed:
    """Return the graph without edges of a type from a node to itself."""
    kind = _loop_type(graph, etype)
    made = graph.local_var()
    src, dst = graph[kind].edges()
    remove_edges(made, src == dst, kind)
    return made


def _loop_type(graph: TypedGraph, etype: Any) -> EdgeType:
    kind = graph.to_canonical_etype(etype)
    if kind[0] != kind[2]:
        raise ValueError(f"expected an edge type between nodes of one type, got {kind}")
    return kind


def _write(frame: Frame, before: int, data: Mapping[str, Tensor] | None) -> None:
    """Set features of the rows after the first `before`."""
    ids = torch.arange(before, frame.num_rows, device=frame.device)
    for name, rows in (data or {}).items():
        frame.write(name, ids, rows)


def _by_type(graph: TypedGraph, nodes: Any) -> Mapping[str, Any]:
    if isinstance(nodes, Mapping):
        for n in nodes:
            graph.frame_of(n)
        return nodes
    if len(graph.ntypes) != 1:
        raise ValueError(f"expected nodes by type of {graph.ntypes}, got one list")
    return {graph.ntypes[0]: nodes}


def _relations(graph: TypedGraph) -> list[tuple[EdgeType, Relation]]:
    return [(k, graph[k]) for k in graph.canonical_etypes]


def _frames(graph: TypedGraph) -> dict[str, Frame]:
    return {n: graph.frame_of(n, 0) for n in graph.ntypes}


def _made(
    graph: Typed,
    edges: Mapping[EdgeType, tuple[Tensor, Tensor]],
    frames: Mapping[str, Frame],
    edata: Mapping[EdgeType, EdgeFrame],
) -> Typed:
    """Return a graph of the same programs."""
    return graph.made_of(edges, frames, edata, graph.programs)


def _whole(graph: TypedGraph, what: str) -> None:
    if graph.is_block:
        raise ValueError(f"expected a graph for {what}, got a block")


def _all(relation: Relation) -> Tensor:
    return torch.arange(relation.num_edges(), device=relation.device)
