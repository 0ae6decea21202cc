"""How many requests a walk makes on the link, without running it (EMOGI, section 2.4).

The rules are those of `pydirect.coalesce`; no cache is modelled. The L2 of an H200
counts the same sectors for every walk.
"""

import numpy as np
import torch

from pydirect.coalesce import (
    LINE_BYTES,
    SECTOR_BYTES,
    WARP_LANES,
    Integers,
    Requests,
    requests_of,
)
from pydirect.sampling import Graph
from pydirect.sampling.graph import check_nodes
from pydirect.traversal.walk import Walk


def count_requests(
    graph: Graph, walk: Walk | str, nodes: torch.Tensor | None = None
) -> Requests:
    """Count the requests of visiting lists once, where the edge list starts on a line.

    Args:
        graph: lists of ids of 4 or 8 bytes; weights are not counted.
        walk: how they are read.
        nodes: int64, ascending: whose lists; None: all. Takes some 100 bytes an edge.

    Returns:
        Requests of 32, 64, 96 and 128 bytes.

    Raises:
        ValueError: ``nodes`` that the graph does not have.
    """
    if nodes is not None:
        check_nodes("nodes", nodes, graph.num_nodes)
    size = graph.neighbors.element_size()
    offsets = graph.offsets.numpy()
    begin, end = offsets[:-1], offsets[1:]
    if nodes is not None:
        chosen = nodes.cpu().numpy()
        begin, end = begin[chosen], end[chosen]
    useful = int((end - begin).sum()) * size
    how = Walk(walk)
    item = np.repeat(np.arange(len(begin)), end - begin)
    rank = np.arange(len(item)) - np.repeat(
        np.cumsum(end - begin) - (end - begin), end - begin
    )
    edge = begin[item] + rank
    instruction = _instructions(how, begin, item, edge, LINE_BYTES // size)
    found = requests_of(instruction, edge * size)
    sizes = np.bincount(
        [num_bytes // SECTOR_BYTES - 1 for _, num_bytes in found], minlength=4
    )
    one, two, three, four = (int(n) for n in sizes)
    return Requests(counts=(one, two, three, four), useful_bytes=useful)


def _instructions(
    walk: Walk, begin: Integers, item: Integers, edge: Integers, unit: int
) -> Integers:
    """Number the load instruction of a warp that reads each edge; any that differ."""
    if walk is Walk.LINES:
        lines: Integers = edge // unit
        return lines
    if walk is Walk.NAIVE:  # a warp's threads read as many lists, an id each
        rank: Integers = edge - begin[item]
        return item // WARP_LANES * (int(rank.max(initial=0)) + 1) + rank
    start = begin // unit * unit if walk is Walk.ALIGNED else begin
    step = (edge - start[item]) // WARP_LANES
    most = int(step.max()) + 1 if len(step) else 1
    instructions: Integers = item * most + step
    return instructions
