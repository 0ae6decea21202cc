"""Message passing on homogeneous graphs with DGL's names (Wang, chapter 4): `graph` is
the door, `functions` the built-in functions, `traced` compiles user functions, `eager`
runs what the compiler cannot read, `batching` joins small graphs, `layers` and `trees`
are built of them."""

from hector.message import functions
from hector.message.batches import EdgeBatch, NodeBatch
from hector.message.batching import (
    batch,
    broadcast_nodes,
    readout_edges,
    readout_nodes,
    softmax_nodes,
    unbatch,
)
from hector.message.graph import Graph
from hector.message.layers import (
    GATConv,
    GatedGCNConv,
    GINConv,
    GMMConv,
    GraphConv,
    SAGEConv,
)
from hector.message.trees import TreeLSTM

__all__ = [
    "EdgeBatch",
    "GATConv",
    "GINConv",
    "GMMConv",
    "GatedGCNConv",
    "Graph",
    "GraphConv",
    "NodeBatch",
    "SAGEConv",
    "TreeLSTM",
    "batch",
    "broadcast_nodes",
    "functions",
    "readout_edges",
    "readout_nodes",
    "softmax_nodes",
    "unbatch",
]
