"""The whole offloader against the raw loop: device, staging, disk, and back."""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from recipes.bench.storage.raw_io import (
    Rates,
    RawFile,
    aligned_buffers,
    gb_per_s,
    told,
)
from ssdtrain.counters import Counters, Trace
from ssdtrain.storage import open_storage
from ssdtrain.transfer.cuda import open_device
from ssdtrain.transfer.offloader import Drain, Meters, Offloader
from ssdtrain.transfer.pinned import PinnedPool
from ssdtrain.transfer.transfers import Transfer

MIB = 1024 * 1024


def store_all(offloader: Offloader, sources: list[torch.Tensor]) -> list[Transfer]:
    """Everything out, to the disk.

    Raises:
        RuntimeError: a tensor was kept.
    """
    parcels = []
    for number, source in enumerate(sources):
        parcel = offloader.store(source, f"t{number}", lambda: True)
        if parcel is None:
            raise RuntimeError("a tensor was kept: the pool or the storage is full")
        parcels.append(parcel)
    offloader.wait_io()
    return parcels


def one_round(
    offloader: Offloader, sources: list[torch.Tensor], target: torch.Tensor
) -> tuple[float, float]:
    """Store everything to the disk, then load everything back; GB/s each way."""
    total = sum(s.numel() for s in sources)
    begin = time.monotonic()
    parcels = store_all(offloader, sources)
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


def offloader_rates(
    directory: Path, block_mib: int, depth: int, num_rounds: int, total_mib: int
) -> dict[str, Any]:
    """Alternate rounds of the raw loop and of the offloader."""
    block = block_mib * MIB
    num_blocks = max(2 * depth, total_mib // block_mib)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = open_device(torch.device(kind))
    pool = PinnedPool(device, 3 * depth * block, depth * block)
    meters = Meters(counters=Counters(), trace=Trace(enabled=False))
    storage = open_storage([directory])
    offloader = Offloader(device, pool, storage, Drain.AT_ONCE, depth, meters)
    distinct = [b.to(kind) for b in aligned_buffers(2, block)]
    sources = [distinct[i % 2] for i in range(num_blocks)]
    target = torch.empty_like(distinct[0])
    raw = RawFile(directory, num_blocks, block)
    buffers = aligned_buffers(depth, block)
    rates: Rates = defaultdict(list)
    try:
        one_round(offloader, sources, target)
        gb_per_s(raw.write, num_blocks, buffers)
        for _ in range(num_rounds):
            for what, call in (("write", raw.write), ("read", raw.read)):
                rates[f"raw_{what}"].append(gb_per_s(call, num_blocks, buffers))
            both = one_round(offloader, sources, target)
            for what, rate in zip(("write", "read"), both, strict=True):
                rates[f"ours_{what}"].append(rate)
    finally:
        raw.close()
        offloader.close()
    return {"what": "offloader", "device": kind, **told(block_mib, depth, rates)}
