"""Chooses {none, compact, reorder, both} for a graph and its shapes (Wu, 3.4.3).

Wu leaves this to future work and says what it is worth: 1.02 to 1.33 times over
the best fixed setting. A setting's cost is read off its lowered plans: the device's
time is the bytes that the kernels move and the products they take over its bandwidth
and rate, and the walk of the largest group, step after step; the host's a fixed time a
step and a launch. The two run side by side, so the larger one counts, the host on small
graphs, the device on large ones, and a tenth of the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hector.emit.schedules import Sizes, default_schedule, programs, walk_steps
from hector.ir.kernels import (
    Fallback,
    Gemm,
    Kernel,
    Outer,
    ParameterOp,
    Plan,
    SegmentMapping,
    Traversal,
    TraversalSchedule,
)
from hector.ir.node import Node, Op
from hector.ir.types import NARROW, ROW_DOMAINS, TYPE_DOMAINS

INDEX_BYTES = 4
EXPOSED = 0.1
"""Share of the smaller of host's and device's time that is not hidden behind the other:
of two settings with as many launches, the one with less work wins."""


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """What a device does in a second; the defaults are an H200's, fitted to measured
    steps by `recipes/bench/rgnn_fit.py`: what irregular kernels reach."""

    bytes_per_second: float = 3.35e12
    gather_bytes_per_second: float = 1.94e12
    cache_bytes: float = 4e7
    """A gathered value of at most this size stays in the L2 cache."""
    cached_bytes_per_second: float = 3.2e12
    operations_per_second: float = 6e13
    launch_seconds: float = 2e-5
    """Host time of a generated kernel: memory, arguments, launch."""
    parameter_launch_seconds: float = 9e-5
    """Host time of an operation on parameters that PyTorch runs."""
    inference_seconds: float = 2.8e-5
    """Host time of a step beside its launches."""
    training_seconds: float = 6.9e-4
    """The same with autograd, the parameters' gradients and a loss."""
    kernel_seconds: float = 4e-6
    """Device time of a kernel that has nothing to do."""
    walk_step_seconds: float = 4.9e-7
    """Between two steps of a program along its group: loads that wait for one another.
    The last of a skewed graph's groups has most of the device to itself."""
    program_seconds: float = 6e-10
    """Time between the starts of two programs: what bounds millions of small ones. Not
    fitted but read off: 1.14 ms for 1.89 million, 1.96 ms for 3.23 million."""
    sector_bytes: int = 32
    """The least that a gathered row costs."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one run of a kernel does."""

    streamed_bytes: float = 0.0
    """Rows read or written once, in order."""
    gathered_bytes: float = 0.0
    """Rows read through an index, counted as often as they are read."""
    cached_bytes: float = 0.0
    """The same, of values that the cache holds."""
    operations: float = 0.0
    """Floating-point operations of matrix products."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            streamed_bytes=self.streamed_bytes + other.streamed_bytes,
            gathered_bytes=self.gathered_bytes + other.gathered_bytes,
            cached_bytes=self.cached_bytes + other.cached_bytes,
            operations=self.operations + other.operations,
        )

    def seconds(self, device: DeviceModel) -> float:
        return (
            self.streamed_bytes / device.bytes_per_second
            + self.gathered_bytes / device.gather_bytes_per_second
            + self.cached_bytes / device.cached_bytes_per_second
            + self.operations / device.operations_per_second
        )


class CostModel:
    """Work and time of kernels on one graph, features of `value_bytes` bytes."""

    def __init__(
        self,
        arrays: Sizes,
        device: DeviceModel,
        value_bytes: int = 4,
        mapping: SegmentMapping | None = None,
    ) -> None:
        self.arrays, self.device, self.value_bytes = arrays, device, value_bytes
        self.mapping = mapping

    def step_seconds(self, plans: Sequence[Plan]) -> float:
        """Predicted time of one step: inference is one plan, training two."""
        d = self.device
        host = d.inference_seconds if len(plans) == 1 else d.training_seconds
        host += sum(self.host_seconds(k) for p in plans for k in p.kernels)
        device = sum(self.kernel_seconds(k) for p in plans for k in p.kernels)
        return max(host, device) + EXPOSED * min(host, device)

    def host_seconds(self, k: Kernel) -> float:
        """Time that the host takes to start a kernel."""
        if isinstance(k, ParameterOp | Fallback):
            view = k.out.op is Op.RESHAPE
            return 0.0 if view else self.device.parameter_launch_seconds
        # A weight gradient is two launches: partial sums, and their sum.
        return self.device.launch_seconds * (2 if isinstance(k, Outer) else 1)

    def kernel_seconds(self, k: Kernel) -> float:
        """Time that the device takes for a kernel."""
        if isinstance(k, ParameterOp | Fallback) and k.out.op is Op.RESHAPE:
            return 0.0
        busy = self.work(k).seconds(self.device)
        if isinstance(k, Traversal):
            chosen = default_schedule(k, self.arrays, self.mapping)
            if isinstance(chosen, TraversalSchedule):
                count = programs(k, chosen, self.arrays)
                busy = max(busy, count * self.device.program_seconds)
                steps = walk_steps(k, chosen, self.arrays)
                busy += steps * self.device.walk_step_seconds
        return self.device.kernel_seconds + busy

    def work(self, k: Kernel) -> Work:
        """Bytes and operations of one launch; nothing for what PyTorch runs."""
        if isinstance(k, ParameterOp | Fallback):
            return Work()
        total = Work()
        for node in k.outputs:
            total += self._touch(node, self.arrays.rows(node.domain))
        if isinstance(k, Traversal):
            return total + self._traversal(k)
        rows = self.arrays.rows(k.out.domain if isinstance(k, Gemm) else k.domain)
        for operand in (k.rows,) if isinstance(k, Gemm) else (k.left, k.right):
            total += self._touch(operand.value, rows, operand.gather is not None)
        h, inner, cols = k.weight.shape if isinstance(k, Gemm) else k.out.shape
        return total + Work(operations=2.0 * rows * h * inner * max(cols, 16))

    def _traversal(self, k: Traversal) -> Work:
        """Each value is read once an item of the loop if it is gathered, else once."""
        items = self.arrays.rows(k.loop.domain)
        total = Work()
        for node in k.loads:
            if node.domain in TYPE_DOMAINS:
                continue
            rows = self.arrays.rows(node.domain)
            hoisted = rows <= items and node.domain is not k.loop.domain
            gathered = hoisted and not _is_group(k, node)
            total += self._touch(node, items if gathered else rows, gathered)
        if k.loop.group is not None:
            total += Work(streamed_bytes=2.0 * items * INDEX_BYTES)
        return total

    def _touch(self, node: Node, rows: int, gathered: bool = False) -> Work:
        wide = node.domain in ROW_DOMAINS and node.type.width > NARROW
        size = node.type.width * (self.value_bytes if wide else 4)
        if not gathered:
            return Work(streamed_bytes=float(rows * size))
        moved = float(rows * max(size, self.device.sector_bytes))
        if self.arrays.rows(node.domain) * size <= self.device.cache_bytes:
            return Work(cached_bytes=moved)
        return Work(gathered_bytes=moved)


def _is_group(k: Traversal, node: Node) -> bool:
    return any(
        out.domain is node.domain and out.op is Op.AGG and out.index is k.loop.group
        for out in k.members
    )
