"""`dgl.sampling`: neighbours, walks, edges that are none."""

from hector.message.blocks import sample_neighbors
from hector.message.edge_batches import global_uniform_negative_sampling
from hector.message.walks import (
    PinSAGESampler,
    RandomWalkNeighborSampler,
    random_walk,
)

__all__ = [
    "PinSAGESampler",
    "RandomWalkNeighborSampler",
    "global_uniform_negative_sampling",
    "random_walk",
    "sample_neighbors",
]
