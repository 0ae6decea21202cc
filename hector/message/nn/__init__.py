"""Layers with DGL's arguments, for graphs, single relations and blocks.

`forward(graph, feat)`: rows of all nodes; of a block those of its sources, or a pair
(sources, destinations). What each computes is in its docstring: a formula of the paper
with DGL's choices. `hector.message` has the same layers with PyG's arguments.
"""

from hector.message.nn.attending import (
    AGNNConv,
    DotGatConv,
    GatedGraphConv,
    HGTConv,
)
from hector.message.nn.convs import (
    GATConv,
    GINConv,
    GraphConv,
    SAGEConv,
)
from hector.message.nn.edge_layers import (
    CFConv,
    EdgeConv,
    EGATConv,
    EGNNConv,
    GatedGCNConv,
    GINEConv,
    GMMConv,
    NNConv,
)
from hector.message.nn.hetero_conv import HeteroGraphConv
from hector.message.nn.others import (
    EdgePredictor,
    HeteroEmbedding,
    HeteroLinear,
    JumpingKnowledge,
    KNNGraph,
    LabelPropagation,
    RadiusGraph,
    SegmentedKNNGraph,
    Sequential,
)
from hector.message.nn.readouts import (
    AvgPooling,
    GlobalAttentionPooling,
    MaxPooling,
    Set2Set,
    SortPooling,
    SumPooling,
    WeightAndSum,
)
from hector.message.nn.spread import (
    APPNPConv,
    ChebConv,
    GCN2Conv,
    SGConv,
    TAGConv,
)
from hector.message.nn.weighed import (
    EdgeWeightNorm,
    GATv2Conv,
    RelGraphConv,
)
from hector.typed_linear import TypedLinear

__all__ = [
    "AGNNConv",
    "APPNPConv",
    "AvgPooling",
    "CFConv",
    "ChebConv",
    "DotGatConv",
    "EGATConv",
    "EGNNConv",
    "EdgeConv",
    "EdgePredictor",
    "EdgeWeightNorm",
    "GATConv",
    "GATv2Conv",
    "GCN2Conv",
    "GINConv",
    "GINEConv",
    "GMMConv",
    "GatedGCNConv",
    "GatedGraphConv",
    "GlobalAttentionPooling",
    "GraphConv",
    "HGTConv",
    "HeteroEmbedding",
    "HeteroGraphConv",
    "HeteroLinear",
    "JumpingKnowledge",
    "KNNGraph",
    "LabelPropagation",
    "MaxPooling",
    "NNConv",
    "RadiusGraph",
    "RelGraphConv",
    "SAGEConv",
    "SGConv",
    "SegmentedKNNGraph",
    "Sequential",
    "Set2Set",
    "SortPooling",
    "SumPooling",
    "TAGConv",
    "TypedLinear",
    "WeightAndSum",
]
