"""`dgl.sampling`: neighbours, walks, edges that are none."""

from hector.message.blocks import sample_neighbors
from hector.message.edge_batches import global_uniform_negative_sampling
from hector.message.walks import (
    PinSAGESampler,
    RandomWalkNeighborSampler,
    node2vec_random_walk,
    pack_traces,
    random_walk,
    select_topk,
)

__all__ = [
    "PinSAGESampler",
    "RandomWalkNeighborSampler",
    "global_uniform_negative_sampling",
    "node2vec_random_walk",
    "pack_traces",
    "random_walk",
    "sample_neighbors",
    "select_topk",
]
