"""Schedules of a plan: the defaults, or the fastest candidates, kept on disk."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from hector.arrays import GraphArrays
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
from hector.private_files import (
    cache_directory,
    private_directory,
    read_private,
    write_private,
)
from hector.runtime.device import (
    DevicePlan,
    DeviceProgram,
    ValueTypes,
    dot_precision,
)
from hector.runtime.progress import listener

_log = logging.getLogger(__name__)
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
    precision = dot_precision(types.feature)
    if mapping is not None:
        return [default_schedule(k, arrays, mapping, precision) for k in plan.kernels]
    chosen: list[Schedule | None] = []
    for kernel in plan.kernels:
        first = default_schedule(kernel, arrays, precision=precision)
        if first is None:
            chosen.append(None)
            continue
        path = _path(kernel, arrays, types)
        known = read_schedule(path)
        if known is None and tune:
            known = _fastest(kernel, first, arrays, types)
            write_schedule(path, known)
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
    kind = (str(types.feature), dot_precision(types.feature).input_precision)
    text = repr((what, loop, sizes, kind, device, torch.__version__))
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    return cache_directory() / "schedules" / f"{digest}.json"


def read_schedule(path: Path) -> Schedule | None:
    """A kept schedule; None, and a warning, for a file that holds none."""
    text = read_private(path)
    if text is None:
        return None
    try:
        record = json.loads(text)
        fields = dict(record["fields"])
        if "mapping" in fields:
            fields["mapping"] = SegmentMapping(fields["mapping"])
        kind = _KINDS[record["kind"]]
        if any(not _sensible(k, v) for k, v in fields.items()):
            raise ValueError(f"expected sizes that a kernel can have, got {fields}")
        made: Schedule = kind(**fields)
    except (ValueError, KeyError, TypeError, RecursionError) as wrong:
        _log.warning("no schedule in %s, the default is used: %s", path, wrong)
        return None
    return made


def _sensible(name: str, value: object) -> bool:
    """A flag, a mapping, or a size that a kernel can be made for."""
    if name == "mapping" or isinstance(value, bool):
        return True
    if not isinstance(value, int) or not 1 <= value <= 1 << 20:
        return False
    tile = name.endswith("_warps") or "block" in name
    return not tile or value & (value - 1) == 0


def write_schedule(path: Path, schedule: Schedule) -> None:
    fields = asdict(schedule)
    if "mapping" in fields:
        fields["mapping"] = fields["mapping"].value
    private_directory(path.parent)
    record = {"kind": type(schedule).__name__, "fields": fields}
    write_private(path, json.dumps(record, indent=1) + "\n")


def _fastest(
    kernel: Kernel, first: Schedule, arrays: GraphArrays, types: ValueTypes
) -> Schedule:
    """The candidate with the least time on random operands."""
    if arrays.graph.device.type != "cuda":
        return first
    times: dict[Schedule, float] = {}
    listener()(f"timing schedules of a {type(kernel).__name__}, once for this graph")
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
        ready = DevicePlan(DeviceProgram(plan, types, [schedule]), arrays)
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
