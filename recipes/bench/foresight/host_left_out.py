"""How well a run's own steps tell its host's speed: each left out in turn.

    python -m recipes.bench foresight.host_left_out

Of every recorded run of steps that nobody had run, those that the host binds are priced
with the shipped host times. The host's scale for each is the median of measured over
predicted time of the others, as `calibrate` takes it of its three programs; what is
left is what operators' host times are wrong by, and what others did on the machine.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.bench.foresight.errors import errors
from recipes.bench.foresight.evaluate import cells_of, graph_of
from recipes.bench.harness import records
from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight.device import Device, load_device
from ssdtrain.tools.foresight.price import estimate_step

# File, kind of shapes, device.
RUNS = (
    ("held3_h200.json", "held3", "h200"),
    ("held2_h200.json", "held2", "h200"),
    ("held_h200.json", "held", "h200"),
    ("test_h200.json", "test", "h200"),
    ("explore_h100.json", "explore", "h100"),
)
# Kernels that fill more of a measured step than this may bind it.
MOST_KERNELS = 0.75


def host_bound(path: Path, kind: str, device: Device) -> list[dict[str, Any]]:
    """A recorded run's steps that the host binds: one of each model, the smallest."""
    found: dict[str, dict[str, Any]] = {}
    for cell in cells_of(json.loads(path.read_text()), kind):
        name = cell["model"]
        if name in found and found[name]["batch"] < cell["batch"]:
            continue
        step = estimate_step(graph_of(cell), device)
        if step.device_us < MOST_KERNELS * cell["step_us"]:
            found[name] = {
                "model": name,
                "batch": cell["batch"],
                "measured_us": round(cell["step_us"], 1),
                "host_us": round(step.host_us, 1),
            }
    return list(found.values())


def left_out(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with the step's time by the scale of the others."""
    return [
        {**row, "predicted_us": round(row["host_us"] * _scale(rows, without=row), 1)}
        for row in rows
    ]


def _scale(rows: list[dict[str, Any]], without: Mapping[str, Any]) -> float:
    others = [row for row in rows if row is not without]
    return statistics.median(row["measured_us"] / row["host_us"] for row in others)


def main() -> None:
    found: dict[str, Any] = {"runs": {}}
    for name, kind, device in RUNS:
        rows = left_out(host_bound(RESULTS / "steps" / name, kind, load_device(device)))
        found["runs"][name] = {
            **errors(rows, "predicted_us", "measured_us"),
            "steps": rows,
        }
        print(name, found["runs"][name])
    steps = [row for run in found["runs"].values() for row in run["steps"]]
    found.update(errors(steps, "predicted_us", "measured_us"))
    print({key: value for key, value in found.items() if key != "runs"})
    records.write(RESULTS / "foresight" / "host_left_out.json", found)
