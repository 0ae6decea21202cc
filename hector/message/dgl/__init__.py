"""DGL's names: `import hector.message.dgl as dgl` in place of `import dgl`, and
`hector.message.dgl.function`, `.nn`, `.nn.pytorch`, `.dataloading`, `.sampling` in
place of DGL's modules of these names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hector.message.batching import (
    batch,
    broadcast_edges,
    broadcast_nodes,
    readout_edges,
    readout_nodes,
    softmax_edges,
    softmax_nodes,
    topk_nodes,
    unbatch,
)
from hector.message.blocks import sample_neighbors, to_block
from hector.message.dgl import dataloading, function, nn, sampling
from hector.message.doors import graph, networkx_graph, rand_graph, scipy_graph
from hector.message.graph import EID, NID, Graph
from hector.message.hetero import HeteroGraph
from hector.message.relation import edge_softmax
from hector.message.saved import load_graphs, save_graphs
from hector.message.transforms import (
    ETYPE,
    NTYPE,
    add_reverse_edges,
    compact_graphs,
    edge_subgraph,
    in_subgraph,
    khop_in_subgraph,
    node_subgraph,
    out_subgraph,
    to_bidirected,
    to_homogeneous,
    to_simple,
)

heterograph = HeteroGraph
DGLGraph = Graph | HeteroGraph
"""For `isinstance` and annotations."""


def _method(name: str) -> Callable[..., Any]:
    """Return the function that calls a graph's method."""

    def call(g: Any, *args: Any, **named: Any) -> Any:
        return getattr(g, name)(*args, **named)

    call.__name__, call.__doc__ = name, f"Return `g.{name}(...)`."
    return call


def _changed(name: str) -> Callable[..., Any]:
    """Return the function that changes a copy of a graph."""

    def call(g: Any, *args: Any, **named: Any) -> Any:
        made = g.local_var()
        getattr(made, name)(*args, **named)
        return made

    call.__name__, call.__doc__ = name, f"Return a copy after `copy.{name}(...)`."
    return call


from_scipy, from_networkx = scipy_graph, networkx_graph
reverse = _method("reverse")
add_self_loop = _method("add_self_loop")
remove_self_loop = _method("remove_self_loop")
edge_type_subgraph = _method("edge_type_subgraph")
node_type_subgraph = _method("node_type_subgraph")
add_edges = _changed("add_edges")
remove_edges = _changed("remove_edges")
add_nodes = _changed("add_nodes")
remove_nodes = _changed("remove_nodes")
sum_nodes = partial(readout_nodes, op="sum")
mean_nodes = partial(readout_nodes, op="mean")
max_nodes = partial(readout_nodes, op="max")
sum_edges = partial(readout_edges, op="sum")
mean_edges = partial(readout_edges, op="mean")
max_edges = partial(readout_edges, op="max")
seed = torch.manual_seed

_ELSEWHERE = {
    "to_heterogeneous": "build dgl.heterograph from the edges of each type",
    "line_graph": "build it from in_edges and out_edges",
    "knn_graph": "give dgl.graph the pairs that torch.cdist and topk find",
    "sparse": "write products with update_all, or torch.sparse",
    "graphbolt": "use dgl.dataloading, or pydirect's samplers for large graphs",
    "distributed": "hector.train shards graphs (docs/relational-graphs.md)",
    "data": "read PyG's data sets; dgl.heterograph.from_hetero_data takes them",
    "ops": "write g.update_all with functions of hector.message.dgl.function",
    "node2vec_random_walk": "use pydirect.sampling.KeyedWalks.node2vec",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        raise AttributeError(f"{name} of DGL is not taken; {_ELSEWHERE[name]}")
    raise AttributeError(
        f"hector.message.dgl has no {name!r}; docs/message-passing.md says what of DGL "
        "is not taken"
    )


__all__ = [
    "EID",
    "ETYPE",
    "NID",
    "NTYPE",
    "DGLGraph",
    "add_edges",
    "add_nodes",
    "add_reverse_edges",
    "add_self_loop",
    "batch",
    "broadcast_edges",
    "broadcast_nodes",
    "compact_graphs",
    "dataloading",
    "edge_softmax",
    "edge_subgraph",
    "edge_type_subgraph",
    "from_networkx",
    "from_scipy",
    "function",
    "graph",
    "heterograph",
    "in_subgraph",
    "khop_in_subgraph",
    "load_graphs",
    "max_edges",
    "max_nodes",
    "mean_edges",
    "mean_nodes",
    "nn",
    "node_subgraph",
    "node_type_subgraph",
    "out_subgraph",
    "rand_graph",
    "readout_edges",
    "readout_nodes",
    "remove_edges",
    "remove_nodes",
    "remove_self_loop",
    "reverse",
    "sample_neighbors",
    "sampling",
    "save_graphs",
    "seed",
    "softmax_edges",
    "softmax_nodes",
    "sum_edges",
    "sum_nodes",
    "to_bidirected",
    "to_block",
    "to_homogeneous",
    "to_simple",
    "topk_nodes",
    "unbatch",
]
