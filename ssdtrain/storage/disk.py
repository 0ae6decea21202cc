"""The disk behind a directory: its name, and what its SMART log says about wear."""

import ctypes
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

SMART_LOG_BYTES = 512
SMART_LOG_PAGE = 0x02
UNIT_BYTES = 512_000
"""NVMe counts data units of a thousand blocks of 512 bytes (NVMe base spec, SMART)."""
NVME_IOCTL_ADMIN_CMD = 0xC0484E41
GET_LOG_PAGE = 0x02
ALL_NAMESPACES = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Smart:
    """What an NVMe controller says about itself."""

    written_bytes: int
    """By hosts, over its life."""
    used_fraction: float
    """Of its rated endurance, as the vendor estimates it; may exceed 1."""


@dataclass(frozen=True, kw_only=True)
class SmartReading:
    """A reading, or why there is none."""

    smart: Smart | None
    reason: str
    """Empty with a reading."""


def disk_of(directory: str | Path, sys: Path = Path("/sys")) -> str:
    """Name of the whole disk behind a directory, as in /sys/block.

    Partitions lead to their disk. A file system without one block device (network,
    btrfs over several, overlay) is named by its device number.
    """
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    place = sys / "dev" / "block" / number
    if not place.exists():
        return number
    real = place.resolve()
    return real.parent.name if (real / "partition").exists() else real.name


def read_smart(disk: str, dev: Path = Path("/dev")) -> SmartReading:
    """Ask an NVMe controller for its health log; needs the right to (root)."""
    if not disk.startswith("nvme"):
        return SmartReading(smart=None, reason=f"{disk} is not an NVMe disk")
    page = ctypes.create_string_buffer(SMART_LOG_BYTES)
    command = _AdminCommand(
        opcode=GET_LOG_PAGE,
        namespace=ALL_NAMESPACES,
        address=ctypes.addressof(page),
        data_bytes=SMART_LOG_BYTES,
        # Length in 32-bit words less one, above the number of the page.
        word10=(SMART_LOG_BYTES // 4 - 1) << 16 | SMART_LOG_PAGE,
    )
    try:
        fd = os.open(dev / disk, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return SmartReading(smart=None, reason=f"{dev / disk}: {error.strerror}")
    try:
        fcntl.ioctl(fd, NVME_IOCTL_ADMIN_CMD, command)
    except OSError as error:
        reason = f"{disk} refuses its SMART log: {error.strerror}"
        return SmartReading(smart=None, reason=reason)
    finally:
        os.close(fd)
    return SmartReading(smart=parse_smart(page.raw), reason="")


def parse_smart(page: bytes) -> Smart:
    """Read log page 02h: percentage used at byte 5, data units written at 48.

    Raises:
        ValueError: the page is too short.
    """
    if len(page) < SMART_LOG_BYTES:
        raise ValueError(
            f"a SMART log has {SMART_LOG_BYTES} bytes, got a page of {len(page)}"
        )
    units = int.from_bytes(page[48:64], "little")
    return Smart(written_bytes=units * UNIT_BYTES, used_fraction=page[5] / 100)


class _AdminCommand(ctypes.Structure):
    """struct nvme_admin_cmd of linux/nvme_ioctl.h, 72 bytes."""

    _fields_ = [
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("reserved", ctypes.c_uint16),
        ("namespace", ctypes.c_uint32),
        ("word2", ctypes.c_uint32),
        ("word3", ctypes.c_uint32),
        ("metadata", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("metadata_bytes", ctypes.c_uint32),
        ("data_bytes", ctypes.c_uint32),
        ("word10", ctypes.c_uint32),
        ("word11", ctypes.c_uint32),
        ("word12", ctypes.c_uint32),
        ("word13", ctypes.c_uint32),
        ("word14", ctypes.c_uint32),
        ("word15", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    ]
