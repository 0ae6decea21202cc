"""SSD bandwidth: a raw O_DIRECT loop, our storage, and the whole offloader, in turn.

    python -m recipes.bench storage.ssd --directory /mnt/nvme0 --budget-s 90

Raw and ours run in alternate rounds at the same block size and depth, with matrix
products on the GPU meanwhile (if there is one), and are compared round by round.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import Clock
from recipes.bench.storage.offloader_io import offloader_rates
from recipes.bench.storage.raw_io import (
    Call,
    Rates,
    RawFile,
    aligned_buffers,
    gb_per_s,
    scratch,
    told,
)
from ssdtrain.storage import open_storage

MIB = 1024 * 1024
# (block MiB, depth), the most telling first: one activation of a small and of a
# large model at the default depth, then the corners.
CELLS = ((64, 4), (16, 4), (256, 4), (16, 1), (64, 8), (4, 8), (4, 1), (1, 8))


@contextmanager
def compute(device: torch.device | None) -> Iterator[list[float]]:
    """Matrix products on the GPU for the length of the block; yields TFLOP/s."""
    rate: list[float] = []
    if device is None:
        yield rate
        return
    stop = threading.Event()
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def work() -> None:
        clock = Clock(device)
        begin, num = clock.mark(), 0
        while not stop.is_set():
            for _ in range(4):
                torch.mm(a, a)
            num += 4
            torch.cuda.current_stream().synchronize()
        rate.append(num * 2 * 8192**3 / clock.ms(begin, clock.mark()) / 1e9)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            yield rate
        finally:
            stop.set()
            done.result()


def storage_cell(
    directory: Path, block_mib: int, depth: int, num_rounds: int, total_mib: int
) -> dict[str, Any]:
    """Raw against `Storage.write` and `Storage.read`, round by round."""
    block = block_mib * MIB
    num_blocks = max(2 * depth, total_mib // block_mib)
    buffers = aligned_buffers(depth, block)
    raw = RawFile(directory, num_blocks, block)
    storage = open_storage([directory])
    slots = [storage.allocate(block) for _ in range(num_blocks)]
    ways: dict[str, Call] = {
        "raw_write": raw.write,
        "raw_read": raw.read,
        "ours_write": lambda number, buffer: storage.write(slots[number], buffer),
        "ours_read": lambda number, buffer: storage.read(slots[number], buffer),
    }
    rates: Rates = defaultdict(list)
    try:
        for call in ways.values():
            gb_per_s(call, num_blocks, buffers)  # first touch of fresh extents
        names = list(ways)
        for turn in range(num_rounds):
            for name in names if turn % 2 == 0 else names[2:] + names[:2]:
                rates[name].append(gb_per_s(ways[name], num_blocks, buffers))
    finally:
        raw.close()
        storage.close()
    return {"what": "storage", **told(block_mib, depth, rates)}


def main(
    bench: Bench, *, directory: Path = Path("."), rounds: int = 7, total_mib: int = 512
) -> None:
    """Run as many cells as the budget allows."""
    record = bench.cells(anew=True)
    device = torch.device("cuda") if torch.cuda.is_available() else None
    place = scratch(directory)
    longest_s = 0.0
    try:
        for (block_mib, depth), measure in itertools.product(
            CELLS, (storage_cell, offloader_rates)
        ):
            before = record.left_s()
            if before < 1.3 * longest_s:
                continue
            with compute(device) as tflops:
                cell = measure(place, block_mib, depth, rounds, total_mib)
            if tflops:
                cell["compute_tflops"] = round(tflops[0], 1)
            record.add(**cell)
            longest_s = max(longest_s, before - record.left_s())
    finally:
        place.rmdir()
