"""Hundreds of gigabytes through the SSD target: does anything grow or slow down?

    python -m recipes.bench storage.soak --directory /mnt/nvme0 --gb 200 \
        --budget-s 600

Steps of records of mixed sizes go device > staging > disk and back, compared on the
way. Written down for every tenth of the way: p50 and p99 latency of a write and a
read of 16 MiB, bytes of file, staging, process memory, descriptors and threads.
"""

import os
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from recipes.bench.harness.cli import Bench
from recipes.bench.storage.offloader_io import store_all
from recipes.bench.storage.raw_io import scratch
from ssdtrain.counters import Counters, Trace
from ssdtrain.storage import Slot, Storage, open_storage
from ssdtrain.storage.base import ForwardingStorage
from ssdtrain.transfer.cuda import open_device
from ssdtrain.transfer.offloader import Drain, Meters, Offloader
from ssdtrain.transfer.pinned import PinnedPool

MIB = 1024 * 1024
SIZES_MIB = (2, 5, 16, 16, 16, 24, 48)
TIMED_BYTES = 16 * MIB
NUM_RECORDS = 48


class TimedStorage(ForwardingStorage):
    """Latencies in ms of the transfers of one size."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.write_ms: list[float] = []
        self.read_ms: list[float] = []

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Forward, with a watch."""
        begin = time.perf_counter()
        super().write(slot, buffer)
        if buffer.numel() == TIMED_BYTES:
            self.write_ms.append(1e3 * (time.perf_counter() - begin))

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Forward, with a watch."""
        begin = time.perf_counter()
        super().read(slot, buffer)
        if buffer.numel() == TIMED_BYTES:
            self.read_ms.append(1e3 * (time.perf_counter() - begin))


def quantiles(values: list[float], name: str) -> dict[str, float]:
    """p50 and p99, and forget the values."""
    cuts = statistics.quantiles(values, n=100)
    values.clear()
    return {f"{name}_p50_ms": round(cuts[49], 2), f"{name}_p99_ms": round(cuts[98], 2)}


def step(offloader: Offloader, sources: list[torch.Tensor]) -> None:
    """Everything out, then back in reverse, as forward and backward do."""
    parcels = store_all(offloader, sources)
    ahead = len(parcels)
    for number in reversed(range(len(parcels))):
        ahead = min(ahead, number + 1)
        while ahead > 0 and offloader.recall(parcels[ahead - 1]):
            ahead -= 1
        target = torch.empty_like(sources[number])
        offloader.load(parcels[number], target).wait(offloader.device)
        if not torch.equal(target, sources[number]):
            raise RuntimeError(f"record {number} came back wrong")
        offloader.discard(parcels[number])


def level(offloader: Offloader, storage: TimedStorage) -> dict[str, Any]:
    """What must not grow, and the latencies since the last call."""
    process, stats = psutil.Process(), storage.stats()
    return {
        "written_gb": round(stats.written_bytes / 1e9, 2),
        "read_gb": round(stats.read_bytes / 1e9, 2),
        "file_bytes": stats.allocated_bytes,
        "used_bytes": stats.used_bytes,
        "staging_bytes": offloader.pool.total_bytes,
        "resident_mib": round(process.memory_info().rss / MIB),
        "descriptors": process.num_fds(),
        "threads": threading.active_count(),
        **quantiles(storage.write_ms, "write"),
        **quantiles(storage.read_ms, "read"),
    }


def main(
    bench: Bench, *, directory: Path = Path("."), gb: float = 200, cells: int = 10
) -> None:
    """Steps until the bytes are written or the budget is spent."""
    record = bench.cells(anew=True)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    place = scratch(directory)
    device = open_device(torch.device(kind))
    storage = TimedStorage(open_storage([place]))
    meters = Meters(counters=Counters(), trace=Trace(enabled=False))
    pool = PinnedPool(device, 512 * MIB, 128 * MIB)
    offloader = Offloader(device, pool, storage, Drain.AT_ONCE, 4, meters)
    draw = random.Random(0)
    content = torch.randint(0, 256, (max(SIZES_MIB) * MIB,), dtype=torch.uint8).to(kind)
    before = _disk_write_bytes()
    for cell in range(cells):
        goal = gb * 1e9 * (cell + 1) / cells
        while storage.stats().written_bytes < goal and record.left_s() > 0:
            sizes = [draw.choice(SIZES_MIB) * MIB for _ in range(NUM_RECORDS)]
            step(offloader, [content[:size] for size in sizes])
        record.add(what="soak", device=kind, **level(offloader, storage))
        if record.left_s() <= 0:
            break
    offloader.close()
    record.fact("kernel_write_gb", round((_disk_write_bytes() - before) / 1e9, 2))
    record.fact("left_behind", [p.name for p in place.iterdir()])
    place.rmdir()


def _disk_write_bytes() -> int:
    text = Path(f"/proc/{os.getpid()}/io").read_text()
    return int(text.split("write_bytes:")[1].split()[0])
