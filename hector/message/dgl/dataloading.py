"""`dgl.dataloading`: loaders and samplers of nodes and edges."""

from hector.message import edge_batches as negative_sampler
from hector.message.dataloading import (
    BlockSampler,
    DataLoader,
    GraphDataLoader,
    MultiLayerFullNeighborSampler,
    MultiLayerNeighborSampler,
    NeighborSampler,
)
from hector.message.edge_batches import as_edge_prediction_sampler

Sampler = BlockSampler

__all__ = [
    "BlockSampler",
    "DataLoader",
    "GraphDataLoader",
    "MultiLayerFullNeighborSampler",
    "MultiLayerNeighborSampler",
    "NeighborSampler",
    "Sampler",
    "as_edge_prediction_sampler",
    "negative_sampler",
]
