"""Curves of the links: from a step's own copies, writes and reads, or from probes."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ssdtrain.cache.contention import Contention
from ssdtrain.counters import Span
from ssdtrain.curves import Curve
from ssdtrain.plan.profile import Links
from ssdtrain.storage.base import Slot, Storage
from ssdtrain.storage.measure import transfer_rate
from ssdtrain.transfer.device import Copy, Device
from ssdtrain.transfer.pinned import PinnedPool, page_aligned

COPY_STARTUP_S = 1e-5
PROBE_BYTES = 16 * 1024 * 1024
NUM_PROBES = 3
NUM_DRIVE_PROBES = 5
"""Rounds of blocks: what is read is written first, then each alone, then both."""
MOST_PROBE_S = 0.5
"""A drive whose rates are known and so low that its probe would take longer is assumed
to share one bandwidth."""
LEAST_TRANSFERS = 4
"""Fewer writes or reads say too little about a drive."""


class Drive(NamedTuple):
    """Curves of the storage."""

    write: Curve
    read: Curve
    duplex_slowdown: float = 1.0
    """See `Links`; unless it was measured, both directions share one bandwidth."""
    direct: bool = False
    """See `Links.ssd_direct`."""


def fitted_links(
    copies: Iterable[Copy], drive: Drive | None, contention: Contention
) -> Links | None:
    """Curves of the copies of one step, and of the drive; None without any copy."""
    both = list(copies)
    out = _rate([copy for copy in both if copy.outwards])
    into = _rate([copy for copy in both if not copy.outwards])
    if out is None and into is None:
        return None
    return Links(
        d2h=_straight(out or into or 0.0),
        h2d=_straight(into or out or 0.0),
        ssd_write=None if drive is None else drive.write,
        ssd_read=None if drive is None else drive.read,
        copy_slowdown=contention.copy_slowdown,
        copy_slowdown_error=contention.copy_slowdown_error,
        duplex_slowdown=contention.duplex_slowdown or 0.0,
        ssd_duplex_slowdown=0.0 if drive is None else drive.duplex_slowdown,
        ssd_direct=drive is not None and drive.direct,
    )


def probe(device: Device, pool: PinnedPool, num_bytes: int = PROBE_BYTES) -> list[Copy]:
    """Measure copies of a buffer of its own: for steps that moved too little."""
    buffer = pool.take(num_bytes, for_load=True)
    if buffer is None:
        return []
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
    host = buffer.memory[:num_bytes]
    copies: list[Copy] = []
    for turn in range(NUM_PROBES):
        device.watch_copies()
        last = device.copy_out(there, host, [device.now(), *buffer.busy])
        last = device.copy_in(host, there, [last])
        last.synchronize()
        found = device.watched_copies()
        copies += found if turn else []  # the first one touches the pages
    pool.give(buffer)
    return copies


def _straight(bytes_per_second: float) -> Curve:
    return Curve.straight(COPY_STARTUP_S, max(bytes_per_second, 1.0))


def _rate(copies: list[Copy]) -> float | None:
    """Bytes per second at which the middle byte was copied.

    A mean would count the copies beside the opposite direction, which cost
    `duplex_slowdown` once more in the simulation.
    """
    rates = sorted(
        (each.num_bytes / max(each.ms / 1e3 - COPY_STARTUP_S, 1e-9), each.num_bytes)
        for each in copies
        if each.num_bytes
    )
    left = sum(num_bytes for _, num_bytes in rates) / 2
    for rate, num_bytes in rates:
        left -= num_bytes
        if left <= 0:
            return rate
    return None


def fitted_drive(
    storage: Storage | None, spans: Sequence[Span], num_threads: int
) -> Drive | None:
    """Curves of the writes and reads of one step, and what they cost one another; of
    blocks written and read for the purpose where the step tells too little. None
    without a storage, or if that is full and the step told nothing."""
    if storage is None:
        return None
    write, read = _busy(spans, "write"), _busy(spans, "read")
    if write is not None and read is not None:
        slower = min(write.bytes_per_second, read.bytes_per_second)
        if NUM_DRIVE_PROBES * num_threads * PROBE_BYTES > MOST_PROBE_S * slower:
            return Drive(write, read)
    try:
        probed = probed_drive(storage, num_threads)
    except OSError:
        return None if write is None or read is None else Drive(write, read)
    return Drive(write or probed.write, read or probed.read, probed.duplex_slowdown)


def probed_drive(storage: Storage, num_threads: int) -> Drive:
    """Write blocks, read them, and do both at once.

    Raises:
        OSError: the storage is full, or fails.
    """
    slots: list[Slot] = []
    try:
        while len(slots) < 2 * num_threads:
            slots.append(storage.allocate(PROBE_BYTES))
        # Filled: the first touch of a page would be timed as a read of the drive.
        buffers = [page_aligned(PROBE_BYTES).fill_(1) for _ in slots]
        ways = [
            (storage.write, slots[:num_threads], buffers[:num_threads]),
            (storage.read, slots[num_threads:], buffers[num_threads:]),
        ]
        transfer_rate(storage.write, slots, buffers)  # first writes are slow
        alone = [1.0 / transfer_rate(*way) for way in ways]
        began = time.monotonic()
        with ThreadPoolExecutor(len(ways)) as pool:
            list(pool.map(lambda way: transfer_rate(*way), ways))
        both_s = time.monotonic() - began
    finally:
        for slot in slots:
            storage.free(slot)
    num_gb = num_threads * PROBE_BYTES / 1e9
    longer, shorter = max(alone) * num_gb, min(alone) * num_gb
    # Above 1 where mixed transfers are slower than one after the other.
    shared = max(0.0, (both_s - longer) / shorter)
    write, read = (_straight(1e9 / seconds) for seconds in alone)
    return Drive(write, read, shared)


def _busy(spans: Sequence[Span], row: str) -> Curve | None:
    """Bytes over the time in which at least one transfer of the row was running."""
    own = sorted((s.start_ns, s.end_ns, s.num_bytes) for s in spans if s.row == row)
    busy_ns, until = 0, 0
    for start, end, _ in own:
        busy_ns += max(0, end - max(start, until))
        until = max(until, end)
    total = sum(num_bytes for _, _, num_bytes in own)
    if busy_ns == 0 or len(own) < LEAST_TRANSFERS:
        return None
    return _straight(total / (busy_ns / 1e9))
