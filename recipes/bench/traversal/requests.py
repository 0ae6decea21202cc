"""Requests for host memory: what the model counts, what the GPU's counters say.

    python -m recipes.bench traversal.requests --out requests.json

`ncu` (Nsight Compute) runs each kernel in a child; needs a GPU whose counters may be
read. The L2's counters of reads from system memory, asked for by its compute units:
requests of up to a line, and sectors of 32 bytes. All lists of a graph once, by walk,
and gathers by the size of a row. Without a GPU: the model alone.
"""

import functools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from pydirect.coalesce import SECTOR_BYTES, Access, Requests, row_requests
from pydirect.gather import Path, index_select
from pydirect.memory import empty_pinned
from pydirect.sampling import Graph
from pydirect.traversal import Walk, count_requests, pagerank, place
from recipes.bench.harness import counters
from recipes.bench.harness.cli import Bench

ROW_BYTES = (256, 512, 2048, 2052)
WANTED = re.compile(
    r"^(lts__t_(requests|sectors)_(srcunit_tex_)?aperture_sysmem(_op_read)?"
    r"(_lookup_miss)?|pcie__read_bytes)$"
)
BEST = "lts__t_{}_srcunit_tex_aperture_sysmem_op_read"
CHILD = "from recipes.bench.traversal.requests import {0}; {0}({1!r}, {2})"
LIMIT_S = 60


def graph_of(shrink: int) -> Graph:
    """Lists of 0 to some 200 ids of 4 bytes, uniform ends."""
    made = torch.Generator().manual_seed(0)
    num = 100_000 // shrink
    degree = (16 * torch.randn(num, generator=made).exp()).long().clamp(max=200)
    starts = torch.arange(num).repeat_interleave(degree)
    ends = torch.randint(num, (len(starts),), generator=made)
    return Graph.from_edges(torch.stack([starts, ends]), num, outgoing=True)


def table_of(row_bytes: int, shrink: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of 256 MiB, and rows of it, none twice."""
    num = (1 << 28) // shrink // row_bytes
    made = torch.Generator().manual_seed(1)
    index = torch.randperm(num, generator=made)[: 100_000 // shrink]
    return empty_pinned((num, row_bytes // 4), torch.float32), index


def visit(walk: str, shrink: int) -> None:
    """Visit all lists once, on the GPU."""
    made = graph_of(shrink)
    lists = empty_pinned(made.neighbors.shape, made.neighbors.dtype)
    graph = Graph(offsets=made.offsets, neighbors=lists.copy_(made.neighbors))
    pagerank(place(graph, "cuda", walk=walk), tolerance=0, max_iterations=1)
    torch.cuda.synchronize()


def gather(row_bytes: int, shrink: int) -> None:
    """Gather rows once, on the GPU."""
    table, index = table_of(row_bytes, shrink)
    index_select(table, index.cuda(), path=Path.DIRECT)
    torch.cuda.synchronize()


@functools.cache
def metrics() -> list[str]:
    """The counters of `WANTED` that this GPU has."""
    done = subprocess.run(
        ["ncu", "--query-metrics"], capture_output=True, text=True, timeout=LIMIT_S
    )
    names = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    return sorted(name for name in names if WANTED.match(name))


def counted(function: str, argument: object, shrink: int, kernels: str) -> Any:
    """The counters' sums over the kernels of a child."""
    child = CHILD.format(function, argument, shrink)
    names, wanted = [f"{name}.sum" for name in metrics()], f"regex:{kernels}"
    only = ("--kernel-name", wanted)
    return sums(counters.counted(child, names, *only, limit_s=LIMIT_S))


def sums(rows: Iterable[dict[str, str]]) -> dict[str, int]:
    """The wanted counters, over all kernels."""
    total: dict[str, int] = defaultdict(int)
    for row in rows:
        for name, value in row.items():
            if WANTED.match(name.removesuffix(".sum")):
                total[name.removesuffix(".sum")] += round(counters.number(value))
    return dict(total)


def cell(model: Requests, told: dict[str, int]) -> dict[str, Any]:
    """The model's requests and sectors, the counters, and ours over theirs."""
    ours = {"requests": model.total, "sectors": model.moved_bytes // SECTOR_BYTES}
    found: dict[str, Any] = {**ours, "counters": told}
    for what, number in ours.items():
        if theirs := told.get(BEST.format(what)):
            found[f"{what}_ratio"] = round(number / theirs, 4)
    return found


def main(bench: Bench, *, shrink: int = 1) -> None:
    """A cell for each walk and each size of rows.

    Args:
        shrink: divide the sizes: a trial on a CPU
    """
    cells = bench.cells({"shrink": shrink})
    gpu = bench.device.type == "cuda"

    def walk_cell(walk: Walk) -> dict[str, Any]:
        told = counted("visit", walk.value, shrink, "_(push|pull)_") if gpu else {}
        return cell(count_requests(graph_of(shrink), walk), told)

    def row_cell(row_bytes: int) -> dict[str, Any]:
        told = counted("gather", row_bytes, shrink, "^gather_") if gpu else {}
        rows = table_of(row_bytes, shrink)[1].numpy()
        return cell(row_requests(rows, row_bytes, Access.ALIGNED), told)

    for walk in Walk:
        cells.run(f"lists, {walk.value}", walk_cell, walk)
    for row_bytes in ROW_BYTES:
        cells.run(f"rows of {row_bytes} B", row_cell, row_bytes)
