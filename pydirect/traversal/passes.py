"""Passes over frontiers: prepare the lines, visit, and note what was read."""

import time

import torch

from pydirect.sampling import Graph
from pydirect.traversal.on_cpu import CpuVisitor
from pydirect.traversal.on_gpu import visitor_on
from pydirect.traversal.place import Frontier, PlacedGraph, place
from pydirect.traversal.visits import Mark, Operation, Relax, Visitor
from pydirect.traversal.walk import Step, Trace


class Passes:
    """Runs the passes of one traversal and records them in its trace."""

    def __init__(
        self,
        graph: Graph | PlacedGraph,
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
        begun: float | None = None,
    ) -> None:
        """Apply ``operation`` to every edge of the frontier.

        Args:
            operation: what to do at an edge.
            frontier: the nodes and lines.
            begun: `Passes.clock` when the frontier was asked for, for the trace.
        """
        start = self.clock()
        self._visitor.visit(self.placed, frontier, operation)
        self._note(
            operation,
            frontier,
            frontier.num_units,
            start,
            start if begun is None else begun,
        )

    def search(self, mark: Mark, frontier: Frontier, *, begun: float) -> None:
        """Backward breadth-first step; see `Visitor.search`."""
        start = self.clock()
        units = self._visitor.search(self.placed, frontier, mark)
        self._note(mark, frontier, units, start, begun, name="search")

    def clock(self) -> float:
        """Seconds; after the device's work where the trace is timed."""
        if self._trace is None or not self._trace.timed:
            return 0.0
        if self.placed.device.type == "cuda":
            torch.cuda.synchronize(self.placed.device)
        return time.perf_counter()

    def _note(
        self,
        operation: Operation,
        frontier: Frontier,
        num_units: int,
        start: float,
        begun: float,
        name: str | None = None,
    ) -> None:
        if self._trace is None:
            return
        weighted = isinstance(operation, Relax)
        end = self.clock()
        self._trace.steps.append(
            Step(
                operation=name or type(operation).__name__.lower(),
                num_nodes=frontier.num_nodes,
                num_edges=frontier.num_edges,
                num_units=num_units,
                bytes_read=num_units * self.placed.unit_bytes(weighted=weighted),
                seconds=end - start,
                walked_seconds=end - begun,
            )
        )


def visitor_of(device: torch.device) -> Visitor:
    """Kernels on a GPU, whole-tensor operations elsewhere."""
    return visitor_on(device) if device.type == "cuda" else CpuVisitor()


def check_source(source: int, num_nodes: int) -> None:
    """
    Raises:
        ValueError: ``source`` is no node.
    """
    if not 0 <= source < num_nodes:
        nodes = f"a node, 0 to {num_nodes - 1}" if num_nodes else "a graph with nodes"
        raise ValueError(f"source: expects {nodes}, got {source}")
