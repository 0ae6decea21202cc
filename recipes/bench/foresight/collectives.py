"""Times of collectives over sizes, on two or more GPUs of one host, and their curves.

    python -m recipes.bench foresight.collectives --out ranks.json
    python -m recipes.bench foresight.collectives --out ranks.json --save

All-reduce, all-gather, reduce-scatter, all-to-all and point to point, in rounds, each
in an order of its own: every time is kept, so that what they differ by is known.
`--save` makes the package's curves of NVLink of them. `--ranks 2 --device cpu` runs the
same over gloo.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.harness.processes import answer_of, join_ranks
from recipes.bench.harness.records import Data, read
from recipes.bench.harness.timing import Clock, wait
from ssdtrain.curves import Curve
from ssdtrain.tools.foresight.collectives import (
    DATA,
    FABRIC_FORMAT,
    FABRIC_SUFFIX,
    Collective,
    Fabric,
    bus_bytes,
    load_fabric,
)
from ssdtrain.tools.foresight.fit import geometric_mean_error
from ssdtrain.tools.machine.fit import fit_corners
from ssdtrain.tools.machine.links import Sample

SMALLEST, LARGEST = 1 << 12, 1 << 29
TINY_LARGEST = 1 << 16
IN_A_ROW = 10
SLEEP_CYCLES = 4_000_000
"""Some two milliseconds, in which the host enqueues them all."""
LEAST_SIZES = 6
"""Of a curve, to be judged by half of them."""


def _body(kind: Collective, num_bytes: int, device: torch.device) -> Any:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    count = max(ranks, num_bytes // 2 // ranks * ranks)
    whole = torch.zeros(count, device=device, dtype=torch.bfloat16)
    part, other = whole[: count // ranks].clone(), whole.clone()

    def send() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    return {
        Collective.ALL_REDUCE: lambda: dist.all_reduce(whole),
        Collective.ALL_GATHER: lambda: dist.all_gather_into_tensor(whole, part),
        Collective.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, whole),
        Collective.ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole),
        Collective.SEND: send,
    }[kind]


def _timed(body: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of one of several in a row: the slowest rank's."""
    for _ in range(3):
        body()
    wait(device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    body()  # the ranks meet here: none of them waits for another in what is timed

    def several() -> None:
        for _ in range(IN_A_ROW):
            body()

    us = Clock(device).once(several) / IN_A_ROW * 1e3
    slowest = torch.tensor([us], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())


def sizes(largest: int) -> Iterator[int]:
    """Powers of two and what lies half-way between them."""
    size = SMALLEST
    while size <= largest:
        yield size
        if 3 * size // 2 <= largest:
            yield 3 * size // 2
        size *= 2


def links(
    device: torch.device, largest: int, num_rounds: int, end: float
) -> list[dict[str, Any]]:
    """Every kind and size: the median of rounds, and each round's time."""
    cells = [(kind, size) for kind in Collective for size in sizes(largest)]
    times: dict[tuple[Collective, int], list[float]] = {cell: [] for cell in cells}
    for number in range(num_rounds):
        left = torch.tensor([end - time.monotonic()], device=device)
        dist.broadcast(left, 0)
        if left.item() < 0:
            break
        order = list(cells)
        random.Random(number).shuffle(order)  # the same one on every rank
        for kind, size in order:
            us = _timed(_body(kind, size, device), device)
            times[kind, size].append(round(us, 2))
    return [
        {"kind": kind.value, "bytes": size, "us": statistics.median(us), "times_us": us}
        for (kind, size), us in times.items()
        if us
    ]


def on_a_rank(kind: str, num_rounds: int, seconds: float) -> Data:
    """Measure on this rank and the others."""
    device = join_ranks(kind)
    largest = LARGEST if kind == "cuda" else TINY_LARGEST
    return {"links": links(device, largest, num_rounds, time.monotonic() + seconds)}


def fabric_of(collectives: Data, name: str) -> tuple[Fabric, dict[str, float]]:
    """Curves of every operation, and their errors at sizes that were held out."""
    curves: dict[Collective, Curve] = {}
    found: dict[str, float] = {}
    for kind in Collective:
        own = [row for row in collectives["links"] if row["kind"] == kind.value]
        moved = [bus_bytes(kind, row["bytes"], collectives["ranks"]) for row in own]
        samples = [
            Sample(size_bytes=max(1, round(size)), seconds=row["us"] * 1e-6)
            for size, row in zip(moved, own, strict=True)
        ]
        if len(samples) >= LEAST_SIZES:
            found[kind.value] = judged(samples)
            curves[kind] = fit_corners(samples)
    shipped = load_fabric(name)
    return replace(shipped, curves={**shipped.curves, **curves}), found


def judged(samples: Sequence[Sample]) -> float:
    """Error of the curve through every other size, at the rest."""
    half, rest = fit_corners(samples[::2]), samples[1::2]
    off = [abs(half.seconds(each.size_bytes) / each.seconds - 1) for each in rest]
    return round(geometric_mean_error(off), 4)


def main(
    bench: Bench,
    *,
    ranks: int = torch.cuda.device_count(),
    rounds: int = 7,
    save: bool = False,
) -> None:
    """Measure, or make the curves of what was measured.

    Args:
        save: write the fabric file of the package
    """
    if ranks < 2:
        raise UsageError("collectives need two GPUs (or --ranks 2 --device cpu)")
    if not save:
        kind, seconds = bench.device.type, bench.budget_s
        cells = bench.cells({"ranks": ranks})
        given = (on_a_rank, (kind, rounds, seconds), seconds + 60)
        cells.run("collectives", lambda: answer_of(*given, ranks=ranks))
        return
    links = read(bench.out)["cells"]["collectives"]["links"]
    fabric, errors = fabric_of({"ranks": ranks, "links": links}, "nvlink")
    print("held out:", errors)
    FABRIC_FORMAT.write(DATA / f"nvlink{FABRIC_SUFFIX}", fabric)
