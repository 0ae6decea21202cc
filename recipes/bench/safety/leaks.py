"""A hundred thousand steps: resident memory's slope, with reports unread.

Steps of a small model under `plan="auto"`, forwards of changing length among them. The
slope is a least-squares line through resident memory after the first two thousand steps
(the last thousand reports are kept, and then every new one takes the place of another).
Beside it: how many more objects Python's collector knows than behind those steps. A
plan that is replaced moves resident memory by some pages and leaves no object.

    OMP_NUM_THREADS=1 python -m recipes.bench.safety.leaks --steps 100000
"""

import gc
import json
import logging
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

import ssdtrain
from recipes.bench.common.cells import Cells, arguments
from recipes.bench.safety.interrupts import WIDTH, Net

WARM_STEPS = 2_000
EVERY = 500
LIMIT_BYTES_A_STEP = 10.0


class Level(NamedTuple):
    """What the process holds before a step."""

    step: int
    num_bytes: int
    num_objects: int


def level(step: int) -> Level:
    """After a collection."""
    gc.collect()
    num_bytes = int(psutil.Process().memory_info().rss)
    return Level(step, num_bytes, len(gc.get_objects()))


def slope(levels: list[Level]) -> float:
    """Bytes a step after the warm steps."""
    kept = [(one.step, one.num_bytes) for one in levels if one.step >= WARM_STEPS]
    if len(kept) < 3:
        return float("nan")
    steps, sizes = np.array(kept, dtype=np.float64).T
    return float(np.polyfit(steps, sizes, 1)[0])


def train(num_steps: int, budget_s: float, target: str) -> dict[str, Any]:
    """Steps until they are done or the time is over."""
    torch.manual_seed(0)
    deadline = time.monotonic() + budget_s
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    levels: list[Level] = []
    with tempfile.TemporaryDirectory() as directory:
        settings: dict[str, Any] = {"target": target, "min_bytes": 0, "plan": "auto"}
        if target != "host":
            settings["directory"] = directory
        with ssdtrain.offload(net, max_overhead=1.0, **settings):
            for number in range(num_steps):
                rows = 16 if number % 97 else 24
                net(torch.randn(rows, WIDTH, requires_grad=True)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number % EVERY == 0:
                    levels.append(level(number))
                    if time.monotonic() > deadline:
                        break
    warm = [one for one in levels if one.step >= WARM_STEPS]
    return {
        "steps": levels[-1].step,
        "bytes_a_step": round(slope(levels), 2),
        "bytes_a_step_second_half": round(slope(warm[len(warm) // 2 :]), 2),
        "more_objects": warm[-1].num_objects - warm[0].num_objects if warm else None,
        "first_mib": round(levels[0].num_bytes / 2**20, 1),
        "last_mib": round(levels[-1].num_bytes / 2**20, 1),
        "levels": levels[:: max(1, len(levels) // 40)],
    }


def main() -> None:
    """One run; exits with an error if memory grows."""
    parser = arguments(__doc__, 3_600, "safety/leaks")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--target", choices=["host", "ssd"], default="ssd")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    cells = Cells(options.out, options.budget_s, {"steps": options.steps})
    name = f"{options.target}, reports unread"
    cells.run(name, lambda: train(options.steps, options.budget_s, options.target))
    found = cells[name]
    print(json.dumps({k: v for k, v in found.items() if k != "levels"}))
    if "error" in found or not found["bytes_a_step"] < LIMIT_BYTES_A_STEP:
        slope = found.get("bytes_a_step")
        sys.exit(f"memory grows by {slope} bytes a step: see {options.out}")


if __name__ == "__main__":
    main()
