"""Learns this machine's CPU for a minute, then predicts steps that it has never run.

    OMP_NUM_THREADS=1 python -m recipes.bench foresight.own_machine --times times.jsonl

Kernels of a random design are timed (a later run goes on with the file), models are
learned, six kinds of model are captured on the meta device at three batches each and
priced; only then do they run. With one thread all times are of the thread, not of the
clock on the wall: they leave out what neighbours on a shared machine take, and not what
they do to its caches and its clock. `kernels` adds up the same kernel times; `constant`
takes one rate of FLOPs, the best in hindsight for these very steps.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from recipes.bench.foresight import subjects
from recipes.bench.foresight.errors import errors
from recipes.bench.foresight.evaluate import with_constant
from recipes.bench.harness.cells import environment
from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.device import Device, write_device
from ssdtrain.tools.foresight.learn import learn
from ssdtrain.tools.foresight.price import estimate_step, price
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.foresight.tracing import step_us

NUM_RUNS = 3
SECONDS_A_RUN = 0.6


def _subject(name: str, batch: int, shape: dict[str, int]) -> subjects.Subject:
    subject = subjects.MAKERS[name](batch, **shape)
    subject.model.float()
    return subject


def predicted(
    name: str, batch: int, shape: dict[str, int], device: Device
) -> dict[str, Any]:
    """A row of predictions; nothing has run."""
    with torch.device("meta"):
        subject = _subject(name, batch, shape)
        kind = device.spec.kind
        graph = capture(
            subject.model, subject.forward, optimizer=subject.optimizer, on=kind
        )
    step, priced = estimate_step(graph, device), price(graph, device)
    return {
        "model": name,
        "batch": batch,
        "predicted_us": step.step_us,
        "kernels_us": sum(priced.by_family_us.values()),
        "flops": sum(call.flops for call, _ in priced.calls),
        "expected_error": step.error,
        "by_family_us": {k.value: round(v) for k, v in step.by_family_us.items()},
        "generic": step.num_generic,
        "unknown_host": step.unknown_host,
    }


def measured(name: str, batch: int, shape: dict[str, int]) -> dict[str, float]:
    """The step's time, the median of some runs, and what passed on the wall."""
    step = subjects.TrainingStep(_subject(name, batch, shape))
    times, began, worked = [], time.perf_counter(), time.thread_time()
    for _ in range(NUM_RUNS):
        times.append(step_us(step, num_warm=2, seconds=SECONDS_A_RUN))
    wall = (time.perf_counter() - began) / (time.thread_time() - worked)
    return {
        "measured_us": statistics.median(times),
        "least_us": min(times),
        "most_us": max(times),
        "wall_over_work": round(wall, 2),
    }


def main(
    *,
    times: Path,
    seconds: float = 60.0,
    device_out: Path | None = None,
    out: Path | None = None,
) -> None:
    """Run it.

    Args:
        times: kernel times
        seconds: for more of them
        device_out: keep what was learned
    """
    torch.manual_seed(0)
    load_before = os.getloadavg()[0]
    device = learn(Kind.CPU, times, seconds=seconds)
    if device_out:
        write_device(device_out, device)
    cells = [
        (name, batch, shape)
        for name, (shape, batches) in subjects.SHAPES["cpu"].items()
        for batch in batches
    ]
    rows = [predicted(*cell, device) for cell in cells]
    for row, cell in zip(rows, cells, strict=True):
        row.update(measured(*cell))
        ratio = row["predicted_us"] / row["measured_us"]
        print(
            f"{row['model']:>10} {row['batch']:>5} {row['measured_us'] / 1e3:8.2f} ms "
            f"({row['least_us'] / 1e3:.2f} to {row['most_us'] / 1e3:.2f}), predicted "
            f"x{ratio:.3f}, kernels x{row['kernels_us'] / row['measured_us']:.3f}, "
            f"{row['generic']} generic, {row['by_family_us']}",
            flush=True,
        )
    with_constant(rows)
    spec = device.spec
    ran = environment()
    ran["command"] = ran["command"].replace(str(times), times.name)
    found: dict[str, Any] = {
        "environment": ran,
        "load": [load_before, os.getloadavg()[0]],
        "ceilings": {"tflops": spec.tflops, "memory_gb_per_s": spec.memory_gb_per_s},
        "kernel_errors": {k.value: round(v, 4) for k, v in device.errors.items()},
        "predicted": errors(rows, "predicted_us", "measured_us"),
        "kernels": errors(rows, "kernels_us", "measured_us"),
        "constant": errors(rows, "constant_us", "measured_us"),
        "steps": rows,
    }
    print({k: v for k, v in found.items() if k not in ("steps", "environment")})
    if out:
        path = RESULTS / "foresight" / out
        path.write_text(json.dumps(found, indent=1) + "\n")
