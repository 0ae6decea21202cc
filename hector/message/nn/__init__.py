"""Layers with DGL's arguments, for graphs, single relations and blocks.

`forward(graph, feat)`: rows of all nodes; of a block those of its sources, or a pair
(sources, destinations). What each computes is in its docstring: a formula of the paper
with DGL's choices. `hector.message` has the same layers with PyG's arguments.
"""

from hector.message.nn.convs import (
    GATConv,
    GINConv,
    GraphConv,
    HeteroGraphConv,
    SAGEConv,
)
from hector.message.nn.readouts import (
    AvgPooling,
    GlobalAttentionPooling,
    MaxPooling,
    SumPooling,
)
from hector.message.nn.weighed import EdgeWeightNorm, GATv2Conv, RelGraphConv
from hector.typed_linear import TypedLinear

__all__ = [
    "AvgPooling",
    "EdgeWeightNorm",
    "GATConv",
    "GATv2Conv",
    "GINConv",
    "GlobalAttentionPooling",
    "GraphConv",
    "HeteroGraphConv",
    "MaxPooling",
    "RelGraphConv",
    "SAGEConv",
    "SumPooling",
    "TypedLinear",
]
