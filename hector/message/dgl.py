"""DGL's names: `import hector.message.dgl as dgl` in place of `import dgl`.

`fn`, `dglnn` and `dataloading` are imported as
`from hector.message import functions as fn`, `nn as dglnn` and `dataloading`.
"""

from typing import Any

import torch
from torch import Tensor

from hector.indexing import adjacency, is_adjacency, tensor_of
from hector.message import dataloading, nn
from hector.message import functions as function
from hector.message.batching import (
    batch,
    broadcast_nodes,
    readout_edges,
    readout_nodes,
    softmax_nodes,
    unbatch,
)
from hector.message.blocks import sample_neighbors, to_block
from hector.message.graph import EID, NID, Graph
from hector.message.hetero import HeteroGraph
from hector.message.relation import edge_softmax

__all__ = [
    "EID",
    "NID",
    "add_self_loop",
    "batch",
    "broadcast_nodes",
    "dataloading",
    "edge_softmax",
    "edge_subgraph",
    "function",
    "graph",
    "heterograph",
    "max_nodes",
    "mean_nodes",
    "nn",
    "node_subgraph",
    "readout_edges",
    "readout_nodes",
    "remove_self_loop",
    "reverse",
    "sample_neighbors",
    "softmax_nodes",
    "sum_nodes",
    "to_block",
    "unbatch",
]

heterograph = HeteroGraph


def graph(
    data: Any,
    *,
    num_nodes: int | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Return a graph of (sources, destinations), pairs, or `adj_t`.

    `idtype` is DGL's: ids may come as int32 or int64, and are int64 in results.
    """
    if idtype not in (None, torch.int32, torch.int64):
        raise ValueError(f"expected idtype int32 or int64, got {idtype}")
    if is_adjacency(data):
        src, dst = adjacency(data)[0]
    elif isinstance(data, tuple) and len(data) == 2:
        src, dst = map(tensor_of, data)
    else:
        pairs = torch.as_tensor(list(data), dtype=torch.int64, device="cpu")
        src, dst = pairs.view(-1, 2).unbind(1)
    if device is not None:
        src, dst = src.to(device), dst.to(device)
    return Graph(src, dst, num_nodes=num_nodes)


def reverse(g: Any, copy_ndata: bool = True, copy_edata: bool = False) -> Any:
    """Return the graph whose edges lead back."""
    return g.reverse(copy_ndata, copy_edata)


def add_self_loop(g: Any, etype: Any = None) -> Any:
    """Return the graph with an edge from each node to itself."""
    return g.add_self_loop() if isinstance(g, Graph) else g.add_self_loop(etype)


def remove_self_loop(g: Graph) -> Graph:
    """Return the graph without edges from a node to itself."""
    return g.remove_self_loop()


def node_subgraph(g: Any, nodes: Any) -> Any:
    """Return the graph of some nodes and the edges between them."""
    return g.subgraph(nodes)


def edge_subgraph(g: Any, edges: Any, *, relabel_nodes: bool = True) -> Any:
    """Return the graph of some edges."""
    return g.edge_subgraph(edges, relabel_nodes)


def sum_nodes(g: Graph, feat: str) -> Tensor:
    """Return the sum of a node feature in each graph of a batch."""
    return readout_nodes(g, feat, "sum")


def mean_nodes(g: Graph, feat: str) -> Tensor:
    """Return the mean of a node feature in each graph of a batch."""
    return readout_nodes(g, feat, "mean")


def max_nodes(g: Graph, feat: str) -> Tensor:
    """Return the maximum of a node feature in each graph of a batch."""
    return readout_nodes(g, feat, "max")
