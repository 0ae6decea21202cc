"""What it costs to notice a graph's tensors changed behind PyTorch, on this GPU.

    python -m recipes.bench safety.stale_graphs --out stale_graphs.json

Pairs of forward calls of one RGCN layer, with and without its watch, in turns: host
time of a call that does not wait, and device time by events. The share is over the call
without.
"""

import time
from statistics import median
from typing import Any

import torch

from hector.nn import RGCNConv
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import Clock, wait

NODES, RELATIONS, WIDTH = 100_000, 16, 64
ROUNDS, CALLS = 12, 20


def once(conv: RGCNConv, arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Microseconds of a call on the host and on the device."""
    clock = Clock(torch.device("cuda"))
    wait()
    start, begin = clock.mark(), time.perf_counter()
    for _ in range(CALLS):
        conv(*arguments)
    host = time.perf_counter() - begin
    return host / CALLS * 1e6, clock.ms(start, clock.mark()) / CALLS * 1e3


def measure(edges: int) -> dict[str, float]:
    """One number of edges."""
    torch.manual_seed(0)
    conv = RGCNConv(WIDTH, WIDTH, RELATIONS).cuda()
    nodes = min(NODES, max(edges // 4, 16))
    ends = torch.randint(nodes, (2, edges), device="cuda")
    kinds = torch.randint(RELATIONS, (edges,), device="cuda")
    arguments = (torch.randn(nodes, WIDTH, device="cuda"), ends, kinds)
    times: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    with torch.no_grad():
        for _ in range(3):
            conv(*arguments)
        state = conv.graph_of(ends, kinds, nodes, RELATIONS).state
        watch = state.watch
        for _ in range(ROUNDS):
            for name, chosen in (("with", watch), ("without", None)):
                state.watch = chosen
                times[name].append(once(conv, arguments))
        state.watch = watch
    found = {
        f"{side}_us_{name}": round(median(t[i] for t in times[name]), 2)
        for name in times
        for i, side in enumerate(("host", "device"))
    }
    share = found["device_us_with"] / found["device_us_without"] - 1
    return {"edges": edges, **found, "share_device": round(share, 4)}


def main(bench: Bench) -> None:
    """A cell a number of edges."""
    about = {"nodes": NODES, "relations": RELATIONS, "width": WIDTH, "rounds": ROUNDS}
    cells = bench.cells(about)
    for edges in (1_000, 100_000, 1_000_000, 20_000_000):
        cells.run(str(edges), measure, edges)
