"""Chooses {none, compact, reorder, both} for a graph and its shapes (Wu, 3.4.3).

Wu leaves this to future work and says what it is worth: 1.02 to 1.33 times over
the best fixed setting. A setting's cost is read off its lowered plans: the device's
time is the bytes that the kernels move and the products they take over its bandwidth
and rate, and the walk of the largest group, step after step; the host's a fixed time a
step, a launch, and an operation on parameters that is left to PyTorch. The two run side
by side, so the larger one counts, the host on small graphs, the device on large ones,
and a tenth of the other. What depends on the graph alone is made once, and not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hector.emit.schedules import Sizes, default_schedule, programs, walk_steps
from hector.ir.kernels import (
    Fallback,
    Gemm,
    Kernel,
    Outer,
    ParameterOp,
    Parameters,
    Plan,
    Schedule,
    SegmentMapping,
    Traversal,
    TraversalSchedule,
)
from hector.ir.node import Node, Op, stored
from hector.ir.types import (
    COMPOSE,
    NARROW,
    ROW_DOMAINS,
    TARGET,
    TYPE_DOMAINS,
    Domain,
    Index,
)
from hector.passes.lifetimes import constants

INDEX_BYTES = 4
EXPOSED = 0.1
"""Share of the smaller of host's and device's time that is not hidden after the other:
of two settings with as many launches, the one with less work wins."""


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """What a device does in a second; the defaults are an H200's, fitted to measured
    steps (`recipes/bench/rgnn/layers.py`): what irregular kernels reach. Host times
    are counted launch by launch."""

    bytes_per_second: float = 3.35e12
    gather_bytes_per_second: float = 2.2e12
    cache_bytes: float = 4e7
    """A gathered value of at most this size stays in the L2 cache."""
    cached_bytes_per_second: float = 3e12
    run_bytes_per_second: float = 6e12
    """Rows gathered along runs of edges of one type and destination, whose sources
    ascend: much of it is in the cache, whatever the size of the value."""
    operations_per_second: float = 6e13
    outer_factor: float = 2.0
    """Weight gradients over their bytes and operations: a program adds one block of
    rows after the other."""
    launch_seconds: float = 8e-6
    """Host time of a generated kernel: memory, arguments, launch."""
    parameter_launch_seconds: float = 2.5e-5
    """Host time of an operation on parameters that PyTorch runs."""
    product_seconds: float = 9e-5
    """The same of a matrix product, and what views and transposes its operands: 80
    microseconds in the product alone."""
    inference_seconds: float = 4.5e-5
    """Host time of a step next to its launches."""
    training_seconds: float = 4.5e-4
    """The same with autograd, the parameters' gradients and a loss."""
    kernel_seconds: float = 4e-6
    """Device time of a kernel that has nothing to do."""
    walk_step_seconds: float = 4e-7
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
    run_bytes: float = 0.0
    """The same, along runs of edges in the order in which they are stored."""
    operations: float = 0.0
    """Floating-point operations of matrix products."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            streamed_bytes=self.streamed_bytes + other.streamed_bytes,
            gathered_bytes=self.gathered_bytes + other.gathered_bytes,
            cached_bytes=self.cached_bytes + other.cached_bytes,
            run_bytes=self.run_bytes + other.run_bytes,
            operations=self.operations + other.operations,
        )

    @property
    def moved_bytes(self) -> float:
        """Bytes read and written, however they are found."""
        found = self.streamed_bytes + self.gathered_bytes
        return found + self.cached_bytes + self.run_bytes

    def seconds(self, device: DeviceModel) -> float:
        return (
            self.streamed_bytes / device.bytes_per_second
            + self.gathered_bytes / device.gather_bytes_per_second
            + self.cached_bytes / device.cached_bytes_per_second
            + self.run_bytes / device.run_bytes_per_second
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
        self._schedules: dict[int, tuple[Traversal, Schedule | None]] = {}

    def step_seconds(self, plans: Sequence[Plan]) -> float:
        """Predicted time of one step: inference is one plan, training two."""
        d = self.device
        host = d.inference_seconds if len(plans) == 1 else d.training_seconds
        kernels = [k for p in plans for k in _each_time(p)]
        host += sum(self.host_seconds(k) for k in kernels)
        device = sum(self.kernel_seconds(k) for k in kernels)
        return max(host, device) + EXPOSED * min(host, device)

    def host_seconds(self, k: Kernel) -> float:
        """Time that the host takes to start a kernel."""
        if isinstance(k, ParameterOp | Fallback):
            if k.out.op is Op.RESHAPE:
                return 0.0
            product = k.out.op is Op.EINSUM
            d = self.device
            return d.product_seconds if product else d.parameter_launch_seconds
        return self.device.launch_seconds * self._num_launches(k)

    def _num_launches(self, k: Kernel) -> int:
        """A weight gradient is two launches: partial sums, and their sum; a walk with
        programs of their own for large groups, too."""
        if not isinstance(k, Traversal) or k.loop.group is None:
            return 2 if isinstance(k, Outer) else 1
        chosen = self._schedule(k)
        if not isinstance(chosen, TraversalSchedule):
            return 1
        if not chosen.mapping.is_split:
            return 1
        longest = self.arrays.longest(k.loop.domain, k.loop.group)
        return 2 if longest > chosen.heavy_rows else 1

    def _schedule(self, k: Traversal) -> Schedule | None:
        """The default, found once: with the kernel, so that no other has its id."""
        if id(k) not in self._schedules:
            made = default_schedule(k, self.arrays, self.mapping)
            self._schedules[id(k)] = (k, made)
        return self._schedules[id(k)][1]

    def kernel_seconds(self, k: Kernel) -> float:
        """Time that the device takes for a kernel."""
        if isinstance(k, ParameterOp | Fallback) and k.out.op is Op.RESHAPE:
            return 0.0
        busy = self.work(k).seconds(self.device)
        if isinstance(k, Outer):
            busy *= self.device.outer_factor
        if isinstance(k, Traversal):
            chosen = self._schedule(k)
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
        if isinstance(k, Parameters):
            found = (self._touch(n, self.arrays.rows(n.domain)) for n in _touched(k))
            return sum(found, Work())
        if isinstance(k, Traversal):
            return self._traversal(k)
        domain = k.out.domain if isinstance(k, Gemm) else k.domain
        # Nodes of pairs ascend: gathering them is reading them in order.
        way = _Way.RUNS if domain is Domain.EDGE else _Way.ORDER
        total = Work()
        for node in k.outputs:
            total += self._touch(node, self.arrays.rows(node.domain))
        rows = self.arrays.rows(domain)
        for operand in (k.rows,) if isinstance(k, Gemm) else (k.left, k.right):
            gathers = operand.gather is not None
            total += self._touch(operand.value, rows, way if gathers else _Way.ORDER)
        h, inner, cols = k.weight.shape if isinstance(k, Gemm) else k.out.shape
        return total + Work(operations=2.0 * rows * h * inner * max(cols, 16))

    def _traversal(self, k: Traversal) -> Work:
        """A value of the groups is read or written once a group; all others are once
        an item of the loop, in the way in which the groups list their items."""
        items = self.arrays.rows(k.loop.domain)
        way = _way_of(k)
        total = Work()
        found = _found_by(k)
        for node in (*k.loads, *k.stores):
            if node.domain is k.loop.domain:
                # Where items lie in order, so do their own values.
                own = way if way is _Way.LIST else _Way.ORDER
                total += self._touch(node, items, own)
            elif node not in found:
                total += self._touch(node, self.arrays.rows(node.domain))
        for node, indices in found.items():
            # A node's edges are sorted by type: those of one pair are neighbours.
            runs = any((k.loop.group, i) in _RUNS_OF_PAIRS for i in indices)
            rows = self.arrays.rows(node.domain) if runs else items
            total += self._touch(node, rows, way)
        for _ in {index for indices in found.values() for index in indices}:
            total += self._index(items, way)
        if k.loop.group is not None:
            total += Work(streamed_bytes=2.0 * items * INDEX_BYTES)
        return total

    def _index(self, items: int, way: "_Way") -> Work:
        """Where the rows of another domain are: a number an item."""
        if way is not _Way.LIST:
            return Work(streamed_bytes=float(items * INDEX_BYTES))
        moved = float(items * self.device.sector_bytes)
        if items * INDEX_BYTES <= self.device.cache_bytes:
            return Work(cached_bytes=moved)
        return Work(gathered_bytes=moved)

    def _touch(self, node: Node, rows: int, way: "_Way | None" = None) -> Work:
        wide = node.domain in ROW_DOMAINS and node.type.width > NARROW
        size = node.type.width * (self.value_bytes if wide else 4)
        if way in (None, _Way.ORDER):
            return Work(streamed_bytes=float(rows * size))
        if way is _Way.RUNS:
            return Work(run_bytes=float(rows * max(size, self.device.sector_bytes)))
        moved = float(rows * max(size, self.device.sector_bytes))
        if self.arrays.rows(node.domain) * size <= self.device.cache_bytes:
            return Work(cached_bytes=moved)
        return Work(gathered_bytes=moved)


def _each_time(plan: Plan) -> list[Kernel]:
    """The kernels of every call but the first."""
    once = constants(plan)
    return [k for k in plan.kernels if not once.issuperset(k.outputs)]


def _touched(k: Parameters) -> tuple[Node, ...]:
    return (*k.loads, *k.stores)


_RUNS_OF_PAIRS = ((Index.SRC, Index.SRC_PAIR), (Index.DST, Index.DST_PAIR))


class _Way(Enum):
    """How the rows of an operand follow one another."""

    ORDER = "order"
    """As they are stored."""
    RUNS = "runs"
    """Along edges as they are stored, by type and destination: sources ascend."""
    LIST = "list"
    """By a list of each group's items, which lie anywhere."""


