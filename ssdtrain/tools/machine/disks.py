"""Facts about a directory that is to hold activations."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ssdtrain.tools.machine.findings import STORAGE, Finding
from ssdtrain.tools.machine.ssd import accepts_direct

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """One directory; None where this machine does not say."""

    directory: str
    file_system: str
    """`ext4`, `xfs`, `tmpfs`, ..."""
    mount_point: str
    device: str
    free_bytes: int
    direct: bool
    """O_DIRECT works."""
    nameless: bool
    """O_TMPFILE works."""
    rotational: bool | None
    block_device: str | None
    """Kernel name of the block device (`nvme0n1`)."""


def inspect_disk(directory: str) -> Disk:
    """Facts about the file system after `directory`. Raises OSError: the directory is
    missing or takes no file."""
    real = os.path.realpath(directory)
    device, mount_point, kind = mount_of(real)
    usage = os.statvfs(real)
    block, rotational = _block_device(os.stat(real).st_dev)
    return Disk(
        directory=directory,
        file_system=kind,
        mount_point=mount_point,
        device=device,
        free_bytes=usage.f_bavail * usage.f_frsize,
        direct=accepts_direct(real),
        nameless=_accepts_nameless(real),
        rotational=rotational,
        block_device=block,
    )


def mount_of(real: str) -> tuple[str, str, str]:
    """(device, mount point, type) of the longest mount point above `real`."""
    best = ("unknown", "", "unknown")
    for device, point, kind, *_ in psutil.disk_partitions(all=True):
        if Path(real).is_relative_to(point) and len(point) >= len(best[1]):
            best = (device, point, kind)
    return best


def _accepts_nameless(real: str) -> bool:
    try:
        descriptor = os.open(real, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    os.close(descriptor)
    return True


def _block_device(number: int) -> tuple[str | None, bool | None]:
    """Kernel name and rotational flag of a device number (a partition's disk)."""
    path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        real = path.resolve(strict=True)
        disk = real.parent if (real / "partition").exists() else real
        return disk.name, (disk / "queue/rotational").read_text().strip() == "1"
    except OSError:
        return None, None


def judge_disk(disk: Disk) -> Iterator[Finding]:
    """Findings about one directory."""
    label = f"{disk.directory} ({disk.file_system} on {disk.device})"
    if disk.file_system in MEMORY_FILE_SYSTEMS:
        yield STORAGE.warning(
            f"{label} is host memory, not an SSD",
            "give a directory on an NVMe drive, or use target='host'.",
        )
    elif disk.file_system in NETWORK_FILE_SYSTEMS:
        yield STORAGE.warning(
            f"{label} is a network file system",
            "give a directory on a local NVMe drive.",
        )
    elif disk.file_system == "overlay":
        yield STORAGE.warning(
            f"{label} is a container's overlay",
            "mount a volume on the NVMe drive into the container and give that.",
        )
    if disk.rotational and (disk.block_device or "").startswith(("sd", "md", "dm")):
        yield STORAGE.warning(
            f"{label} says that it rotates",
            "believe the measured bandwidth; activations need GB/s, so use NVMe.",
        )
    if not disk.direct:
        yield STORAGE.warning(
            f"{label} refuses O_DIRECT",
            "writes go through the page cache and take host memory; use ext4 or xfs.",
        )
    if not disk.nameless:
        yield STORAGE.note(
            f"{label} refuses O_TMPFILE",
            "files are unlinked right after creation instead; nothing to do.",
        )
    if disk.free_bytes < 64 << 30:
        yield STORAGE.note(
            f"{label} has {disk.free_bytes / 1e9:.0f} GB free",
            "a step's activations must fit: see `ssdtrain project`.",
        )
    if disk.direct and disk.nameless:
        yield STORAGE.good(f"{label}: O_DIRECT and O_TMPFILE work", "ready.")
