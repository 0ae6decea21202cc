"""A rank's storage: its own directories, its wear, and the path from its GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ssdtrain.counters import Fallback
from ssdtrain.storage import open as opening
from ssdtrain.storage.base import Storage
from ssdtrain.storage.choice import STAGED, choose_path
from ssdtrain.storage.directory import check_directory
from ssdtrain.storage.disk import disk_of
from ssdtrain.storage.forwarding import ForwardingStorage
from ssdtrain.storage.gds import GdsStorage
from ssdtrain.storage.posix import PosixStorage
from ssdtrain.storage.rank import Rank, directories_of
from ssdtrain.storage.stripe import StripeStorage
from ssdtrain.storage.wear import MeteredStorage, WearReport

SECONDS_A_DAY = 86_400


class Selected(NamedTuple):
    """What a rank stores in."""

    storage: Storage | None
    """None: this rank has no SSD and works in host memory."""
    takes_device: bool
    """Whether `write` and `read` take CUDA buffers."""
    why: str
    """The path and the reason, one line for the report."""


def open_for_rank(
    directories: Sequence[str | Path],
    rank: Rank,
    *,
    device: torch.device | None = None,
    gb_per_s: float | None = None,
    endurance: opening.Endurance | None = None,
    on_fallback: Callable[[Fallback], None] = lambda _: None,
) -> Selected:
    """Open this rank's share of the directories, on the fastest path.

    Args:
        directories: of all ranks; see `rank.directories_of`.
        rank: this process.
        device: a CUDA device to look for a direct path from; None: do not look.
        gb_per_s: limit, see `open_storage`; a limited storage is always staged.
        endurance: count and limit what is written; None: do not.
        on_fallback: told what is not done the way it was asked for.

    Raises:
        ConfigError: a directory is missing (without placeholder), read-only or unsafe.
        OSError: a file cannot be created.
    """
    own = directories_of(directories, rank)
    if own.missing and not own.paths:
        on_fallback(Fallback.NO_SSD_ON_RANK)
        places = ", ".join(map(str, own.missing))
        return Selected(None, False, f"host memory: {places} does not exist")
    if device is None or len(own.paths) != 1 or gb_per_s is not None:
        storage = opening.open_storage(
            own.paths, gb_per_s=gb_per_s, endurance=endurance, on_fallback=on_fallback
        )
        return Selected(storage, False, f"{STAGED}: {storage.describe()}")
    place = check_directory(own.paths[0]).path
    choice = choose_path(PosixStorage([place], on_fallback=on_fallback), device)
    direct = isinstance(choice.storage, GdsStorage)
    if choice.unusable:
        on_fallback(Fallback.NO_GDS)
    storage = choice.storage
    if endurance is not None:
        storage = opening.metered(storage, place, endurance)
    return Selected(storage, direct, choice.explain())


def budget_bytes_per_s(
    directories: Sequence[str | Path], rank: Rank, budget_bytes: int
) -> float:
    """What a rank may write on average for its disks to stay within their budgets.

    Ranks of this machine that share a disk share its budget. 0.0 without a disk.

    Args:
        directories: of all ranks; see `rank.directories_of`.
        rank: this process.
        budget_bytes: a day and disk.
    """
    first = rank.rank - rank.local_rank
    sharing: dict[str, int] = {}
    own: set[str] = set()
    for local_rank in range(rank.local_world_size):
        one = Rank(first + local_rank, local_rank, rank.local_world_size)
        paths = directories_of(directories, one).paths
        # A place that another rank lacks is that rank's to report.
        disks = {disk_of(path) for path in paths if path.exists()}
        for disk in disks:
            sharing[disk] = sharing.get(disk, 0) + 1
        if local_rank == rank.local_rank:
            own = disks
    return sum(budget_bytes / sharing[disk] for disk in own) / SECONDS_A_DAY


def wear_of(storage: Storage | None) -> list[WearReport]:
    """Reports of all metered disks below a storage."""
    if isinstance(storage, MeteredStorage):
        return [storage.report()]
    if isinstance(storage, ForwardingStorage):
        return wear_of(storage.inner)
    if isinstance(storage, StripeStorage):
        return [report for member in storage.members for report in wear_of(member)]
    return []
