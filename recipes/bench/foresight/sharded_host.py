"""What `fully_shard` and DTensor cost the host, in views' worth of host time.

    OMP_NUM_THREADS=1 python -m recipes.bench foresight.sharded_host --out FILE.json

One thread, a process group that does nothing, weights of a few bytes: what is left is
the host's work. Units of 1 to 16 weights run plain and sharded; what sharding adds in
forward, backward and update, over what a view takes on this machine, is a
number that other machines have as well. `ssdtrain/tools/foresight/parallel.py` has it.
The unit is a view (`HostTable.view_us`), by the same trace that host times come from.

Tensor parallelism likewise: pairs of layers, the first split by columns, the second
by rows, with biases and without. What it adds is divided among the operators on
DTensors that run (in the update: among the tensors);
`ssdtrain/tools/foresight/recorder.py` has it. A model that is none of these pairs then
tells how far off that is.
"""

import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.bench.foresight import subjects
from recipes.bench.foresight.tensor_ranks import PLANS, alone, split
from recipes.bench.harness import records
from recipes.bench.harness.cells import environment
from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight.learn import host_table, programs
from ssdtrain.tools.foresight.spec import Kind

WIDTH, ROWS = 8, 4
UNITS = (4, 12)
WEIGHTS = (1, 4, 8, 16)
NUM_STEPS = 40
NUM_ROUNDS, NUM_TRACES = 3, 7
PAIRS = (3, 9)
UNSEEN = {"bert": dict(hidden=128, layers=3, sequence=8)}


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


def units(count: int, weights: int, is_sharded: bool) -> tuple[nn.Module, Any]:
    """A model of units and its forward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit(weights) for _ in range(count)))
    if is_sharded:
        mesh = init_device_mesh("cpu", (2,))
        for unit in model:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.randn(ROWS, WIDTH)
    return model, lambda: model(x).sum()


def step_us(model: nn.Module, forward: Callable[[], Tensor]) -> dict[str, float]:
    """Host microseconds of a model's forward, backward and update."""
    optimizer = torch.optim.AdamW(subjects.groups_of(model), fused=True)
    found = {"forward": 1e12, "backward": 1e12, "update": 1e12}
    for number in range(NUM_STEPS):
        at = [time.thread_time()]
        loss = forward()
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


def least_of(make: Callable[[], tuple[nn.Module, Any]]) -> dict[str, float]:
    """The least of some rounds, each of a model of its own: whatever else runs on the
    machine only adds."""
    rounds = [step_us(*make()) for _ in range(NUM_ROUNDS)]
    gc.collect()
    return {phase: min(one[phase] for one in rounds) for phase in rounds[0]}


def one_more(
    counts: tuple[int, int], make: Callable[[int], tuple[nn.Module, Any]]
) -> dict[str, float]:
    """What one more unit or pair takes."""
    ends = [least_of(partial(make, count)) for count in counts]
    more = counts[1] - counts[0]
    return {k: round((ends[1][k] - ends[0][k]) / more, 2) for k in ends[0]}


def slopes(weights: int) -> dict[str, Any]:
    """What one more unit takes, plain and sharded."""
    made = {
        how: one_more(UNITS, partial(units, weights=weights, is_sharded=sharded))
        for how, sharded in (("plain", False), ("sharded", True))
    }
    return {"weights": weights, **made}


class Pair(nn.Module):
    """Two layers, of which tensor parallelism splits the first by columns and the
    second by rows."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.down = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ROWS, WIDTH) to the same."""
        y: Tensor = self.down(self.up(x))
        return y


