"""Each of our kernels alone: time, bytes, operations, and what the device can do."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from hector.arrays import GraphArrays
from hector.cost import CostModel, DeviceModel
from hector.emit.schedules import default_schedule
from hector.graph import HeteroGraph
from hector.ir.kernels import Fallback, Kernel, ParameterOp, Plan
from hector.ir.node import Node, Op
from hector.runtime import executables, graph_arrays
from hector.runtime.device import (
    DevicePlan,
    DeviceProgram,
    ValueTypes,
    dot_precision,
)
from recipes.bench.harness.timing import times_ms

NUM_TIMED = 10


def operands(
    kernel: Kernel, arrays: GraphArrays, types: ValueTypes
) -> dict[Node, torch.Tensor]:
    """Random values of moderate size; positive where something divides by them."""
    found = {}
    device = arrays.graph.device
    gen = torch.Generator(device=device).manual_seed(1)
    for n in kernel.operands:
        if n.op in (Op.GRAPH, Op.CONST):
            continue
        shape = (arrays.rows(n.domain), *n.shape)
        value = torch.randn(shape, generator=gen, device=device)
        if n.op is Op.AGG and n.type.width <= 16:
            value = value.abs() + 0.5
        found[n] = (value * 0.5).to(types.of(n))
    return found


def kernel_times(graph: HeteroGraph) -> dict[str, Any]:
    """Every kernel of the plans that were compiled last for `graph`."""
    exe = executables(graph)[-1]
    report = exe.report
    found: list[dict[str, Any]] = []
    for label, plan in (("forward", report.forward), ("backward", report.backward)):
        for kernel in plan.kernels if plan else ():
            if isinstance(kernel, ParameterOp | Fallback):
                continue
            text = str(kernel).split("\n")[0]
            values = _one(kernel, graph_arrays(graph), exe.feature)
            found.append({"plan": label, "kernel": text, **values})
    found.sort(key=lambda k: -k["us"])
    return {
        "status": "ok",
        "settings": str(report.optimizations),
        "generated_lines": report.generated_lines,
        "kernels": found,
    }


def _one(kernel: Kernel, arrays: GraphArrays, dtype: torch.dtype) -> dict[str, Any]:
    types = ValueTypes(dtype)
    model = CostModel(arrays, DeviceModel(), dtype.itemsize)
    work = model.work(kernel)
    plan = Plan(kernels=(kernel,), outputs=kernel.outputs)
    schedule = default_schedule(kernel, arrays, precision=dot_precision(dtype))
    ready = DevicePlan(DeviceProgram(plan, types, [schedule]), arrays)
    bound = operands(kernel, arrays, types)
    us = 1e6 * seconds_of(lambda: ready.run(bound), arrays.graph.device)
    moved = work.moved_bytes
    return {
        "us": us,
        "predicted_us": 1e6 * model.kernel_seconds(kernel),
        "bytes": moved,
        "cached_bytes": work.cached_bytes,
        "operations": work.operations,
        "gb_per_s": moved / us / 1e3,
        "tflop_per_s": work.operations / us / 1e6,
    }


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Median of NUM_TIMED runs."""
    run()
    return median(times_ms(run, device, NUM_TIMED)) / 1e3


def ceilings(device: torch.device) -> dict[str, float]:
    """What this device reaches: a copy of 1 GiB, and matrix products of 8192."""
    cuda = device.type == "cuda"
    a = torch.ones((1 << 28) if cuda else (1 << 20), device=device)
    b = torch.empty_like(a)
    copied = 2 * a.numel() * 4 / seconds_of(lambda: b.copy_(a), device)
    found = {"copy_gb_per_s": copied / 1e9}
    n = 8192 if cuda else 256
    x = torch.randn(n, n, device=device)
    before = torch.backends.cuda.matmul.allow_tf32
    for name, allowed in (("fp32", False), ("tf32", True)):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        rate = 2 * n**3 / seconds_of(lambda: x @ x, device)
        found[f"{name}_tflop_per_s"] = rate / 1e12
    torch.backends.cuda.matmul.allow_tf32 = before
    return found
