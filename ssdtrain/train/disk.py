"""What the operating system says was written, to confirm what ssdtrain says."""

import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ssdtrain.storage.directory import file_system_of

_SECTOR_BYTES = 512
_SECTORS_WRITTEN = 6  # field of /sys/dev/block/*/stat, counted from 0


class Written(NamedTuple):
    """Bytes written so far, by two counters of the kernel; None where unreadable."""

    process_bytes: int | None
    """`write_bytes` of /proc/self/io: this process, all its threads."""
    device_bytes: int | None
    """Sectors written to the block device after the directory, by anybody."""

    def since(self, earlier: "Written") -> "Written":
        """Return the difference, counter by counter."""
        return self._with(operator.sub, earlier)

    def plus(self, later: "Written") -> "Written":
        """Return the sum, counter by counter."""
        return self._with(operator.add, later)

    def _with(self, of: Callable[[int, int], int], other: "Written") -> "Written":
        return Written(
            *(
                None if one is None or more is None else of(one, more)
                for one, more in zip(self, other, strict=True)
            )
        )

    def confirms(self, num_bytes: int) -> bool:
        """Return whether a counter saw at least `num_bytes`."""
        seen = [count for count in self if count is not None]
        return any(count >= num_bytes for count in seen)


def written(directories: tuple[str, ...]) -> Written:
    """Read both counters; `directories` name the devices."""
    return Written(_process_bytes(), _device_bytes(directories))


def file_systems(directories: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types of the file systems after directories that are there."""
    found = []
    for name in directories:
        if not os.path.isdir(name):
            continue
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found.append(file_system_of(fd))
        finally:
            os.close(fd)
    return tuple(found)


def _process_bytes() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(": ") for line in lines)
    return int(values["write_bytes"])


def _device_bytes(directories: tuple[str, ...]) -> int | None:
    devices = {os.stat(name).st_dev for name in directories if os.path.isdir(name)}
    total = 0
    for device in devices:
        number = f"{os.major(device)}:{os.minor(device)}"
        try:
            fields = Path(f"/sys/dev/block/{number}/stat").read_text().split()
        except OSError:
            return None
        total += int(fields[_SECTORS_WRITTEN]) * _SECTOR_BYTES
    return total if devices else None