class _Wrapped(TorchDispatchMode):
    """Counts operators on DTensors by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            is_back = torch._C._current_graph_task_id() != -1
            self.found["backward" if is_back else "forward"] += 1
            return NotImplemented
        return func(*args, **(kwargs or {}))


def wrapped(model: nn.Module, forward: Callable[[], Tensor]) -> Counter[str]:
    """Operators on DTensors of a step; in the update, DTensors."""
    with _Wrapped() as counter:
        forward().backward()
    model.zero_grad(set_to_none=True)
    found = Counter(counter.found)
    found["update"] = sum(isinstance(p, DTensor) for p in model.parameters())
    return found


def pairs(count: int, bias: bool, is_split: bool) -> tuple[nn.Module, Any]:
    """A model of pairs and its forward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair(bias) for _ in range(count)))
    if is_split:
        for pair in model:
            split(pair, PLANS["pair"])
    x = torch.randn(2, ROWS, WIDTH)
    return model, lambda: model(x).sum()


def of_pairs(bias: bool) -> dict[str, Any]:
    """What one more pair takes whole and split, and its operators on DTensors."""
    whole, parts = (
        one_more(PAIRS, partial(pairs, bias=bias, is_split=split))
        for split in (False, True)
    )
    few, many = (wrapped(*pairs(count, bias, True)) for count in PAIRS)
    more = PAIRS[1] - PAIRS[0]
    counts = {phase: (many[phase] - few[phase]) / more for phase in few}
    return {"bias": bias, "whole": whole, "split": parts, "wrapped": counts}


def of_model(name: str, views: dict[str, float], view_us: float) -> dict[str, Any]:
    """What splitting a model adds to its host's step, measured and by the count of
    operators on DTensors."""

    def made(is_split: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        subject = subjects.MAKERS[name](1, **UNSEEN[name])
        if is_split:
            for layer in subjects.layers(name, subject.model):
                split(layer, PLANS[name])
        return subject.model, subject.forward

    whole, parts = (least_of(partial(made, s)) for s in (False, True))
    counts = wrapped(*made(True))
    added = sum(parts[phase] - whole[phase] for phase in parts)
    by_count = sum(views[phase] * counts[phase] for phase in parts) * view_us
    return {
        "model": name,
        "shape": UNSEEN[name],
        "wrapped": dict(counts),
        "added_us": round(added, 1),
        "by_count_us": round(by_count, 1),
    }


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: value at 0, and slope."""
    slope, value = statistics.linear_regression(*zip(*points, strict=True))
    return value, slope


def sharded(view_us: float) -> dict[str, Any]:
    """Views that `fully_shard` takes for a unit and for a weight, by phase."""
    rows = [slopes(weights) for weights in WEIGHTS]
    found: dict[str, Any] = {"view_us": round(view_us, 2), "rows": rows}
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
    return found


def tensor_parallel(view_us: float) -> dict[str, Any]:
    """Views for an operator on DTensors, by phase, and models that test them."""
    rows = [of_pairs(bias) for bias in (False, True)]
    views = {
        phase: round(
            sum(r["split"][phase] - r["whole"][phase] for r in rows)
            / sum(r["wrapped"][phase] for r in rows)
            / view_us,
            2,
        )
        for phase in ("forward", "backward", "update")
    }
    models = [of_model(name, views, view_us) for name in UNSEEN]
    return {
        "view_us": round(view_us, 2),
        "rows": rows,
        "views": views,
        "models": models,
    }


def main(
    *,
    out: Path | None = None,
    parts: tuple[Literal["fully_shard", "tensor"], ...] = ("fully_shard", "tensor"),
) -> None:
    """Measure and print; with `--out`, keep it."""
    torch.set_num_threads(1)
    alone()
    tables = [
        host_table(Kind.CPU, programs(torch.device("cpu"))) for _ in range(NUM_TRACES)
    ]
    view_us = statistics.median(table.view_us for table in tables)
    path = RESULTS / "foresight" / (out or Path("sharded_host.json"))
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if "fully_shard" in parts:
        found |= sharded(view_us)
        found["view_us_of_traces"] = [round(table.view_us, 2) for table in tables]
    if "tensor" in parts:
        found["tensor_parallel"] = tensor_parallel(view_us)
    print(json.dumps(found, indent=1))
    if out:
        records.write(path, {**found, "environment": environment()})
    dist.destroy_process_group()
