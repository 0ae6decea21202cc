"""What `fully_shard` costs the host, in views' worth of host time.

    OMP_NUM_THREADS=1 python -m recipes.bench.foresight.sharded_host --out FILE.json

One thread, a process group that does nothing, weights of a few bytes: what is left is
the host's work. Units of 1 to 16 weights run plain and sharded; what sharding adds in
forward, backward and update, over what a view takes on this machine, is a
number that other machines have as well. `ssdtrain/foresight/parallel.py` has it.
The unit is a view (`HostTable.view_us`), by the same trace that host times come from.
"""

import argparse
import gc
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.bench.common import results
from recipes.bench.common.cells import RESULTS, environment
from ssdtrain.foresight.learn import host_table, programs
from ssdtrain.foresight.spec import Kind

WIDTH, ROWS = 8, 4
UNITS = (4, 12)
WEIGHTS = (1, 4, 8, 16)
NUM_STEPS = 40
NUM_ROUNDS, NUM_TRACES = 3, 7


class Unit(nn.Module):
    """Products with `weights` matrices, one behind the other."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        made = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(weights)]
        self.products = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) to the same."""
        for product in self.products:
            x = product(x)
        return x


def times_us(units: int, weights: int, sharded: bool) -> dict[str, float]:
    """Host microseconds of forward, backward and update: the least of some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit(weights) for _ in range(units)))
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for unit in model:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(ROWS, WIDTH)
    found = {"forward": 1e12, "backward": 1e12, "update": 1e12}
    for number in range(NUM_STEPS):
        at = [time.thread_time()]
        loss = model(x).sum()
        at.append(time.thread_time())
        loss.backward()
        at.append(time.thread_time())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        at.append(time.thread_time())
        if number >= 3:
            for phase, (start, end) in zip(found, pairwise(at), strict=True):
                found[phase] = min(found[phase], (end - start) * 1e6)
    return found


def least(units: int, weights: int, sharded: bool) -> dict[str, float]:
    """The least of some rounds: whatever else runs on the machine only adds."""
    rounds = [times_us(units, weights, sharded) for _ in range(NUM_ROUNDS)]
    gc.collect()
    return {phase: min(one[phase] for one in rounds) for phase in rounds[0]}


def slopes(weights: int) -> dict[str, Any]:
    """What one more unit takes, plain and sharded."""
    few, many = UNITS
    found: dict[str, Any] = {"weights": weights}
    for how in ("plain", "sharded"):
        ends = [least(units, weights, how == "sharded") for units in UNITS]
        found[how] = {
            phase: round((ends[1][phase] - ends[0][phase]) / (many - few), 2)
            for phase in ends[0]
        }
    return found


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: value at 0, and slope."""
    x = sum(p[0] for p in points) / len(points)
    y = sum(p[1] for p in points) / len(points)
    slope = sum((a - x) * (b - y) for a, b in points) / sum(
        (a - x) ** 2 for a, _ in points
    )
    return y - slope * x, slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    rows = [slopes(weights) for weights in WEIGHTS]
    tables = [
        host_table(Kind.CPU, programs(torch.device("cpu"))) for _ in range(NUM_TRACES)
    ]
    view_us = statistics.median(table.view_us for table in tables)
    found: dict[str, Any] = {
        "view_us": round(view_us, 2),
        "view_us_of_traces": [round(table.view_us, 2) for table in tables],
        "rows": rows,
    }
    for phase in ("forward", "backward", "update"):
        points = [
            (float(row["weights"]), row["sharded"][phase] - row["plain"][phase])
            for row in rows
        ]
        unit, weight = line(points)
        found[phase] = {
            "views_a_unit": round(unit / view_us, 2),
            "views_a_weight": round(weight / view_us, 2),
        }
    own = [(float(row["weights"]), row["plain"]["update"]) for row in rows]
    found["plain_update_views_a_weight"] = round(line(own)[1] / view_us, 2)
    print(json.dumps(found, indent=1))
    if args.out:
        path = RESULTS / "foresight" / args.out
        results.write(path, {"environment": environment(), **found})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