def _way_of(k: Traversal) -> _Way:
    group = k.loop.group
    if group is None or TARGET[k.loop.domain, group] in TYPE_DOMAINS:
        return _Way.RUNS
    in_order = (k.loop.domain, group) == (Domain.EDGE, Index.DST_PAIR)
    return _Way.RUNS if in_order else _Way.LIST


def _found_by(k: Traversal) -> dict[Node, set[Index]]:
    """{value in memory: index arrays by which each item of the loop finds its row};
    what an item has from its group is not among them."""
    group = k.loop.group
    known = {group, Index.ALL}
    if group is not None:
        onward = (COMPOSE.get((k.loop.domain, group, i)) for i in Index)
        known |= {i for i in onward if i is not None}
    found: dict[Node, set[Index]] = {}
    stack: list[tuple[Node, Index | None]] = []
    stack += [(i, None) for m in k.members for i in m.inputs]
    seen = set(stack)
    while stack:
        node, via = stack.pop()
        value = stored(node)
        if value in k.loads:
            if via is not None:
                found.setdefault(value, set()).add(via)
            continue
        if node.op is Op.READ and node.domain is k.loop.domain:
            via = None if node.index in known else node.index
        below = [(i, via) for i in node.inputs]
        stack += [b for b in below if b not in seen]
        seen.update(below)
    return found
