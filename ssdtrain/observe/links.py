"""Curves of the links: from a step's own copies, writes and reads, or from probes."""

from collections.abc import Iterable, Sequence

import torch

from ssdtrain.counters import Span
from ssdtrain.curves import COPY_SLOWDOWN, Curve, Links
from ssdtrain.rates import busy_rate, middle_rate, straight
from ssdtrain.storage.base import Storage
from ssdtrain.storage.measure import Drive, probe_drive
from ssdtrain.transfer.device import Copy, Device
from ssdtrain.transfer.pinned import PinnedPool

PROBE_BYTES = 16 * 1024 * 1024
NUM_PROBES = 3
NUM_DRIVE_PROBES = 5
"""Rounds of blocks: what is read is written first, then each alone, then both."""
MOST_PROBE_S = 0.5
"""A drive whose rates are known and so low that its probe would take longer is assumed
to share one bandwidth."""
LEAST_TRANSFERS = 4
"""Fewer writes or reads say too little about a drive."""


def fitted_links(
    copies: Iterable[Copy], drive: Drive | None, duplex_slowdown: float
) -> Links | None:
    """Fit curves to the copies of one step and add the drive's; None without copies.

    Args:
        duplex_slowdown: see `Links`.
    """
    both = list(copies)
    out, into = _rate(both, True), _rate(both, False)
    if out is None and into is None:
        return None
    return Links(
        d2h=straight(out or into or 0.0),
        h2d=straight(into or out or 0.0),
        ssd_write=None if drive is None else drive.write,
        ssd_read=None if drive is None else drive.read,
        copy_slowdown=COPY_SLOWDOWN,
        duplex_slowdown=duplex_slowdown,
        ssd_duplex_slowdown=0.0 if drive is None else drive.duplex_slowdown,
        ssd_direct=drive is not None and drive.direct,
    )


def probe(device: Device, pool: PinnedPool) -> list[Copy]:
    """Measure copies of a pinned buffer, for steps that moved too little."""
    num_bytes = min(PROBE_BYTES, pool.cap_bytes // 2)
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


def fitted_drive(
    storage: Storage | None, spans: Sequence[Span], num_threads: int
) -> Drive | None:
    """Fit curves to a step's writes and reads and measure their contention.

    Where the step made too few, blocks are written and read for it. None without a
    storage, or if the storage is full and the step made no transfers."""
    if storage is None:
        return None
    write, read = _busy(spans, "write"), _busy(spans, "read")
    if write is not None and read is not None:
        slower = min(write.bytes_per_second, read.bytes_per_second)
        if NUM_DRIVE_PROBES * num_threads * PROBE_BYTES > MOST_PROBE_S * slower:
            return Drive(write, read)
    try:
        probed = probe_drive(
            storage,
            num_threads=num_threads,
            record_bytes=PROBE_BYTES,
        )
    except OSError:
        return None if write is None or read is None else Drive(write, read)
    return Drive(write or probed.write, read or probed.read, probed.duplex_slowdown)


def _busy(spans: Sequence[Span], row: str) -> Curve | None:
    """Return the rate of one row of the trace; None with too few transfers."""
    own = [(s.start_ns, s.end_ns, s.num_bytes) for s in spans if s.row == row]
    rate = busy_rate(own) if len(own) >= LEAST_TRANSFERS else None
    return None if rate is None else straight(rate)


def _rate(copies: Sequence[Copy], outwards: bool) -> float | None:
    return middle_rate(
        (copy.num_bytes, copy.ms / 1e3) for copy in copies if copy.outwards is outwards
    )
