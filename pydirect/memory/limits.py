"""What limits host memory here, read before an allocation runs into it; its errors.

Three limits bite in practice: the memory controller of the control group (the process
is killed), the memory that is free (the machine swaps or kills), and RLIMIT_MEMLOCK
(locking fails). Only the first is certain: MemAvailable grows on machines whose memory
is plugged in on demand, and NVIDIA's driver pins pages without counting them against
RLIMIT_MEMLOCK. So the first refuses, the second warns, and the third is named when
pinning fails.
"""

import resource
import warnings
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60


class HostMemoryError(RuntimeError):
    """Host memory could not be allocated, pinned or mapped.

    The text names the bytes asked for, the limit that was met and what to set.
    """


class ManagedMemoryError(HostMemoryError):
    """More managed memory was asked for than the GPUs have free.

    `empty_table` takes pinned memory then.
    """


class HostMemoryWarning(UserWarning):
    """An allocation that is granted but close to a limit of this machine."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Limits of this process, in bytes; None where the machine states none."""

    available_bytes: int | None
    """MemAvailable of /proc/meminfo."""

    cgroup_free_bytes: int | None
    """Limit minus use of the tightest control group above this process; page cache
    that the kernel can drop counts as free."""

    memlock_bytes: int | None
    """Soft RLIMIT_MEMLOCK."""

    def describe(self) -> str:
        """One line for error messages."""
        return (
            f"MemAvailable {_gib(self.available_bytes)}, control group leaves "
            f"{_gib(self.cgroup_free_bytes)}, RLIMIT_MEMLOCK {_gib(self.memlock_bytes)}"
        )

    def check(self, num_bytes: int) -> None:
        """Refuse or warn before ``num_bytes`` of new host memory are allocated.

        Raises:
            HostMemoryError: the control group leaves less than ``num_bytes``.
        """
        if self.cgroup_free_bytes is not None and num_bytes > self.cgroup_free_bytes:
            raise HostMemoryError(
                f"expects {_gib(num_bytes)} of host memory, but the control group "
                f"leaves {_gib(self.cgroup_free_bytes)}: raise memory.max (or the "
                "container's memory limit), or use a smaller table"
            )
        if self.available_bytes is not None and num_bytes > self.available_bytes:
            warnings.warn(
                f"{_gib(num_bytes)} of host memory asked for, but MemAvailable is "
                f"{_gib(self.available_bytes)}: the machine may swap or kill the "
                "process",
                HostMemoryWarning,
                stacklevel=3,
            )


def read_limits() -> MemoryLimits:
    """Read the limits of this process now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MemoryLimits(
        available_bytes=_available_bytes(Path("/proc/meminfo")),
        cgroup_free_bytes=cgroup_free_bytes_of(
            Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
        ),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def _available_bytes(meminfo: Path) -> int | None:
    try:
        text = meminfo.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_free_bytes_of(membership: Path, root: Path) -> int | None:
    """The tightest limit of all groups from this process's up to the root (v2), or
    of its v1 memory group."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    free: list[int] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            for group in _upwards(root, name):
                free += _group_free(group, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            for group in _upwards(root / "memory", name):
                free += _group_free(
                    group, "memory.limit_in_bytes", "memory.usage_in_bytes"
                )
    return min(free, default=None)


def _upwards(root: Path, name: str) -> list[Path]:
    group = root / name.lstrip("/")
    inside = [group, *group.parents]
    return inside[: inside.index(root) + 1] if root in inside else [root]


def _group_free(group: Path, limit_file: str, usage_file: str) -> list[int]:
    try:
        limit = (group / limit_file).read_text().strip()
        usage = int((group / usage_file).read_text())
        stat = (group / "memory.stat").read_text()
    except OSError:
        return []
    if limit == "max" or int(limit) >= _UNLIMITED_BYTES:
        return []
    cache = sum(
        int(line.split()[1])
        for line in stat.splitlines()
        if line.split()[0] in ("inactive_file", "active_file")
    )
    return [max(0, int(limit) - usage + cache)]


def _gib(num_bytes: int | None) -> str:
    return "unlimited" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"
