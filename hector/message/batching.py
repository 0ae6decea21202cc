"""Many small graphs as one, and what is read out of each of them."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hector.message.graph import Graph
from hector.precision import wide
from hector.tracing import untraced

READOUTS = ("sum", "mean", "max", "min")


@untraced
def batch(graphs: Sequence[Graph]) -> Graph:
    """Join graphs into one `Graph` whose components they are, in order.

    Features that all of them have are joined; `batch_num_nodes` and `batch_num_edges`
    say whose rows are whose. Programs compiled for one batch serve the next.
    """
    if not graphs:
        raise ValueError("expected at least one graph, got none")
    first = list(accumulate((g.num_nodes() for g in graphs), initial=0))
    ends = [
        torch.cat([g.edges()[i] + at for g, at in zip(graphs, first, strict=False)])
        for i in (0, 1)
    ]
    made = Graph(
        ends[0],
        ends[1],
        num_nodes=first[-1],
        sampled=True,
        programs=graphs[0].programs,
    )
    for name in graphs[0].ndata:
        if all(name in g.ndata for g in graphs):
            made.ndata[name] = torch.cat([g.ndata[name] for g in graphs])
    for name in graphs[0].edata:
        if all(name in g.edata for g in graphs):
            made.edata[name] = torch.cat([g.edata[name] for g in graphs])
    made.batch_num_nodes = tuple(n for g in graphs for n in g.batch_num_nodes)
    made.batch_num_edges = tuple(n for g in graphs for n in g.batch_num_edges)
    return made


@untraced
def unbatch(graph: Graph) -> list[Graph]:
    """Return the graphs that `batch` joined, each with its rows of all features."""
    nodes, edges = list(graph.batch_num_nodes), list(graph.batch_num_edges)
    src, dst = (e.split(edges) for e in graph.edges())
    first = accumulate(nodes, initial=0)
    made = [
        Graph(s - at, d - at, num_nodes=n, programs=graph.programs)
        for s, d, n, at in zip(src, dst, nodes, first, strict=False)
    ]
    for whole, sizes, kind in (
        (graph.ndata, nodes, "ndata"),
        (graph.edata, edges, "edata"),
    ):
        for name, value in whole.items():
            for g, part in zip(made, value.split(sizes), strict=True):
                getattr(g, kind)[name] = part
    return made


@untraced
def readout_nodes(graph: Graph, feature: str, reducer: str = "sum") -> Tensor:
    """Return [graphs, ...]: the sum, mean, max or min of a node feature in each graph
    of a batch; zeros for a graph without nodes."""
    return _readout(graph.ndata[feature], graph.batch_num_nodes, reducer)


@untraced
def readout_edges(graph: Graph, feature: str, reducer: str = "sum") -> Tensor:
    """Return [graphs, ...]: `readout_nodes` of an edge feature."""
    return _readout(graph.edata[feature], graph.batch_num_edges, reducer)


@untraced
def broadcast_nodes(graph: Graph, rows: Tensor) -> Tensor:
    """Return [nodes, ...]: for each node the row of its graph."""
    sizes = torch.tensor(graph.batch_num_nodes, device=rows.device)
    many = wide(rows).repeat_interleave(sizes, dim=0, output_size=graph.num_nodes())
    return many.to(rows.dtype)


@untraced
def softmax_nodes(graph: Graph, feature: str) -> Tensor:
    """Return the softmax of a node feature over the nodes of each graph, [nodes,
    ...]."""
    given = graph.ndata[feature]
    x = wide(given)
    peak = broadcast_nodes(graph, _readout(x.detach(), graph.batch_num_nodes, "max"))
    e = torch.exp(x - peak)
    total = _readout(e, graph.batch_num_nodes, "sum")
    return (e / broadcast_nodes(graph, total)).to(given.dtype)


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
