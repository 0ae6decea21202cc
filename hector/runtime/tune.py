"""Schedules of a plan: the defaults, or the fastest candidates, kept on disk."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hector.arrays import GraphArrays
from hector.emit.module import cache_directory
from hector.emit.schedules import candidates, default_schedule
from hector.ir.kernels import (
    GemmSchedule,
    Kernel,
    OuterSchedule,
    Plan,
    Schedule,
    SegmentMapping,
    TraversalSchedule,
)
from hector.ir.node import Op
from hector.runtime.device import DevicePlan, ValueTypes

_KINDS = {c.__name__: c for c in (GemmSchedule, OuterSchedule, TraversalSchedule)}


def schedules_for(
    plan: Plan,
    arrays: GraphArrays,
    types: ValueTypes,
    tune: bool,
    mapping: SegmentMapping | None = None,
) -> list[Schedule | None]:
    """One schedule a kernel: tuned now or before, else the default; a `mapping` that
    was asked for stands and nothing is looked up."""
    if mapping is not None:
        return [default_schedule(k, arrays, mapping) for k in plan.kernels]
    chosen: list[Schedule | None] = []
    for kernel in plan.kernels:
        first = default_schedule(kernel, arrays)
        if first is None:
            chosen.append(None)
            continue
        path = _path(kernel, arrays, types)
        known = _read(path)
        if known is None and tune:
            known = _fastest(kernel, first, arrays, types)
            _write(path, known)
        chosen.append(known or first)
    return chosen


def _path(kernel: Kernel, arrays: GraphArrays, types: ValueTypes) -> Path:
    """A file a (kernel text, graph size, dtype, device)."""
    g = arrays.graph
    device = "cpu"
    if g.device.type == "cuda":
        device = torch.cuda.get_device_name(g.device)
    sizes = (g.num_nodes, g.num_edges, g.num_edge_types, g.num_node_types)
    shapes = [(n.op.value, n.domain.value, n.shape) for n in kernel.operands]
    what = (type(kernel).__name__, shapes, [str(o.type) for o in kernel.outputs])
    loop = str(getattr(kernel, "loop", ""))
    text = repr((what, loop, sizes, str(types.feature), device, torch.__version__))
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    return cache_directory() / "schedules" / f"{digest}.json"


def _read(path: Path) -> Schedule | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    fields = dict(record["fields"])
    if "mapping" in fields:
        fields["mapping"] = SegmentMapping(fields["mapping"])
    made: Schedule = _KINDS[record["kind"]](**fields)
    return made


def _write(path: Path, schedule: Schedule) -> None:
    fields = asdict(schedule)
    if "mapping" in fields:
        fields["mapping"] = fields["mapping"].value
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"kind": type(schedule).__name__, "fields": fields}
    path.write_text(json.dumps(record, indent=1) + "\n")


def _fastest(
    kernel: Kernel, first: Schedule, arrays: GraphArrays, types: ValueTypes
) -> Schedule:
    """The candidate with the least time on random operands."""
    if arrays.graph.device.type != "cuda":
        return first
    times: dict[Schedule, float] = {}
    for schedule in dict.fromkeys(candidates(kernel, first)):
        seconds = time_kernel(kernel, schedule, arrays, types)
        if seconds is not None:
            times[schedule] = seconds
    return min(times, key=lambda s: times[s]) if times else first


def time_kernel(
    kernel: Kernel, schedule: Schedule, arrays: GraphArrays, types: ValueTypes
) -> float | None:
    """Seconds of one launch; None if the device refuses the schedule (too much shared
    memory or too many registers)."""
    from triton.runtime.errors import OutOfResources

    plan = Plan(kernels=(kernel,), outputs=kernel.outputs)
    device = arrays.graph.device
    bindings = {
        n: torch.randn(arrays.rows(n.domain), *n.shape, device=device).to(types.of(n))
        for n in kernel.operands
        if n.op not in (Op.GRAPH, Op.CONST)
    }
    try:
        ready = DevicePlan(plan, arrays, types, [schedule])
        ready.run(bindings)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        best = float("inf")
        for _ in range(3):
            start.record()
            ready.run(bindings)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
    except OutOfResources:
        return None
    return best


def tuned(plan: Plan, chosen: Sequence[Schedule | None]) -> list[str]:
    """A line a kernel for reports."""
    return [
        f"{type(k).__name__}: {s}" for k, s in zip(plan.kernels, chosen, strict=True)
    ]
