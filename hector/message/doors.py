"""Graphs of one type made of pairs, matrices and graphs of other libraries."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hector.indexing import adjacency, is_adjacency, tensor_of
from hector.message.graph import Graph


def graph(
    data: Any,
    *,
    num_nodes: int | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Return a graph of (sources, destinations), pairs, `adj_t`, or a format's arrays:
    ("coo", ends), ("csr", (offsets by source, destinations, edge ids)), ("csc", ...).

    `idtype` is DGL's: ids may come as int32 or int64, and are int64 in results.
    """
    if idtype not in (None, torch.int32, torch.int64):
        raise ValueError(f"expected idtype int32 or int64, got {idtype}")
    if is_adjacency(data):
        src, dst = adjacency(data)[0]
    elif isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], str):
        src, dst = _of_format(*data)
    elif isinstance(data, tuple) and len(data) == 2:
        src, dst = map(tensor_of, data)
    else:
        pairs = torch.as_tensor(list(data), dtype=torch.int64, device="cpu")
        src, dst = pairs.view(-1, 2).unbind(1)
    if device is not None:
        src, dst = src.to(device), dst.to(device)
    return Graph(src, dst, num_nodes=num_nodes)


def _of_format(fmt: str, arrays: Any) -> tuple[Tensor, Tensor]:
    if fmt == "coo":
        return tensor_of(arrays[0]), tensor_of(arrays[1])
    if fmt not in ("csr", "csc"):
        raise ValueError(f"expected 'coo', 'csr' or 'csc', got {fmt!r}")
    ptr, other, ids = map(tensor_of, arrays)
    rows = torch.arange(ptr.numel() - 1, device=ptr.device)
    by, other = rows.repeat_interleave(ptr.diff()), other.long()
    if ids.numel():  # where edge i of the arrays is edge ids[i]
        place = torch.argsort(ids)
        by, other = by[place], other[place]
    return (by, other) if fmt == "csr" else (other, by)


def rand_graph(
    num_nodes: int,
    num_edges: int,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Return a graph of edges between nodes drawn at random."""
    ends = tuple(torch.randint(num_nodes, (2, num_edges), device=device))
    return graph(ends, num_nodes=num_nodes, idtype=idtype)


def scipy_graph(
    sp_mat: Any,
    eweight_name: str | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Return the graph of a square matrix of scipy: an edge from row to column for each
    entry, whose value is the edge feature `eweight_name`."""
    if sp_mat.shape[0] != sp_mat.shape[1]:
        raise ValueError(
            f"expected a square matrix, got {list(sp_mat.shape)}; give heterograph the "
            "row and column ids of one between two types"
        )
    coo = sp_mat.tocoo()
    ends = torch.as_tensor(coo.row).long(), torch.as_tensor(coo.col).long()
    made = graph(ends, num_nodes=coo.shape[0], idtype=idtype, device=device)
    if eweight_name is not None:
        made.edata[eweight_name] = torch.as_tensor(coo.data).to(made.device)
    return made


def networkx_graph(
    nx_graph: Any,
    node_attrs: Sequence[str] = (),
    edge_attrs: Sequence[str] = (),
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Return the graph of one of networkx, whose nodes are numbered in their sorted
    order; an undirected edge becomes two."""
    directed = nx_graph.to_directed()
    nodes = sorted(directed.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    edges = [(place[u], place[v], kept) for u, v, kept in directed.edges(data=True)]
    ends = [e[0] for e in edges], [e[1] for e in edges]
    made = graph(ends, num_nodes=len(nodes), idtype=idtype, device=device)
    for name in node_attrs:
        rows = [torch.as_tensor(directed.nodes[n][name]) for n in nodes]
        made.ndata[name] = torch.stack(rows).to(made.device)
    for name in edge_attrs:
        rows = [torch.as_tensor(kept[name]) for _, _, kept in edges]
        made.edata[name] = torch.stack(rows).to(made.device)
    return made
