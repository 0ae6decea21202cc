"""Predicted against measured steps, beside kernels alone and a constant.

    python -m recipes.bench foresight.evaluate --device h100 --kind test RESULT.json

Every step is captured on the meta device here and priced by the shipped device; nothing
of the measured step goes in; a recorded file of such steps is priced again by the
present code. `kernels` adds up the same kernel times and knows no host,
clock or gaps; `constant` takes one rate of FLOPs, the best for these very steps.
Where calibration's programs ran before each step, `beside` has the host as fast as it
was then, and `beside_phases` its forward, backward and update each by their own: what
is off without these, and not with them, is a host whose speed drifts.
"""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipes.bench.foresight import subjects
from recipes.bench.foresight.errors import PREDICTIONS, errors, errors_by_model
from recipes.bench.harness import records
from ssdtrain.tools.foresight.calibrate import program_graphs, scale_of
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.device import Device, load_device, shipped
from ssdtrain.tools.foresight.graph import Graph
from ssdtrain.tools.foresight.memory import estimate_peak
from ssdtrain.tools.foresight.overheads import Phase
from ssdtrain.tools.foresight.price import NO_WIRES, estimate_step, price, steady
from ssdtrain.tools.foresight.wires import Wires


def graph_of(cell: dict[str, Any]) -> Graph:
    """The step's execution graph."""
    with torch.device("meta"):
        maker = subjects.MAKERS[cell["model"]]
        subject = maker(cell["batch"], **cell["shape"])
        return capture(subject.model, subject.forward, optimizer=subject.optimizer)


