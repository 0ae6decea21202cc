"""Instructions per cycle and throughput of RGAT's kernels, by the GPU's counters.

    python -m recipes.bench rgnn.counters

Wu's Figure 3.13: one training step of a layer of 64 columns on bgs and am, unoptimized
(`none`) and compact, in a child of `ncu` (Nsight Compute); needs a GPU whose counters
may be read. Kernels by direction and family: launches, ms in all, and means by time of
instructions per cycle and multiprocessor, and of the shares of the peak that compute,
L1, L2 and DRAM reach. Without a GPU: the step alone.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from hector.train import LayerKind
from recipes.bench.harness import counters
from recipes.bench.harness.cli import Bench
from recipes.bench.rgnn.cells import Cell, Contender, Task
from recipes.bench.rgnn.contenders import Graphs, build, step_of

GRAPHS, SETTINGS = ("bgs", "am"), ("none", "compaction")
FAMILIES = ("gemm", "outer_product", "traversal", "parameters", "sums")
TIME = "gpu__time_duration.sum"
METRICS = {
    "ipc": "sm__inst_executed.avg.per_cycle_active",
    "compute_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
BETWEEN = "spin_kernel"
"""What `torch.cuda._sleep` launches: here between forward and backward."""
CHILD = "from recipes.bench.rgnn.counters import step; step({!r}, {!r}, {}, 'cuda')"
WARM, LIMIT_S = 2, 200


def step(name: str, setting: str, scale: float, device: str) -> float:
    """The loss of a training step behind some others, the only one that is counted."""
    graph = Graphs(torch.device(device), scale).get(name)
    cell = Cell(
        graph=name, model=LayerKind.RGAT, task=Task.TRAINING, dtype="float32", width=64
    )
    layer = build(cell, Contender(f"hector-{setting}"), graph)
    before = step_of(layer, Task.TRAINING)
    for _ in range(WARM):
        before()
    layer.clear()
    gpu = device == "cuda"
    with torch.cuda.profiler.profile() if gpu else contextlib.nullcontext():
        loss = functional.cross_entropy(layer.module(layer.x, graph), layer.labels)
        if gpu:
            torch.cuda._sleep(1)  # a kernel of a known name: `BETWEEN`
        loss.backward()
        return loss.item()


def family(kernel: str) -> str:
    """Of a kernel, by the name that hector gives it; `other` are PyTorch's."""
    found = (each for each in FAMILIES if kernel.startswith(f"hector_{each}"))
    return next(found, "other")


def by_family(rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Kernels in the order of their launches, as forward and backward of families."""
    names = [row["Kernel Name"] for row in rows]
    middle = next(i for i, name in enumerate(names) if BETWEEN in name)
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for i, row in enumerate(rows):
        if i != middle:
            direction = "forward" if i < middle else "backward"
            groups[f"{direction} {family(names[i])}"].append(row)
    return {name: summary(group) for name, group in groups.items()}


def summary(rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Launches, ms in all, and means by time."""
    times = [counters.number(row[TIME]) for row in rows]
    found = {"launches": len(rows), "ms": round(sum(times) / 1e6, 4)}
    for name, metric in METRICS.items():
        values = (counters.number(row[metric]) for row in rows)
        mean = sum(map(float.__mul__, times, values)) / sum(times)
        found[name] = round(mean, 2)
    return found


def main(bench: Bench, *, scale: float = 1.0) -> None:
    """A cell for each graph and setting.

    Args:
        scale: nodes and edges over the published graph's
    """
    cells = bench.cells({"scale": scale})

    def cell(name: str, setting: str) -> dict[str, Any]:
        if bench.device.type != "cuda":
            return {"loss": step(name, setting, scale, "cpu")}
        count = partial(counters.counted, limit_s=LIMIT_S)
        child = CHILD.format(name, setting, scale)
        metrics = [TIME, *METRICS.values()]
        return by_family(count(child, metrics, "--profile-from-start", "off"))

    for name, setting in itertools.product(GRAPHS, SETTINGS):
        cells.run(f"{name}/{setting}", cell, name, setting)
