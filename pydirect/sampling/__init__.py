"""Graphs in compressed form and mini-batches of sampled neighbourhoods."""

from pydirect.sampling.device import DeviceSampler, HeteroBatch, HeteroDeviceSampler
from pydirect.sampling.generate import GraphStatistics, generate_graph
from pydirect.sampling.graph import Graph
from pydirect.sampling.neighbor import NeighborSampler, SampledBatch
from pydirect.sampling.resident import Residence, ResidentGraph, settle
from pydirect.sampling.walks import KeyedWalks

__all__ = [
    "DeviceSampler",
    "Graph",
    "GraphStatistics",
    "HeteroBatch",
    "HeteroDeviceSampler",
    "KeyedWalks",
    "NeighborSampler",
    "Residence",
    "ResidentGraph",
    "SampledBatch",
    "generate_graph",
    "settle",
]
