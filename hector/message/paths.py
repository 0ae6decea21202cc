"""Graphs of paths, orders of nodes, and types given back, with DGL's names."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hector.indexing import group_by
from hector.message.batching import unbatch
from hector.message.frame import ids_of
from hector.message.graph import EID, NID, Graph
from hector.message.hetero import HeteroGraph
from hector.message.relation import Apply, Message, Reduce
from hector.message.transforms import ETYPE, NTYPE, AnyGraph
from hector.tracing import untraced


def _joined(
    first: tuple[Tensor, Tensor], then: tuple[Tensor, Tensor], count: int
) -> tuple[Tensor, Tensor]:
    """Return the positions of pairs of edges of which the second begins where the first
    ends: `count` nodes lie between."""
    out = group_by(then[0], count)
    size = out.ptr.diff()[first[1]]
    owner = torch.arange(size.numel(), device=size.device).repeat_interleave(size)
    inside = torch.arange(owner.numel(), device=size.device)
    inside = inside - (size.cumsum(0) - size)[owner]
    return owner, out.items[out.ptr[first[1]][owner] + inside]


@untraced
def metapath_reachable_graph(g: HeteroGraph, metapath: Sequence[Any]) -> Any:
    """Return the graph of an edge between each two nodes that a path of these types of
    edges joins, however many do; features of both types of nodes are kept."""
    path = [g.to_canonical_etype(e) for e in metapath]
    for one, other in pairwise(path):
        if one[2] != other[0]:
            raise ValueError(f"expected {other} to begin at {one[2]!r}")
    first, last = path[0][0], path[-1][2]
    src, dst = g[path[0]].edges()
    for kind in path[1:]:
        ends = g[kind].edges()
        begin, then = _joined((src, dst), ends, g.num_nodes(kind[0]))
        src, dst = _distinct(src[begin], ends[1][then], g.num_nodes(kind[2]))
    src, dst = _distinct(src, dst, g.num_nodes(last))
    made: Any = HeteroGraph(
        {(first, "_E", last): (src, dst)},
        {n: g.num_nodes(n) for n in (first, last)},
        programs=g.programs,
    )
    for n in (first, last):
        made.frame_of(n).update(g.frame_of(n))
    return made


def _distinct(src: Tensor, dst: Tensor, count: int) -> tuple[Tensor, Tensor]:
    pairs = (src * max(count, 1) + dst).unique()
    return pairs // max(count, 1), pairs % max(count, 1)


@untraced
def khop_graph(g: Graph, k: int, copy_ndata: bool = True) -> Graph:
    """Return the graph of an edge for each path of `k` edges."""
    if k < 1:
        raise ValueError(f"expected k of at least 1, got {k}")
    src, dst = ends = g.edges()
    for _ in range(k - 1):
        one, other = _joined((src, dst), ends, g.num_nodes())
        src, dst = src[one], ends[1][other]
    made = Graph(src, dst, num_nodes=g.num_nodes(), programs=g.programs)
    if copy_ndata:
        made.ndata.update(g.ndata)
    return made


@untraced
def line_graph(g: Graph, backtracking: bool = True, shared: bool = False) -> Graph:
    """Return the graph whose nodes are the edges, with an edge from each to those that
    begin where it ends; not to its own way back without `backtracking`. `shared`: nodes
    have the edges' features."""
    src, dst = g.edges()
    one, other = _joined((src, dst), (src, dst), g.num_nodes())
    if not backtracking:
        kept = src[one] != dst[other]
        one, other = one[kept], other[kept]
    made = Graph(one, other, num_nodes=g.num_edges(), programs=g.programs)
    if shared:
        made.ndata.update(g.edata)
    return made


