"""Copies between a GPU and pinned memory of each NUMA node.

    python -m recipes.bench storage.numa --out numa.json

One process a GPU and node, bound as `ssdtrain train` binds its ranks. `near_over_far`
is the rate of the GPU's own node over the slowest other one's.
"""

from typing import Any

import torch

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import guarded
from recipes.bench.harness.timing import wait
from ssdtrain import numa
from ssdtrain.train.ranks import Ranks

MIB = 1 << 20
WAYS = ("d2h", "h2d")


def rates(gpu: int, node: int, mib: int) -> dict[str, float]:
    """GB/s of this process, bound to a node before it pins."""
    numa.bind(node)
    device = torch.device("cuda", gpu)
    there = torch.empty(mib * MIB, dtype=torch.uint8, device=device)
    here = torch.empty(mib * MIB, dtype=torch.uint8, pin_memory=True)
    found = {}
    for way, target, source in zip(WAYS, (here, there), (there, here), strict=True):
        best = 0.0
        for _ in range(6):
            begun = wait(device)
            target.copy_(source, non_blocking=True)
            best = max(best, mib * MIB / (wait(device) - begun) / 1e9)
        found[f"{way}_gb_per_s"] = round(best, 2)
    return found


def cell(gpu: int, mib: int) -> dict[str, Any]:
    """One GPU and all nodes."""
    ranks = Ranks(rank=0, world_size=1, local_rank=gpu, local_size=1, launched=True)
    own = ranks.gpu_node()
    by_node: dict[int, dict[str, float]] = {}
    for node in numa.nodes():
        made, why = guarded(rates, gpu, node, mib, limit_s=60, method="spawn")
        if why:
            return {"error": why}
        by_node[node] = made
    found: dict[str, Any] = {"node": own, "by_node": by_node}
    others = [values for node, values in by_node.items() if node != own]
    if own in by_node and others:
        for way in WAYS:
            name = f"{way}_gb_per_s"
            slowest = min(values[name] for values in others)
            found[f"near_over_far_{way}"] = round(by_node[own][name] / slowest, 2)
    return found


def main(bench: Bench, *, mib: int = 512) -> None:
    """A cell for each GPU.

    Args:
        mib: of a copy
    """
    cells = bench.cells({"mib": mib})
    cells.fact("nodes", {str(n): len(cpus) for n, cpus in numa.nodes().items()})
    for gpu in range(torch.cuda.device_count()):
        cells.run(f"gpu {gpu}", cell, gpu, mib, limit_s=90)
