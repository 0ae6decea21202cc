"""`dgl.dataloading`: loaders and samplers of nodes and edges."""

from typing import Any

from hector.message import edge_batches as negative_sampler
from hector.message.dataloading import (
    BlockSampler,
    DataLoader,
    GraphDataLoader,
    MultiLayerFullNeighborSampler,
    MultiLayerNeighborSampler,
    NeighborSampler,
    ShaDowKHopSampler,
)
from hector.message.edge_batches import as_edge_prediction_sampler

Sampler = BlockSampler
NodeDataLoader = DataLoader


def EdgeDataLoader(
    g: Any,
    eids: Any,
    graph_sampler: BlockSampler,
    g_sampling: Any = None,
    device: Any = None,
    exclude: Any = None,
    reverse_eids: Any = None,
    reverse_etypes: Any = None,
    negative_sampler: Any = None,
    **named: Any,
) -> DataLoader:
    """Return the `DataLoader` of `as_edge_prediction_sampler`, as DGL's before 1.0."""
    if g_sampling is not None:
        raise ValueError("expected g_sampling=None; give the graph to be sampled as g")
    ways = (exclude, reverse_eids, reverse_etypes, negative_sampler)
    sampler = as_edge_prediction_sampler(graph_sampler, *ways)
    return DataLoader(g, eids, sampler, device, **named)


__all__ = [
    "BlockSampler",
    "DataLoader",
    "EdgeDataLoader",
    "GraphDataLoader",
    "MultiLayerFullNeighborSampler",
    "MultiLayerNeighborSampler",
    "NeighborSampler",
    "NodeDataLoader",
    "Sampler",
    "ShaDowKHopSampler",
    "as_edge_prediction_sampler",
    "negative_sampler",
]