def cells_of(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Measured steps of a kind, as `collect` gives them or as they were recorded."""
    rows = list(result["cells"].values())
    if not any("measured_us" in row for row in rows):
        return [row for row in rows if row.get("kind") == kind and "step_us" in row]
    kept = ("model", "batch", "peak_bytes")
    return [
        {
            **{key: row[key] for key in kept if key in row},
            "shape": subjects.SHAPES[kind][row["model"]][0],
            "step_us": row["measured_us"],
            "clock": row["measured_clock"],
        }
        for row in rows
    ]


class Host(NamedTuple):
    """What a device file says of calibration's programs."""

    steps_us: list[float]
    phases_us: list[dict[str, float]]

    @classmethod
    def of(cls, device: Device) -> "Host":
        """Price the programs."""
        graphs = program_graphs(device.spec.kind)
        return cls(
            [estimate_step(graph, device).step_us for graph in graphs],
            [phases_us(graph, device) for graph in graphs],
        )


def predicted(cell: dict[str, Any], device: Device, host: Host) -> dict[str, Any]:
    """A row of predictions beside what was measured."""
    graph = graph_of(cell)
    step = estimate_step(graph, device)
    priced = price(graph, device)
    row = {
        "model": cell["model"],
        "batch": cell["batch"],
        "shape": cell["shape"],
        "measured_us": cell["step_us"],
        "predicted_us": step.step_us,
        "kernels_us": sum(priced.by_family_us.values()),
        "flops": sum(call.flops for call, _ in priced.calls),
        "host_us": step.host_us,
        "clock": step.clock,
        "measured_clock": cell.get("clock", {}),
        "joules": priced.joules,
        "generic": step.num_generic,
    }
    if "watched_us" in cell:
        row["watched_us"] = cell["watched_us"]
    if "programs" in cell:
        row |= of_the_host(cell, graph, device, host)
    if "peak_bytes" in cell:
        peak = estimate_peak(graph, device.context_bytes)
        row["peak_bytes"] = cell["peak_bytes"]
        row["predicted_peak_bytes"] = peak.peak_bytes
    return row


def of_the_host(
    cell: dict[str, Any], graph: Graph, device: Device, host: Host
) -> dict[str, Any]:
    """The host by phase, measured and predicted, and the step by the host's speed just
    before it, over what calibration found."""
    programs = cell["programs"]
    drift = scale_of([each["step_us"] for each in programs], host.steps_us)
    drifts = {
        phase: scale_of(
            [each["host_us"][phase] for each in programs],
            [each[phase] for each in host.phases_us],
        )
        for phase in programs[0]["host_us"]
    }
    found = {
        "beside_us": dict.fromkeys(drifts, drift),
        "beside_phases_us": drifts,
    }
    return {
        "host_drift": round(drift, 4),
        "host_drifts": {phase: round(each, 4) for phase, each in drifts.items()},
        "phases_us": cell["host_us"],
        "predicted_phases_us": phases_us(graph, device),
        "programs": programs,
        **{name: at_scales(graph, device, by) for name, by in found.items()},
    }


def at_scales(graph: Graph, device: Device, by: Mapping[str, float]) -> float:
    """The step with the host's phases so many times as long."""
    priced = price(graph, device)
    priced.tasks = [
        replace(
            task,
            host_us=by[node.phase.value] * task.host_us,
            host_after_us=by[node.phase.value] * task.host_after_us,
        )
        for task, node in zip(priced.tasks, graph.nodes, strict=True)
    ]
    return steady(priced, device).step_us


def phases_us(
    graph: Graph, device: Device, wires: Wires = NO_WIRES
) -> dict[str, float]:
    """Host time of each phase, launches included."""
    found = {phase.value: 0.0 for phase in Phase}
    tasks = price(graph, device, wires).tasks
    for task, node in zip(tasks, graph.nodes, strict=True):
        found[node.phase.value] += task.host_us + task.host_after_us
    return {name: round(us, 1) for name, us in found.items()}


def with_constant(rows: list[dict[str, Any]]) -> None:
    """The constant baseline: one rate, chosen in hindsight."""
    rates = [math.log(row["flops"] / row["measured_us"]) for row in rows]
    rate = math.exp(statistics.median(rates))
    for row in rows:
        row["constant_us"] = row["flops"] / rate


def main(
    path: Path,
    /,
    *,
    device: str,
    kind: str = "test",
    out: Path | None = None,
) -> None:
    """Predict the collected steps.

    Args:
        path: what foresight.collect wrote
        device: a shipped one, or a file
        kind: of shapes, of foresight.subjects.SHAPES
        out: such as results/steps/RUN.json
    """
    result, known = json.loads(path.read_text()), load_device(device)
    host = Host.of(known)
    rows = [predicted(cell, known, host) for cell in cells_of(result, kind)]
    with_constant(rows)
    is_shipped = device in shipped()
    found: dict[str, Any] = {
        # Of the steps; predictions may be made on another machine.
        "environment": result["environment"],
        "settings": {
            "shapes": kind,
            "device_file": "shipped" if is_shipped else "calibrated",
        },
        **{name: errors(rows, name, "measured_us") for name in PREDICTIONS},
    }
    peaks = [row for row in rows if "peak_bytes" in row]
    if peaks:
        found["peaks"] = errors(peaks, "predicted_peak_bytes", "peak_bytes")
    for name in ("beside_us", "beside_phases_us"):
        if all(name in row for row in rows):
            found[name] = errors(rows, name, "measured_us")
    found["by_model"] = errors_by_model(rows)
    found["cells"] = {f"{row['model']}/{row['batch']}": row for row in rows}
    for row in rows:
        ratio = row["predicted_us"] / row["measured_us"]
        peak = row.get("predicted_peak_bytes", 0) / row.get("peak_bytes", 1)
        clock = row.get("measured_clock", {})
        print(
            f"{row['model']:>10} {row['batch']:>6} "
            f"measured {row['measured_us'] / 1e3:8.2f} ms, predicted x{ratio:.3f}, "
            f"kernels x{row.get('kernels_us', 0) / row['measured_us']:.3f}, peak "
            f"x{peak:.3f}, host {row.get('host_us', 0) / 1e3:.1f} ms, drift "
            f"{row.get('host_drift', 1.0):.2f}, clock "
            f"{row.get('clock', 0):.3f} {clock.get('sm_mhz', '')} MHz"
        )
    for model, own in found["by_model"].items():
        print(model, own)
    print({k: v for k, v in found.items() if k not in ("cells", "by_model")})
    if out:
        records.write(out, found)
