"""Many small graphs as one, and what is read out of each of them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from hector.message.frame import Frame
from hector.message.graph import Graph
from hector.message.hetero import HeteroGraph
from hector.precision import wide
from hector.tracing import untraced

READOUTS = ("sum", "mean", "max", "min")
G = TypeVar("G", Graph, HeteroGraph)


@untraced
def batch(graphs: Sequence[G]) -> G:
    """Join graphs of the same types into one whose components they are, in order.

    Features that all of them have are joined; `batch_num_nodes` and `batch_num_edges`
    say whose rows are whose. Programs compiled for one batch serve the next.
    """
    if not graphs:
        raise ValueError("expected at least one graph, got none")
    first = graphs[0]
    for g in graphs:
        if g.is_block or g.canonical_etypes != first.canonical_etypes:
            raise ValueError(
                f"expected graphs of the types {first.canonical_etypes}, got "
                f"{'a block' if g.is_block else g.canonical_etypes}"
            )
    begin = {
        n: list(accumulate((g.num_nodes(n) for g in graphs), initial=0))
        for n in first.ntypes
    }
    edges = {}
    for kind in first.canonical_etypes:
        ends = [g[kind].edges() for g in graphs]
        src, dst = (
            torch.cat([e[i] + at for e, at in zip(ends, begin[n], strict=False)])
            for i, n in ((0, kind[0]), (1, kind[2]))
        )
        edges[kind] = (src, dst)
    sizes = {n: at[-1] for n, at in begin.items()}
    made = _alike(first, edges, sizes, sampled=True)
    for n in first.ntypes:
        made.frame_of(n).update(_joined([g.frame_of(n) for g in graphs]))
    for kind in edges:
        made[kind].edata.update(_joined([g[kind].edata for g in graphs]))
    made.set_batch_num_nodes(
        {n: [s for g in graphs for s in g.node_sizes(n)] for n in first.ntypes}
    )
    made.set_batch_num_edges(
        {k: [s for g in graphs for s in g.edge_sizes(k)] for k in edges}
    )
    return made


def _alike(like: G, edges: Any, sizes: dict[str, int], *, sampled: bool) -> G:
    """Return a graph of the same types and programs."""
    if isinstance(like, HeteroGraph):
        return HeteroGraph(edges, sizes, sampled=sampled, programs=like.programs)
    ((src, dst),) = edges.values()
    (count,) = sizes.values()
    return Graph(src, dst, num_nodes=count, sampled=sampled, programs=like.programs)


def _joined(frames: Sequence[Frame]) -> dict[str, Tensor]:
    return {
        name: torch.cat([f[name] for f in frames])
        for name in frames[0]
        if all(name in f for f in frames)
    }


@untraced
def unbatch(graph: G) -> list[G]:
    """Return the graphs that `batch` joined, each with its rows of all features."""
    nodes = {n: list(graph.node_sizes(n)) for n in graph.ntypes}
    counts = {k: list(graph.edge_sizes(k)) for k in graph.canonical_etypes}
    begin = {n: list(accumulate(s, initial=0)) for n, s in nodes.items()}
    ends = {
        k: [e.split(counts[k]) for e in graph[k].edges()]
        for k in graph.canonical_etypes
    }
    made = []
    for i in range(graph.batch_size):
        edges = {
            k: (src[i] - begin[k[0]][i], dst[i] - begin[k[2]][i])
            for k, (src, dst) in ends.items()
        }
        sizes = {n: s[i] for n, s in nodes.items()}
        made.append(_alike(graph, edges, sizes, sampled=False))
    for n in graph.ntypes:
        _split(graph.frame_of(n), nodes[n], [g.frame_of(n) for g in made])
    for k in graph.canonical_etypes:
        _split(graph[k].edata, counts[k], [g[k].edata for g in made])
    return made


def _split(whole: Frame, sizes: list[int], parts: Sequence[Frame]) -> None:
    for name, value in whole.items():
        for part, rows in zip(parts, value.split(sizes), strict=True):
            part[name] = rows


@untraced
def readout_nodes(
    graph: Graph | HeteroGraph,
    feat: str,
    weight: str | None = None,
    *,
    op: str = "sum",
    ntype: str | None = None,
) -> Tensor:
    """Return [graphs, ...]: the sum, mean, max or min of a node feature in each graph
    of a batch; zeros for a graph without nodes. `weight` names a feature that rows are
    multiplied by before."""
    return _read(graph.frame_of(ntype), feat, weight, graph.node_sizes(ntype), op)


@untraced
def readout_edges(
    graph: Graph | HeteroGraph,
    feat: str,
    weight: str | None = None,
    *,
    op: str = "sum",
    etype: Any = None,
) -> Tensor:
    """Return [graphs, ...]: `readout_nodes` of an edge feature."""
    return _read(graph[etype].edata, feat, weight, graph.edge_sizes(etype), op)


@untraced
def broadcast_nodes(
    graph: Graph | HeteroGraph, rows: Tensor, *, ntype: str | None = None
) -> Tensor:
    """Return [nodes, ...]: for each node the row of its graph."""
    return _broadcast(rows, graph.node_sizes(ntype))


@untraced
def broadcast_edges(
    graph: Graph | HeteroGraph, rows: Tensor, *, etype: Any = None
) -> Tensor:
    """Return [edges, ...]: for each edge the row of its graph."""
    return _broadcast(rows, graph.edge_sizes(etype))


@untraced
def softmax_nodes(
    graph: Graph | HeteroGraph, feat: str, *, ntype: str | None = None
) -> Tensor:
    """Return the softmax of a node feature over the nodes of each graph, [nodes,
    ...]."""
    return _softmax(graph.frame_of(ntype)[feat], graph.node_sizes(ntype))


@untraced
def softmax_edges(
    graph: Graph | HeteroGraph, feat: str, *, etype: Any = None
) -> Tensor:
    """Return the softmax of an edge feature over the edges of each graph."""
    return _softmax(graph[etype].edata[feat], graph.edge_sizes(etype))


@untraced
def topk_nodes(
    graph: Graph | HeteroGraph,
    feat: str,
    k: int,
    *,
    descending: bool = True,
    sortby: int | None = None,
    ntype: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest rows of a node feature in each graph, [graphs, k, width],
    and the nodes that they are of, counted in the graph; zeros where there are fewer.
    `sortby`: the column that decides; None: each column by itself."""
    x, sizes = graph.frame_of(ntype)[feat], graph.node_sizes(ntype)
    return _topk(x, sizes, k, descending, sortby)


