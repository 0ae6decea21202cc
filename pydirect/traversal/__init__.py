"""Traversal of graphs whose edges stay in host memory and are read by the GPU there."""

from pydirect.traversal.bfs import bfs
from pydirect.traversal.components import connected_components
from pydirect.traversal.compressed import CompressedGraph, compress
from pydirect.traversal.convert import (
    from_networkx,
    from_pyg,
    from_scipy,
    to_networkx,
    to_pyg,
)
from pydirect.traversal.pagerank import pagerank
from pydirect.traversal.placed import PlacedGraph, place
from pydirect.traversal.predecessors import predecessors
from pydirect.traversal.requests import count_requests
from pydirect.traversal.sssp import sssp
from pydirect.traversal.walk import Direction, Step, Trace, Walk

__all__ = [
    "CompressedGraph",
    "Direction",
    "PlacedGraph",
    "Step",
    "Trace",
    "Walk",
    "bfs",
    "compress",
    "connected_components",
    "count_requests",
    "from_networkx",
    "from_pyg",
    "from_scipy",
    "pagerank",
    "place",
    "predecessors",
    "sssp",
    "to_networkx",
    "to_pyg",
]
