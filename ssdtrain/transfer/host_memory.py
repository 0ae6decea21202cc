"""How much host memory may be pinned."""

from pathlib import Path

import psutil

from ssdtrain.config import Target
from ssdtrain.errors import ConfigError

GIB = 1024**3
CGROUP = Path("/sys/fs/cgroup")
# A staging pool needs only what is in flight.
STAGING_BYTES = 4 * GIB


def available_bytes() -> int:
    """Host memory that this process could still take: the machine's or its cgroup's."""
    free = int(psutil.virtual_memory().available)
    limit = _read(CGROUP / "memory.max")
    used = _read(CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used)
    return free


def total_bytes() -> int:
    """Host memory of the machine or of its cgroup, whichever is less."""
    limit = _read(CGROUP / "memory.max")
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def host_cap_bytes(asked_bytes: int | None, target: Target, num_ranks: int = 1) -> int:
    """The pinned pool's cap of one rank.

    num_ranks: ranks of this machine, which share what is available; pools grow on
    demand, so each of them still sees the others' share as free.

    Raises:
        ConfigError: more was asked for than the machine or its cgroup has.
    """
    if asked_bytes is not None:
        if asked_bytes > total_bytes():
            raise ConfigError(
                f"host_bytes={asked_bytes} is more than the {total_bytes()} bytes of "
                "memory this machine (or its cgroup) has; set host_bytes lower."
            )
        return asked_bytes
    half = max(available_bytes() // (2 * num_ranks), 1)
    return min(half, STAGING_BYTES) if target.behind.is_staged else half


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
