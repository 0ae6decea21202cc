"""SSD bandwidth: a raw O_DIRECT loop, our storage, and the whole offloader, in turn.

    python -m recipes.bench storage.ssd --directory /mnt/nvme0 --budget-s 90

Raw and ours run in alternate rounds at the same block size and depth and are compared
round by round. A rerun goes on.
"""

import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recipes.bench.harness.cli import Bench
from ssdtrain.counters import Counters, Trace
from ssdtrain.rates import side_by_side
from ssdtrain.storage import open_storage
from ssdtrain.tools.machine.ssd import nameless_file
from ssdtrain.transfer.cuda import open_device
from ssdtrain.transfer.offloader import Drain, Meters, Offloader
from ssdtrain.transfer.pinned import PinnedPool

MIB = 1024 * 1024
# (block MiB, depth), the most telling first: one activation of a small and of a
# large model at the default depth, then the corners.
CELLS = ((64, 4), (16, 4), (256, 4), (16, 1), (64, 8), (4, 8), (4, 1), (1, 8))
Call = Callable[[int, torch.Tensor], object]
"""Moves one block."""
Round = Callable[[], tuple[float, float]]
"""Writes and reads all blocks; GB/s each way."""


def aligned_buffers(num: int, num_bytes: int) -> list[torch.Tensor]:
    """Page-aligned random bytes (disks may compress or skip zeros)."""
    made = []
    for seed in range(num):
        buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        buffer.view(torch.int64).random_(generator=generator)
        made.append(buffer)
    return made


def gb_per_s(call: Call, num_blocks: int, buffers: list[torch.Tensor]) -> float:
    """Rate of `call` over all blocks, one thread for each buffer."""
    ticket = itertools.count()

    def work(buffer: torch.Tensor) -> int:
        moved = 0
        while (block := next(ticket)) < num_blocks:
            call(block, buffer)
            moved += buffer.numel()
        return moved

    return side_by_side([partial(work, each) for each in buffers]).per_second / 1e9


def both_ways(
    write: Call, read: Call, num_blocks: int, buffers: list[torch.Tensor]
) -> Round:
    """All blocks written, then all read."""
    return lambda: (
        gb_per_s(write, num_blocks, buffers),
        gb_per_s(read, num_blocks, buffers),
    )


@contextmanager
def raw_rounds(
    directory: Path, num_blocks: int, buffers: list[torch.Tensor]
) -> Iterator[Round]:
    """One preallocated O_DIRECT file: one call a block."""
    size = buffers[0].numel()
    with nameless_file(str(directory), direct=True) as file:
        os.posix_fallocate(file, 0, num_blocks * size)

        def write(block: int, buffer: torch.Tensor) -> None:
            whole(os.pwrite(file, buffer.numpy().data, block * size))

        def read(block: int, buffer: torch.Tensor) -> None:
            whole(os.preadv(file, [buffer.numpy().data], block * size))

        def whole(moved: int) -> None:
            if moved != size:
                raise OSError(f"short transfer: {moved} of {size} bytes")

        yield both_ways(write, read, num_blocks, buffers)


@contextmanager
def storage_rounds(
    directory: Path, num_blocks: int, buffers: list[torch.Tensor]
) -> Iterator[Round]:
    """`Storage.write` and `Storage.read`."""
    with closing(open_storage([directory])) as storage:
        slots = [storage.allocate(buffers[0].numel()) for _ in range(num_blocks)]
        yield both_ways(
            lambda number, buffer: storage.write(slots[number], buffer),
            lambda number, buffer: storage.read(slots[number], buffer),
            *(num_blocks, buffers),
        )


@contextmanager
def offloader_rounds(
    directory: Path, num_blocks: int, buffers: list[torch.Tensor]
) -> Iterator[Round]:
    """The whole way: device, staging, disk, and back."""
    depth, block = len(buffers), buffers[0].numel()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = open_device(torch.device(kind))
    pool = PinnedPool(device, 3 * depth * block, depth * block)
    meters = Meters(counters=Counters(), trace=Trace(enabled=False))
    storage = open_storage([directory])
    offloader = Offloader(device, pool, storage, Drain.AT_ONCE, depth, meters)
    distinct = [b.to(kind) for b in aligned_buffers(2, block)]
    sources = [distinct[i % 2] for i in range(num_blocks)]
    target = torch.empty_like(distinct[0])
    with closing(offloader):
        yield lambda: one_round(offloader, sources, target)


def one_round(
    offloader: Offloader, sources: list[torch.Tensor], target: torch.Tensor
) -> tuple[float, float]:
    """Store everything to the disk, then load everything back; GB/s each way."""
    total = sum(s.numel() for s in sources)
    begin = time.monotonic()
    parcels = []
    for number, source in enumerate(sources):
        parcel = offloader.store(source, f"t{number}", lambda: True)
        if parcel is None:
            raise RuntimeError("a tensor was kept: the pool or the storage is full")
        parcels.append(parcel)
    offloader.wait_io()
    write = total / (time.monotonic() - begin) / 1e9
    begin = time.monotonic()
    ahead, loads = 0, []
    for number, parcel in enumerate(parcels):
        while ahead < len(parcels) and offloader.recall(parcels[ahead]):
            ahead += 1
        ahead = max(ahead, number + 1)
        load = offloader.load(parcel, target)
        load.wait(offloader.device)
        loads.append(load)
        if target.is_cuda:  # the buffer is free behind the copy: let it come back
            torch.cuda.current_stream().synchronize()
        offloader.discard(parcel)
    read = total / (time.monotonic() - begin) / 1e9
    if not torch.equal(target, sources[-1]):
        raise RuntimeError("bytes came back wrong")
    return write, read


OURS = {"storage": storage_rounds, "offloader": offloader_rounds}


def cell(
    what: str, directory: Path, size: tuple[int, int], rounds: int, total_mib: int
) -> dict[str, Any]:
    """Ours in turns with the raw loop: medians of the rounds, and of the ratios of
    neighbouring rounds: drift of the disk cancels."""
    (block_mib, depth), rates = size, defaultdict[str, list[float]](list)
    num_blocks = max(2 * depth, total_mib // block_mib)
    buffers = aligned_buffers(depth, block_mib * MIB)
    given = directory, num_blocks, buffers
    with raw_rounds(*given) as raw, OURS[what](*given) as ours:
        sides = {"raw": raw, "ours": ours}
        for turn in range(1 + rounds):
            for who in sorted(sides, reverse=turn % 2 == 0):
                both = sides[who]()
                if turn:  # the first one touches fresh extents
                    rates[f"{who}_write"].append(both[0])
                    rates[f"{who}_read"].append(both[1])
    found: dict[str, Any] = {"what": what, "block_mib": block_mib, "depth": depth}
    for key, values in rates.items():
        found[f"{key}_gb_per_s"] = round(statistics.median(values), 3)
    for way in ("write", "read"):
        pairs = zip(rates[f"ours_{way}"], rates[f"raw_{way}"], strict=True)
        found[f"{way}_ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    return found


def main(
    bench: Bench, *, directory: Path = Path("."), rounds: int = 7, total_mib: int = 512
) -> None:
    """Run the cells that are missing."""
    cells = bench.cells({"rounds": rounds, "total_mib": total_mib})
    with tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as place:
        for size, what in itertools.product(CELLS, OURS):
            name = f"{what}, {size[0]} MiB, depth {size[1]}"
            cells.run(name, cell, what, Path(place), size, rounds, total_mib)
