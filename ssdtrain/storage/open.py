"""The door of this floor: `open_storage`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdtrain.counters import Fallback
from ssdtrain.errors import ConfigError
from ssdtrain.storage.base import Storage
from ssdtrain.storage.directory import check_directory
from ssdtrain.storage.disk import disk_of
from ssdtrain.storage.posix import EXTENT_BYTES, PosixStorage
from ssdtrain.storage.speed import measure
from ssdtrain.storage.stripe import StripeStorage
from ssdtrain.storage.throttle import ThrottledStorage
from ssdtrain.storage.wear import Ledger, MeteredStorage


@dataclass(frozen=True, kw_only=True)
class Endurance:
    """What may be written to each disk, and where that is kept."""

    budget_bytes: int | None = None
    """A day and disk; None: no limit."""
    rated_bytes: int | None = None
    """Lifetime writes by the data sheet; None: only SMART can tell."""
    ledger: Ledger | None = None
    """None: the user's own (`wear.ledger_path`)."""


def open_storage(
    directories: Sequence[str | Path],
    *,
    gb_per_s: float | None = None,
    capacity_bytes: int | None = None,
    extent_bytes: int = EXTENT_BYTES,
    endurance: Endurance | None = None,
    on_fallback: Callable[[Fallback], None] = lambda _: None,
) -> Storage:
    """Check the directories and open a storage over them.

    Several directories become a stripe whose shares follow their measured speeds.

    Args:
        directories: one, or several on different SSDs.
        gb_per_s: limit write and read to this many 1e9 bytes a second each.
        capacity_bytes: cap for each directory; None: what the disks have.
        extent_bytes: least growth of a file.
        endurance: count what is written to each disk, under a budget; None: do not.
        on_fallback: told what is not done the way it was asked for.

    Raises:
        ConfigError: a directory is missing, read-only, unsafe, or named twice.
        OSError: a file cannot be created.
    """
    if not directories:
        raise ConfigError(
            "an SSD target needs a directory, got none; set directory='/path/on/nvme'."
        )
    paths = [check_directory(d).path for d in directories]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(
                f"directory names {str(path)!r} twice; name each SSD's directory once."
            )
    members: list[Storage] = []
    try:
        for path in paths:
            posix = PosixStorage(
                [path],
                extent_bytes=extent_bytes,
                capacity_bytes=capacity_bytes,
                on_fallback=on_fallback,
            )
            members.append(posix)
            if endurance is not None:
                members[-1] = metered(posix, path, endurance)
        storage = members[0] if len(members) == 1 else _stripe(members, on_fallback)
    except BaseException:
        for member in members:
            member.close()
        raise
    if gb_per_s is not None:
        storage = ThrottledStorage(
            storage, write_gb_per_s=gb_per_s, read_gb_per_s=gb_per_s
        )
    return storage


def metered(storage: Storage, place: Path, endurance: Endurance) -> MeteredStorage:
    """Count and limit what is written to the disk behind `place`."""
    return MeteredStorage(
        storage,
        disk_of(place),
        ledger=endurance.ledger,
        budget_bytes=endurance.budget_bytes,
        rated_bytes=endurance.rated_bytes,
    )


def _stripe(
    members: list[Storage], on_fallback: Callable[[Fallback], None]
) -> StripeStorage:
    # A disk that is full, or whose budget is spent, must not fail the opening: what
    # cannot be measured starts at the others' mean.
    speeds: list[float | None] = []
    for member in members:
        try:
            speeds.append(measure(member))
        except OSError:
            speeds.append(None)
    known = [speed for speed in speeds if speed is not None]
    mean = sum(known) / len(known) if known else 1.0
    filled = [mean if speed is None else speed for speed in speeds]
    return StripeStorage(members, speeds=filled, on_fallback=on_fallback)