@untraced
def topk_edges(
    graph: Graph | HeteroGraph,
    feat: str,
    k: int,
    *,
    descending: bool = True,
    sortby: int | None = None,
    etype: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return `topk_nodes` of an edge feature."""
    x, sizes = graph[etype].edata[feat], graph.edge_sizes(etype)
    return _topk(x, sizes, k, descending, sortby)


def slice_batch(graph: G, gid: int) -> G:
    """Return one of the graphs that `batch` joined."""
    return unbatch(graph)[gid]


def _topk(
    x: Tensor, sizes: Sequence[int], k: int, descending: bool, sortby: int | None
) -> tuple[Tensor, Tensor]:
    rows, ids = [], []
    for part in x.split(list(sizes)):
        key = part if sortby is None else part[:, sortby]
        at = key.sort(dim=0, descending=descending, stable=True).indices[:k]
        made = part[at] if sortby is not None else part.gather(0, at)
        rows.append(torch.cat((made, made.new_zeros(k - len(made), *x.shape[1:]))))
        ids.append(torch.cat((at, at.new_zeros(k - len(at), *at.shape[1:]))))
    return torch.stack(rows), torch.stack(ids)


def _broadcast(rows: Tensor, counts: Sequence[int]) -> Tensor:
    sizes = torch.tensor(counts, device=rows.device)
    many = wide(rows).repeat_interleave(sizes, dim=0, output_size=sum(counts))
    return many.to(rows.dtype)


def _softmax(given: Tensor, sizes: Sequence[int]) -> Tensor:
    x = wide(given)
    peak = _broadcast(_readout(x.detach(), sizes, "max"), sizes)
    e = torch.exp(x - peak)
    total = _readout(e, sizes, "sum")
    return (e / _broadcast(total, sizes)).to(given.dtype)


def _read(
    frame: Frame, feat: str, weight: str | None, sizes: Sequence[int], op: str
) -> Tensor:
    x = frame[feat]
    if weight is None:
        return _readout(x, sizes, op)
    if weight in READOUTS and weight not in frame:
        raise ValueError(f"expected op={weight!r} by name: the third place is a weight")
    w = frame[weight]
    return _readout(x * w.view(*w.shape, *(1,) * (x.dim() - w.dim())), sizes, op)


def _readout(x: Tensor, sizes: Sequence[int], reducer: str) -> Tensor:
    if reducer not in READOUTS:
        raise ValueError(f"expected a reducer of {list(READOUTS)}, got {reducer!r}")
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point rows to read out, got {x.dtype}")
    lengths = torch.tensor(sizes, device=x.device)
    made = torch.segment_reduce(wide(x), reducer, lengths=lengths, unsafe=True)
    if 0 in sizes:
        there = (lengths > 0).view(-1, *(1,) * (x.dim() - 1))
        made = torch.where(there, made, 0.0)
    return made.to(x.dtype)
