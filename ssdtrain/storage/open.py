"""The door of this floor: `open_storage`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ssdtrain.counters import Fallback
from ssdtrain.errors import ConfigError
from ssdtrain.storage.base import Storage
from ssdtrain.storage.directory import check_directory
from ssdtrain.storage.posix import EXTENT_BYTES, PosixStorage
from ssdtrain.storage.throttle import ThrottledStorage


def open_storage(
    directories: Sequence[str | Path],
    *,
    gb_per_s: float | None = None,
    capacity_bytes: int | None = None,
    extent_bytes: int = EXTENT_BYTES,
    on_fallback: Callable[[Fallback], None] = lambda _: None,
) -> Storage:
    """Check the directories and open a storage over them.

    Args:
        directories: one, or several on different SSDs.
        gb_per_s: limit write and read to this many 1e9 bytes a second each.
        capacity_bytes: cap over all files; None: what the disks have.
        extent_bytes: least growth of a file.
        on_fallback: told what is not done the way it was asked for.

    Raises:
        ConfigError: a directory is missing, read-only, unsafe, or named twice.
        OSError: a file cannot be created.
    """
    if not directories:
        raise ConfigError(
            "an SSD target needs a directory, got none; set directory='/path/on/nvme'."
        )
    infos = [check_directory(d) for d in directories]
    paths = [info.path for info in infos]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(
                f"directory names {str(path)!r} twice; name each SSD's directory once."
            )
    storage: Storage = PosixStorage(
        paths,
        extent_bytes=extent_bytes,
        capacity_bytes=capacity_bytes,
        on_fallback=on_fallback,
    )
    if gb_per_s is not None:
        storage = ThrottledStorage(
            storage, write_gb_per_s=gb_per_s, read_gb_per_s=gb_per_s
        )
    return storage
