"""Traversal of graphs whose edges stay in host memory and are read by the GPU there."""

from pydirect.traversal.bfs import bfs
from pydirect.traversal.components import connected_components
from pydirect.traversal.pagerank import pagerank
from pydirect.traversal.place import PlacedGraph, place
from pydirect.traversal.sssp import sssp
from pydirect.traversal.walk import Direction, Step, Trace, Walk

__all__ = [
    "Direction",
    "PlacedGraph",
    "Step",
    "Trace",
    "Walk",
    "bfs",
    "connected_components",
    "pagerank",
    "place",
    "sssp",
]
