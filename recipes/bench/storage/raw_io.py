"""The yardstick: a plain O_DIRECT loop over one file, and the same loop over us."""

import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import torch

Call = Callable[[int, torch.Tensor], None]
Rates = dict[str, list[float]]
"""GB/s by who moved and which way."""


def aligned_buffers(num: int, num_bytes: int) -> list[torch.Tensor]:
    """Page-aligned random bytes (disks may compress or skip zeros)."""
    made = []
    for seed in range(num):
        buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        buffer.view(torch.int64).random_(generator=generator)
        made.append(buffer)
    return made


class RawFile:
    """`num_blocks` blocks of one preallocated O_DIRECT file: one call a block."""

    def __init__(self, directory: Path, num_blocks: int, block_bytes: int) -> None:
        path = directory / f"raw-{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        self._fd = os.open(path, flags, 0o600)
        path.unlink()
        os.posix_fallocate(self._fd, 0, num_blocks * block_bytes)
        self._block_bytes = block_bytes

    def write(self, block: int, buffer: torch.Tensor) -> None:
        """One pwrite."""
        moved = os.pwrite(self._fd, buffer.numpy().data, block * self._block_bytes)
        if moved != self._block_bytes:
            raise OSError(f"short write: {moved}")

    def read(self, block: int, buffer: torch.Tensor) -> None:
        """One preadv."""
        view = buffer.numpy().data
        if os.preadv(self._fd, [view], block * self._block_bytes) != self._block_bytes:
            raise OSError("short read")

    def close(self) -> None:
        """The file has no name: closing removes it."""
        os.close(self._fd)


def gb_per_s(call: Call, num_blocks: int, buffers: list[torch.Tensor]) -> float:
    """Rate of `call` over all blocks, one thread for each buffer."""
    ticket = count()
    start = threading.Barrier(len(buffers) + 1)

    def worker(buffer: torch.Tensor) -> None:
        start.wait()
        while (block := next(ticket)) < num_blocks:
            call(block, buffer)

    with ThreadPoolExecutor(len(buffers)) as pool:
        done = [pool.submit(worker, buffer) for buffer in buffers]
        start.wait()
        begin = time.monotonic()
        for future in done:
            future.result()
        seconds = time.monotonic() - begin
    return num_blocks * buffers[0].numel() / seconds / 1e9


def told(block_mib: int, depth: int, rates: Rates) -> dict[str, Any]:
    """Medians of the rounds, and of the ratios of neighbouring rounds: drift of the
    disk cancels."""
    found: dict[str, Any] = {"block_mib": block_mib, "depth": depth}
    for key, values in rates.items():
        found[f"{key}_gb_per_s"] = round(statistics.median(values), 3)
    for what in ("write", "read"):
        pairs = zip(rates[f"ours_{what}"], rates[f"raw_{what}"], strict=True)
        found[f"{what}_ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    return found


def scratch(directory: Path) -> Path:
    """A private directory below the user's."""
    return Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
