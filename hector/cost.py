"""Chooses {none, compact, reorder, both} for a graph and its shapes (seed, 3.4.3).

The seed leaves this to future work and says what it is worth: 1.02 to 1.33 times over
the best fixed setting. A setting's cost is read off its lowered plans: bytes that the
kernels move and products they take, over the device's bandwidth and rate, plus a fixed
time a launch, which decides on small graphs.
"""

from dataclasses import dataclass

from hector.arrays import GraphArrays
from hector.ir.kernels import (
    Fallback,
    Gemm,
    Kernel,
    ParameterOp,
    Plan,
    Traversal,
)
from hector.ir.node import Node, Op
from hector.ir.types import TYPE_DOMAINS


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """What a device does in a second; the defaults are an H200's, derated to what
    irregular kernels reach."""

    bytes_per_second: float = 2.5e12
    gather_bytes_per_second: float = 1.8e12
    products_per_second: float = 3e13
    launch_seconds: float = 8e-6
    parameter_launch_seconds: float = 1.5e-5
    value_bytes: int = 4
    sector_bytes: int = 32
    """The least that a gathered row costs."""


def plan_seconds(plan: Plan, arrays: GraphArrays, device: DeviceModel) -> float:
    """Predicted time of one run of a plan."""
    return sum(_kernel_seconds(k, arrays, device) for k in plan.kernels)


def _kernel_seconds(k: Kernel, arrays: GraphArrays, device: DeviceModel) -> float:
    if isinstance(k, ParameterOp | Fallback):
        view = k.out.op is Op.RESHAPE
        return 0.0 if view else device.parameter_launch_seconds
    seconds = device.launch_seconds
    for node in k.outputs:
        seconds += _stream(node, arrays, device)
    if isinstance(k, Traversal):
        return seconds + _traversal_seconds(k, arrays, device)
    domain = k.out.domain if isinstance(k, Gemm) else k.domain
    rows = arrays.rows(domain)
    for operand in (k.rows,) if isinstance(k, Gemm) else (k.left, k.right):
        seconds += _touch(operand.value, rows, operand.gather is not None, device)
    h, inner, cols = k.weight.shape if isinstance(k, Gemm) else k.out.shape
    cols = max(cols, 16)
    return seconds + 2.0 * rows * h * inner * cols / device.products_per_second


def _traversal_seconds(k: Traversal, arrays: GraphArrays, device: DeviceModel) -> float:
    """Each value is read once an item of the loop if it is gathered, else once."""
    items = arrays.rows(k.loop.domain)
    seconds = 0.0
    for node in k.loads:
        if node.domain in TYPE_DOMAINS:
            continue
        rows = arrays.rows(node.domain)
        hoisted = rows <= items and node.domain is not k.loop.domain
        gathered = hoisted and not _is_group(k, node, arrays)
        count = items if gathered else rows
        seconds += _touch(node, count, gathered, device)
    if k.loop.group is not None:
        seconds += 2 * items * device.value_bytes / device.bytes_per_second
    return seconds


def _is_group(k: Traversal, node: Node, arrays: GraphArrays) -> bool:
    return any(
        out.domain is node.domain and out.op is Op.AGG and out.index is k.loop.group
        for out in k.members
    )


def _touch(node: Node, rows: int, gathered: bool, device: DeviceModel) -> float:
    size = node.type.width * device.value_bytes
    if not gathered:
        return rows * size / device.bytes_per_second
    return rows * max(size, device.sector_bytes) / device.gather_bytes_per_second


def _stream(node: Node, arrays: GraphArrays, device: DeviceModel) -> float:
    size = arrays.rows(node.domain) * node.type.width * device.value_bytes
    return size / device.bytes_per_second
