"""Whole training steps: measured on a device, and predicted by `foresight`.

    python -m recipes.bench foresight.steps --shapes held4 --out steps.json
    python -m recipes.bench foresight.steps --shapes held4 --out steps.json \\
        --by mine.json --into recipes/bench/results/steps/held4_h200.json

The first needs the device; the second captures every step on the meta device and prices
it, and takes recorded files as well. `kernels` adds up the same kernel times and knows
no host, clock or gaps; `constant` takes one rate of FLOPs, the best for these steps.
"""

import math
import statistics
from pathlib import Path
from typing import Any

import torch

from recipes.bench.foresight.subjects import SHAPES, subject_of
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.records import Data, read, write
from recipes.bench.harness.timing import Peak, wait
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.device import DeviceCosts, load_device, shipped
from ssdtrain.tools.foresight.memory import estimate_peak
from ssdtrain.tools.foresight.price import estimate_step, price
from ssdtrain.tools.foresight.tracing import step_us


def measured(model: str, batch: int, shapes: str, device: torch.device) -> Data:
    """Time a step, and its peak on a GPU."""
    base = Peak(device).base
    with device:
        subject = subject_of(model, batch, shapes)
    parameters, settings = subject.model.parameters(), {"lr": 1e-5, "fused": True}
    kind: Any = torch.optim.AdamW if subject.optimizer == "adamw" else torch.optim.SGD
    optimizer = kind(parameters, **settings)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        subject.forward().backward()
        optimizer.step()

    step()  # the optimizer's state
    step()
    memory = Peak(device)
    step()
    wait(device)
    found = {"model": model, "batch": batch}
    if device.type == "cuda":
        found["peak_bytes"] = memory.most + memory.base - base
    return {**found, "measured_us": step_us(step, num_warm=1, seconds=0.9)}


def predicted(cell: Data, shapes: str, device: DeviceCosts) -> Data:
    """Predictions beside what was measured; nothing of that goes in."""
    with torch.device("meta"):
        subject = subject_of(cell["model"], cell["batch"], shapes)
        graph = capture(subject.model, subject.forward, optimizer=subject.optimizer)
    priced = price(graph, device)
    kept = {"model", "batch", "measured_us", "peak_bytes"} & cell.keys()
    row = {
        **{key: cell[key] for key in sorted(kept)},
        "predicted_us": estimate_step(graph, device).step_us,
        "kernels_us": sum(priced.by_family_us.values()),
        "flops": sum(call.flops for call, _ in priced.calls),
    }
    if "peak_bytes" in cell:
        peak = estimate_peak(graph, device.context_bytes)
        row["predicted_peak_bytes"] = peak.peak_bytes
    return row


def with_constant(rows: list[Data]) -> None:
    """Add the constant baseline: one rate, chosen in hindsight."""
    rates = [math.log(row["flops"] / row["measured_us"]) for row in rows]
    rate = math.exp(statistics.median(rates))
    for row in rows:
        row["constant_us"] = row["flops"] / rate


def main(
    bench: Bench, *, shapes: str = "test", by: str = "", into: Path | None = None
) -> None:
    """Measure the steps, or predict those that were measured.

    Args:
        shapes: of foresight.subjects.SHAPES
        by: a device of ssdtrain or a file of one: predict by it
        into: results of predictions
    """
    if not by:
        cells = bench.cells({"shapes": shapes})
        for model, (*_, batches) in SHAPES[shapes].items():
            for batch in batches:
                name = f"{model}/{batch}"
                cells.run(name, measured, model, batch, shapes, bench.device)
        return
    found, device = read(bench.out), load_device(by)
    steps = [cell for cell in found["cells"].values() if "measured_us" in cell]
    rows = [predicted(cell, shapes, device) for cell in steps]
    with_constant(rows)
    file = "shipped" if by in shipped() else "calibrated"
    cells_by_name = {f"{row['model']}/{row['batch']}": row for row in rows}
    settings = {"shapes": shapes, "device_file": file}
    # The environment is that of the steps; predictions may be made elsewhere.
    write(into or bench.out, {**found, "settings": settings, "cells": cells_by_name})
