"""Graphs in compressed form and mini-batches of sampled neighbourhoods."""

from pydirect.sampling.generate import GraphStatistics, generate_graph
from pydirect.sampling.graph import Graph
from pydirect.sampling.neighbor import NeighborSampler, SampledBatch

__all__ = [
    "Graph",
    "GraphStatistics",
    "NeighborSampler",
    "SampledBatch",
    "generate_graph",
]
