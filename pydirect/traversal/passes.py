"""Passes over frontiers: prepare the lines, visit, and note what was read."""

import time
from collections.abc import Iterable
from typing import Any

import torch

from pydirect.sampling import Graph
from pydirect.traversal.compressed import CompressedGraph
from pydirect.traversal.on_cpu import CpuVisitor
from pydirect.traversal.on_gpu import visitor_on
from pydirect.traversal.placed import Frontier, PlacedGraph, place
from pydirect.traversal.visits import Mark, Operation, Visitor, reads_weights
from pydirect.traversal.walk import Step, Trace


class Passes:
    """Runs the passes of one traversal and records them in its trace."""

    def __init__(
        self,
        graph: Graph | CompressedGraph | PlacedGraph,
        trace: Trace | None,
        visitor: Visitor | None = None,
    ) -> None:
        """``visitor``: None takes the kernels on a GPU and CPU code elsewhere."""
        self.placed = graph if isinstance(graph, PlacedGraph) else place(graph)
        self._trace = trace
        self._visitor = visitor or visitor_of(self.placed.device)

    def visit(
        self,
        operation: Operation,
        frontier: Frontier,
        *,
        begun: float,
        over: PlacedGraph | None = None,
    ) -> None:
        """Apply ``operation`` to every edge of the frontier.

        Args:
            operation: what to do at an edge.
            frontier: the nodes and lines.
            over: whose lists; None: the traversed graph's.
            begun: `Passes.clock` when the frontier was asked for, for the trace.
        """
        start = self.clock()
        placed = over or self.placed
        self._visitor.visit(placed, frontier, operation)
        end = self.clock()
        if self._trace is None:
            return
        weighted = reads_weights(operation)
        num_bytes = placed.union_bytes(frontier, weighted=weighted)
        name = type(operation).__name__.lower()
        self._note(name, frontier, num_bytes, (begun, start, end))

    def search(
        self, mark: Mark, frontier: Frontier, *, begun: float, over: PlacedGraph
    ) -> None:
        """Backward breadth-first step over lists of sources; see `Visitor.search`."""
        start = self.clock()
        num_bytes = self._visitor.search(over, frontier, mark)
        end = self.clock()
        self._note("search", frontier, num_bytes, (begun, start, end))

    def clock(self) -> float:
        """Seconds; after the device's work where the trace is timed."""
        if self._trace is None or not self._trace.timed:
            return 0.0
        if self.placed.device.type == "cuda":
            torch.cuda.synchronize(self.placed.device)
        return time.perf_counter()

    def _note(
        self,
        name: str,
        frontier: Frontier,
        num_bytes: int,
        clock: tuple[float, float, float],
    ) -> None:
        if self._trace is None:
            return
        begun, start, end = clock
        self._trace.add(
            Step(
                operation=name,
                num_nodes=frontier.num_nodes,
                num_edges=frontier.num_edges,
                bytes_read=num_bytes,
                seconds=end - start,
                walked_seconds=end - begun,
            )
        )


def visitor_of(device: torch.device) -> Visitor:
    """Kernels on a GPU, whole-tensor operations elsewhere."""
    return visitor_on(device) if device.type == "cuda" else CpuVisitor()


def sources_of(source: int | Iterable[int], num_nodes: int) -> list[int]:
    """Return one or several sources as a list.

    Raises:
        ValueError: none, or one that is no node.
    """
    given: Any = source.tolist() if hasattr(source, "tolist") else source
    found = list(given) if isinstance(given, Iterable) else [given]
    if not found:
        raise ValueError("source: expects a node or several, got none")
    for node in found:
        if isinstance(node, bool) or not hasattr(node, "__index__"):
            raise ValueError(f"source: expects an integer, got {node!r}")
        if not 0 <= node < num_nodes:
            nodes = f"a node, 0 to {num_nodes - 1}"
            nodes = nodes if num_nodes else "a graph with nodes"
            raise ValueError(f"source: expects {nodes}, got {node}")
    return [int(node) for node in found]
