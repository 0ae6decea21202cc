"""Launch the kernels of visit.cu."""

import ctypes
import functools
from pathlib import Path

import torch

from pydirect.coalesce import SECTOR_BYTES
from pydirect.kernels.launch import KernelModule, members
from pydirect.kernels.nvrtc import load_cubin
from pydirect.traversal.placed import Frontier, PlacedGraph
from pydirect.traversal.visits import (
    Link,
    Mark,
    Operation,
    Pull,
    Push,
    Relax,
    Tree,
    reads_weights,
)

_LETTERS = {
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float32: "f32",
    torch.float64: "f64",
}
# 0: without weights. See weight_at in visit.cu.
_WEIGHT_TYPES = {dtype: 1 + i for i, dtype in enumerate(_LETTERS)}


class VisitArgs(ctypes.Structure):
    """Mirrors the struct of the same name in visit.cu."""

    _fields_ = (
        *members(
            ctypes.c_void_p,
            "edges weights hot_edges hot_weights slots offsets frontier sums value "
            "source marks seen counter first_blocks positions",
        ),
        *members(ctypes.c_int64, "num_entries num_units limit shift now"),
        *members(ctypes.c_int, "unit_shift block_shift contiguous weight_type"),
    )


class GpuVisitor:
    """Visits edges with kernels that read host memory in place."""

    def __init__(
        self,
        module: KernelModule,
        *,
        num_blocks: int,
        threads: int = 1024,
        contiguous: bool = True,
    ) -> None:
        """
        Args:
            module: visit.cu, compiled.
            num_blocks: thread blocks of a launch.
            threads: of a block; a multiple of 32, at most 1024.
            contiguous: every block walks its own part of the lines. Each block then
                translates addresses of its own pages alone; on an H100 this streams
                0.91 to 0.96 of the copy engine's peak, and taking turns 0.77 to 0.91.
        """
        self._module = module
        self._num_blocks = num_blocks
        self._threads = threads
        self._contiguous = contiguous

    def reshaped(self, *, num_blocks: int, contiguous: bool) -> "GpuVisitor":
        """The same kernels, laid over the GPU in another way."""
        return GpuVisitor(
            self._module,
            num_blocks=num_blocks,
            threads=self._threads,
            contiguous=contiguous,
        )

    def visit(
        self, placed: PlacedGraph, frontier: Frontier, operation: Operation
    ) -> None:
        """See `Visitor.visit`."""
        if frontier.num_edges == 0:
            return
        name = type(operation).__name__.lower()
        weighted = reads_weights(operation)
        if weighted and placed.weights is None:
            raise ValueError("weights: expects a graph that has them, got one without")
        arguments = self._arguments(placed, frontier, weighted=weighted)
        if isinstance(operation, Mark):
            arguments.value = operation.level.data_ptr()
            arguments.seen = operation.seen.data_ptr()
            arguments.now = operation.now
        elif isinstance(operation, Relax):
            if placed.weights is not None:
                name += "_" + _LETTERS[placed.weights.dtype]
            arguments.value = operation.distance.data_ptr()
            arguments.marks = operation.marks.data_ptr()
        elif isinstance(operation, Link):
            arguments.value = operation.parent.data_ptr()
        elif isinstance(operation, Push | Pull):
            arguments.value = operation.sums.data_ptr()
            arguments.source = operation.shares.data_ptr()
        elif isinstance(operation, Tree):
            arguments.value = operation.predecessor.data_ptr()
            arguments.source = operation.distance.data_ptr()
            arguments.marks = operation.wanted.data_ptr()
            arguments.now = int(operation.level)
        self._launch(_kernel(placed, name), arguments, placed.device)

    def search(self, placed: PlacedGraph, frontier: Frontier, mark: Mark) -> int:
        """See `Visitor.search`."""
        if frontier.num_edges == 0:
            return 0
        arguments = self._arguments(placed, frontier, weighted=False)
        counter = torch.zeros(1, dtype=torch.int64, device=placed.device)
        arguments.value = mark.level.data_ptr()
        arguments.now = mark.now
        arguments.counter = counter.data_ptr()
        self._launch(_kernel(placed, "search"), arguments, placed.device)
        return int(counter) * SECTOR_BYTES

    def _arguments(
        self, placed: PlacedGraph, frontier: Frontier, *, weighted: bool
    ) -> VisitArgs:
        hot, nodes = placed.hot, frontier.nodes
        arguments = VisitArgs(
            edges=placed.edges.data_ptr(),
            offsets=placed.offsets.data_ptr(),
            frontier=None if nodes is None else nodes.data_ptr(),
            sums=frontier.sums.data_ptr(),
            num_entries=frontier.num_nodes,
            num_units=frontier.num_units,
            limit=frontier.limit,
            shift=placed.shift,
            unit_shift=placed.unit_shift(weighted=weighted),
            contiguous=self._contiguous,
        )
        if placed.weights is not None:
            arguments.weights = placed.weights.data_ptr()
            arguments.weight_type = weighted and _WEIGHT_TYPES[placed.weights.dtype]
        if placed.blocks is not None:
            arguments.first_blocks = placed.blocks.first.data_ptr()
            arguments.positions = placed.blocks.positions.data_ptr()
        if hot is not None:
            arguments.hot_edges = hot.edges.data_ptr()
            arguments.slots = hot.slots.data_ptr()
            arguments.block_shift = hot.block_shift
            if hot.weights is not None:
                arguments.hot_weights = hot.weights.data_ptr()
        return arguments

    def _launch(self, name: str, arguments: VisitArgs, device: torch.device) -> None:
        kernel = self._module.kernel(name)
        if device.type != "cuda":  # visit.cu built for the host, in tests
            kernel.launch(
                grid=self._num_blocks,
                block=self._threads,
                arguments=arguments,
                stream=0,
            )
            return
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            kernel.launch(
                grid=self._num_blocks,
                block=self._threads,
                arguments=arguments,
                stream=stream,
            )


def _kernel(placed: PlacedGraph, name: str) -> str:
    """The name in visit.cu of an operation, or of "search"."""
    if placed.blocks is not None:
        return f"blocks_{name}"
    ids = _LETTERS[placed.edges.dtype]
    way = "" if name == "search" else f"{placed.walk.value}_"
    return f"{way}{name}_{ids}"


@functools.cache
def visitor_on(device: torch.device) -> GpuVisitor:
    """The visitor of a GPU, with kernels compiled for it."""
    module = load_cubin(Path(__file__).with_name("visit.cu"), device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return GpuVisitor(module, num_blocks=2 * sms)
