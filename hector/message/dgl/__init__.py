"""DGL's names: `import hector.message.dgl as dgl` in place of `import dgl`, and
`hector.message.dgl.function`, `.nn`, `.nn.pytorch`, `.dataloading`, `.sampling`,
`.transforms`, `.ops`, `.data`, `.init` in place of DGL's modules of these names.
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
    slice_batch,
    softmax_edges,
    softmax_nodes,
    topk_edges,
    topk_nodes,
    unbatch,
)
from hector.message.blocks import sample_neighbors, to_block
from hector.message.dgl import (
    data,
    dataloading,
    function,
    init,
    nn,
    ops,
    sampling,
    transforms,
)
from hector.message.dgl.transforms import (
    AddReverse,
    AddSelfLoop,
    Compose,
    RemoveSelfLoop,
    ToSimple,
)
from hector.message.doors import graph, networkx_graph, rand_graph, scipy_graph
from hector.message.graph import EID, NID, Graph
from hector.message.hetero import HeteroGraph
from hector.message.joined import edge_softmax
from hector.message.paths import (
    bfs_nodes_generator,
    khop_graph,
    laplacian_lambda_max,
    line_graph,
    merge,
    metapath_reachable_graph,
    norm_by_dst,
    prop_nodes_bfs,
    prop_nodes_topo,
    to_heterogeneous,
    topological_nodes_generator,
)
from hector.message.points import knn_graph, radius_graph, segmented_knn_graph
from hector.message.saved import load_graphs, save_graphs
from hector.message.transforms import (
    ETYPE,
    NTYPE,
    add_reverse_edges,
    compact_graphs,
    edge_subgraph,
    in_subgraph,
    khop_in_subgraph,
    khop_out_subgraph,
    node_subgraph,
    out_subgraph,
    to_bidirected,
    to_homogeneous,
    to_simple,
)

heterograph = HeteroGraph


class _Graphs(type):
    """Of `DGLGraph`: what it makes are graphs, and so are all of them."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Graph | HeteroGraph)

    def __call__(cls, data: Any = ((), ()), **named: Any) -> Graph:
        return graph(data, **named)


class DGLGraph(metaclass=_Graphs):
    """For `isinstance`, annotations, and `DGLGraph()`, an empty graph."""


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
to_networkx = _method("to_networkx")
prop_nodes = _method("prop_nodes")
prop_edges = _method("prop_edges")
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
    "sparse": "write products with update_all, or torch.sparse of g.adj_external()",
    "graphbolt": "use dgl.dataloading, or pydirect's samplers for large graphs",
    "distributed": "hector.train shards graphs (docs/relational-graphs.md)",
    "dfs_edges_generator": "networkx has it, of g.to_networkx()",
    "khop_adj": "torch.linalg.matrix_power of g.adj_external().to_dense()",
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
    "AddReverse",
    "AddSelfLoop",
    "Compose",
    "DGLGraph",
    "RemoveSelfLoop",
    "ToSimple",
    "add_edges",
    "add_nodes",
    "add_reverse_edges",
    "add_self_loop",
    "batch",
    "bfs_nodes_generator",
    "broadcast_edges",
    "broadcast_nodes",
    "compact_graphs",
    "data",
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
    "init",
    "khop_graph",
    "khop_in_subgraph",
    "khop_out_subgraph",
    "knn_graph",
    "laplacian_lambda_max",
    "line_graph",
    "load_graphs",
    "max_edges",
    "max_nodes",
    "mean_edges",
    "mean_nodes",
    "merge",
    "metapath_reachable_graph",
    "nn",
    "node_subgraph",
    "node_type_subgraph",
    "norm_by_dst",
    "ops",
    "out_subgraph",
    "prop_edges",
    "prop_nodes",
    "prop_nodes_bfs",
    "prop_nodes_topo",
    "radius_graph",
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
    "segmented_knn_graph",
    "slice_batch",
    "softmax_edges",
    "softmax_nodes",
    "sum_edges",
    "sum_nodes",
    "to_bidirected",
    "to_block",
    "to_heterogeneous",
    "to_homogeneous",
    "to_networkx",
    "to_simple",
    "topk_edges",
    "topk_nodes",
    "topological_nodes_generator",
    "transforms",
    "unbatch",
]