@untraced
def to_heterogeneous(
    G: Graph,
    ntypes: Sequence[str],
    etypes: Sequence[str],
    ntype_field: str = NTYPE,
    etype_field: str = ETYPE,
) -> HeteroGraph:
    """Return the typed graph of one of one type whose features `ntype_field` and
    `etype_field` say which of `ntypes` and `etypes` a row is of. Relations are those
    that have edges. `NID` and `EID` hold a row's id in `G`."""
    for field, frame in ((ntype_field, G.ndata), (etype_field, G.edata)):
        if field not in frame:
            raise ValueError(f"expected a feature {field!r}, there are {list(frame)}")
    kinds = G.ndata[ntype_field]
    nodes = {n: (kinds == i).nonzero().flatten() for i, n in enumerate(ntypes)}
    place = torch.empty_like(kinds)
    for ids in nodes.values():
        place[ids] = torch.arange(ids.numel(), device=place.device)
    src, dst = G.edges()
    which = torch.stack((kinds[src], G.edata[etype_field], kinds[dst]), 1)
    chosen = {}
    for start, name, end in which.unique(dim=0).tolist():
        same = (which == torch.tensor([start, name, end], device=which.device)).all(1)
        kind = (ntypes[start], etypes[name], ntypes[end])
        chosen[kind] = same.nonzero().flatten()
    edges = {k: (place[src[ids]], place[dst[ids]]) for k, ids in chosen.items()}
    sizes = {n: ids.numel() for n, ids in nodes.items()}
    made = HeteroGraph(edges, sizes, device=G.device, programs=G.programs)
    for n, ids in nodes.items():
        rows = G.ndata.part(ids)
        gone = (ntype_field, NID)
        made.frame_of(n).update({k: rows[k] for k in rows if k not in gone})
        made.frame_of(n)[NID] = ids
    for kind, ids in chosen.items():
        columns = G.edata.part(ids)
        gone = (etype_field, EID)
        made[kind].edata.update({k: columns[k] for k in columns if k not in gone})
        made[kind].edata[EID] = ids
    return made


@untraced
def norm_by_dst(g: AnyGraph, etype: Any = None) -> Tensor:
    """Return 1 over the in-degree of each edge's destination, [edges]."""
    r = g[etype]
    degrees: Tensor = r.in_degrees()[r.edges()[1]]
    return 1.0 / degrees.float()


@untraced
def laplacian_lambda_max(g: Graph) -> list[float]:
    """Return the largest eigenvalue of each graph's normalized Laplacian."""
    found = []
    for one in unbatch(g):
        src, dst = one.edges()
        scale = one.in_degrees().clamp(min=1).double() ** -0.5
        matrix = torch.eye(one.num_nodes(), dtype=torch.float64, device=one.device)
        matrix.index_put_((dst, src), -scale[src] * scale[dst], accumulate=True)
        found.append(float(torch.linalg.eigvals(matrix).real.max()))
    return found


@untraced
def topological_nodes_generator(
    graph: Graph, reverse: bool = False
) -> Sequence[Tensor]:
    """Return nodes by the longest path that leads to them; `reverse`: from them."""
    whole = graph.reverse(copy_ndata=False) if reverse else graph
    return whole.topological_levels()


@untraced
def bfs_nodes_generator(
    graph: Graph, source: Any, reverse: bool = False
) -> list[Tensor]:
    """Return nodes by their distance from `source`, which are the first."""
    last = ids_of("source", source, graph.num_nodes(), graph.device)
    seen = torch.zeros(graph.num_nodes(), dtype=torch.bool, device=graph.device)
    found = []
    while last.numel():
        found.append(last)
        seen[last] = True
        near = graph.in_edges(last)[0] if reverse else graph.out_edges(last)[1]
        near = near.unique()
        last = near[~seen[near]]
    return found


def prop_nodes_topo(
    graph: Graph,
    message_func: Message,
    reduce_func: Reduce,
    reverse: bool = False,
    apply_node_func: Apply | None = None,
) -> None:
    """Run `pull` for each level of `topological_nodes_generator`."""
    levels = topological_nodes_generator(graph, reverse)
    graph.prop_nodes(levels, message_func, reduce_func, apply_node_func)


def prop_nodes_bfs(
    graph: Graph,
    source: Any,
    message_func: Message,
    reduce_func: Reduce,
    reverse: bool = False,
    apply_node_func: Apply | None = None,
) -> None:
    """Run `pull` for each level of `bfs_nodes_generator`."""
    levels = bfs_nodes_generator(graph, source, reverse)
    graph.prop_nodes(levels, message_func, reduce_func, apply_node_func)


@untraced
def merge(graphs: Sequence[Graph]) -> Graph:
    """Return the graph of all graphs' edges between the same nodes, as many as the
    largest has. Of a node's row the last graph's counts, of edges the first graph says
    which features there are."""
    if not graphs:
        raise ValueError("expected at least one graph, got none")
    count = max(g.num_nodes() for g in graphs)
    ends = [g.edges() for g in graphs]
    src, dst = (torch.cat([e[i] for e in ends]) for i in range(2))
    made = Graph(src, dst, num_nodes=count, programs=graphs[0].programs)
    for g in graphs:
        for name, rows in g.ndata.items():
            made.ndata.write(name, g.nodes(), rows)
    for name in graphs[0].edata:
        made.edata[name] = torch.cat([g.edata[name] for g in graphs])
    return made
