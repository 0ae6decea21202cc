"""The least peak behind storages of limited speed, and behind the real disk."""

import statistics
from typing import Any

import torch

from recipes.bench.offload.placement import Size
from recipes.bench.planner.facts import facts, summary
from recipes.bench.planner.lab import Lab, Record
from ssdtrain.plan.simulate import keep_all
from ssdtrain.plan.timeline import Timeline

DISKS = ("disk", "disk, staged")
"""The path that is measured fastest, and through pinned memory: a slow disk then holds
no device memory."""
SETTLE_S = 20.0
"""Half of a cell's limit."""
MEMORY_BYTES = 16 << 30
"""Of the storage behind the bandwidth cells."""
RATES = ("12", "6", "18", "2", "24")
"""GB/s, each way."""


def bandwidth(
    size: Size, device: torch.device, directory: str, name: str, record: Record
) -> dict[str, Any]:
    """The least peak at 1 % overhead behind a storage of this speed."""
    gb_per_s = None if name in DISKS else float(name)
    # What stands in for a limited SSD is host memory: nothing reaches it directly.
    path = {} if name == DISKS[0] else {"gpu_direct": "off"}
    lab = Lab(size, device, target="ssd", directory=directory, io_threads=16, **path)
    try:
        if gb_per_s is not None:
            lab.limit_storage(gb_per_s, MEMORY_BYTES)
        profile = lab.settle(SETTLE_S)
        record.profile(profile)
        own = lab.steps(8)
        report = lab.session.last_step
        forward_backward_ms = profile.compute_ms - profile.tail_ms
        write = profile.links.ssd_write
        rate = 0.0 if write is None else write.bytes_per_second / 1e9
        plan = summary(lab.session.plan)
        lab.hold()
        keep = lab.under(keep_all(Timeline(profile)), 6)
        return {
            "keep_ms": keep["step_ms"],
            "gb_per_s": gb_per_s,
            "measured_write_gb_per_s": rate,
            "step_ms": statistics.median(ms for ms, _ in own[2:]),
            "steps_ms": [ms for ms, _ in own],
            "peak_gb": max(peak for _, peak in own[2:]) / 1e9,
            "profile": facts(profile),
            "plan": plan,
            "offloaded_gb": report.bytes_offloaded / 1e9,
            "written_gb": report.bytes_written / 1e9,
            "half_step_gb": rate * forward_backward_ms / 2e3,
            "report": report.as_dict(),
        }
    finally:
        lab.close()
