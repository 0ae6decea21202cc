"""Limits of this process: locked memory, open files, the cgroup's memory."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ssdtrain import numa
from ssdtrain.tools.machine.findings import LIMITS, Finding

CGROUP_ROOT = Path("/sys/fs/cgroup")
UNLIMITED_V1 = 1 << 60
"""cgroup v1 writes a number near 2**63 for "no limit"."""


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """Bytes unless named otherwise; None: unlimited."""

    locked_memory_bytes: int | None
    """`ulimit -l`."""
    file_size_bytes: int | None
    """`ulimit -f`."""
    open_files: int | None
    """`ulimit -n`."""
    cgroup_memory_bytes: int | None
    host_memory_bytes: int
    host_available_bytes: int
    cpus: int
    """CPUs this process may run on."""
    numa_nodes: tuple[int, ...] = ()
    """Their NUMA nodes; empty where nothing says."""


def inspect_limits(root: Path = CGROUP_ROOT) -> ProcessLimits:
    """Read the limits of this process."""
    memory = psutil.virtual_memory()
    return ProcessLimits(
        locked_memory_bytes=_soft(resource.RLIMIT_MEMLOCK),
        file_size_bytes=_soft(resource.RLIMIT_FSIZE),
        open_files=_soft(resource.RLIMIT_NOFILE),
        cgroup_memory_bytes=cgroup_memory(root, Path("/proc/self/cgroup")),
        host_memory_bytes=memory.total,
        host_available_bytes=memory.available,
        cpus=len(os.sched_getaffinity(0)),
        numa_nodes=numa.nodes_of_process(),
    )


def _soft(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def cgroup_memory(root: Path, membership: Path) -> int | None:
    """Return the tightest memory limit from this process's cgroup to the root:
    `memory.max` of version 2, `memory/memory.limit_in_bytes` of version 1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        level = base / path.lstrip("/")
        while True:
            limit = _limit(level / name)
            if limit is not None:
                found.append(limit)
            if level in (base, level.parent):
                break
            level = level.parent
    return min(found, default=None)


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if not text.isdigit() or int(text) >= UNLIMITED_V1:
        return None
    return int(text)


def judge_limits(limits: ProcessLimits) -> Iterator[Finding]:
    """Findings about the limits."""
    locked = limits.locked_memory_bytes
    if locked is not None and locked < 1 << 30:
        yield LIMITS.note(
            f"ulimit -l is {locked / 1e6:.1f} MB",
            "CUDA pins without it, io_uring and mlock do not: raise it with "
            "`ulimit -l unlimited` or LimitMEMLOCK.",
        )
    if limits.file_size_bytes is not None:
        yield LIMITS.warning(
            f"ulimit -f is {limits.file_size_bytes / 1e9:.1f} GB",
            "a write beyond it fails (EFBIG): `ulimit -f unlimited`.",
        )
    cgroup = limits.cgroup_memory_bytes
    if cgroup is not None and cgroup < limits.host_memory_bytes:
        yield LIMITS.warning(
            f"the cgroup allows {cgroup / 1e9:.0f} GB of host memory, of "
            f"{limits.host_memory_bytes / 1e9:.0f} GB",
            "pinned memory counts: set host_bytes well below it, or be killed.",
        )
    where = ""
    if limits.numa_nodes:
        where = f" of NUMA nodes {', '.join(map(str, limits.numa_nodes))}"
    yield LIMITS.good(
        f"{limits.cpus} CPUs{where}, {limits.host_available_bytes / 1e9:.0f} GB of "
        "host memory available",
        "host_bytes defaults to half of what is available.",
    )
