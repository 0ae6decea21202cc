"""Message passing with DGL's names (Wang, chapter 4): `graph` and `hetero` are the
doors, `functions` the built-in functions, `relation` runs calls along edges of a type,
`traced` compiles user functions, `eager` runs what the compiler cannot read, `batching`
joins small graphs, `dataloading` samples blocks, `layers` and `trees` are built of
them."""

from hector.message import dataloading, functions
from hector.message.batches import EdgeBatch, NodeBatch
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
from hector.message.joined import edge_softmax
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
    "EID",
    "NID",
    "EdgeBatch",
    "GATConv",
    "GINConv",
    "GMMConv",
    "GatedGCNConv",
    "Graph",
    "GraphConv",
    "HeteroGraph",
    "NodeBatch",
    "SAGEConv",
    "TreeLSTM",
    "batch",
    "broadcast_nodes",
    "dataloading",
    "edge_softmax",
    "functions",
    "readout_edges",
    "readout_nodes",
    "sample_neighbors",
    "softmax_nodes",
    "to_block",
    "unbatch",
]
