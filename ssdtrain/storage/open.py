"""The door of this floor: which directories are a rank's, and a storage over them.

Wu gives every GPU its own array (5.4). Ranks of one machine that share a disk
halve each other's bandwidth and wait for each other in every collective; so several
directories are dealt out, and a rank whose SSD is missing works in host memory
(5.4.4) while the others keep theirs.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ssdtrain.config import GpuDirect, OffloadConfig
from ssdtrain.counters import Fallback
from ssdtrain.errors import ConfigError
from ssdtrain.storage.base import ForwardingStorage, Storage
from ssdtrain.storage.directory import check_directory
from ssdtrain.storage.measure import STAGED, PathChoice, choose_path
from ssdtrain.storage.posix import PosixStorage
from ssdtrain.storage.stripe import StripeStorage
from ssdtrain.storage.wear import Endurance, MeteredStorage, WearReport, disk_of

PLACEHOLDERS = ("{local_rank}", "{rank}")
SECONDS_A_DAY = 86_400


class RankId(NamedTuple):
    """A process among those of its job."""

    rank: int = 0
    local_rank: int = 0
    """Among the processes of this machine."""
    local_world_size: int = 1


class RankDirectories(NamedTuple):
    """What a rank stores in."""

    paths: tuple[Path, ...]
    """Its own; empty: host memory only."""
    missing: tuple[Path, ...]
    """Places named for this rank that do not exist."""


def rank_of(environment: Mapping[str, str] = os.environ) -> RankId:
    """As torchrun, the DeepSpeed launcher and most others announce it."""
    rank = int(environment.get("RANK", 0))
    local_rank = int(environment.get("LOCAL_RANK", rank))
    # torchrun's name, then DeepSpeed's; a job on one machine needs neither.
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
    size = next((int(environment[n]) for n in names if n in environment), 1)
    return RankId(rank, local_rank, max(size, local_rank + 1))


def directories_of(directories: Sequence[str | Path], rank: RankId) -> RankDirectories:
    """Deal the directories out.

    A name with `{local_rank}` or `{rank}` is this rank's own, and may be missing on
    some ranks. Names without are shared out: every `local_world_size`-th if there are
    enough for all, else one for several ranks.

    Raises:
        ConfigError: a name has another placeholder, or the ranks are numbered wrong.
    """
    if not 0 <= rank.local_rank < rank.local_world_size:
        raise ConfigError(
            f"LOCAL_RANK expects 0 to {rank.local_world_size - 1} (LOCAL_WORLD_SIZE "
            f"is {rank.local_world_size}), got {rank.local_rank}"
        )
    names = [str(d) for d in directories]
    own = [name for name in names if names_a_rank(name)]
    shared = [name for name in names if name not in own]
    paths = [Path(fill(name, rank)) for name in own]
    missing = tuple(path for path in paths if not path.exists())
    share = shared[rank.local_rank :: rank.local_world_size]
    if shared and not share:
        share = [shared[rank.local_rank % len(shared)]]
    found = [path for path in paths if path not in missing]
    return RankDirectories((*found, *map(Path, share)), missing)


def names_a_rank(name: str) -> bool:
    """Return whether a directory's name has a placeholder."""
    return any(placeholder in name for placeholder in PLACEHOLDERS)


def fill(name: str, rank: RankId) -> str:
    """Return a directory's name with its placeholders replaced.

    Raises:
        ConfigError: another placeholder.
    """
    try:
        return name.format(local_rank=rank.local_rank, rank=rank.rank)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"directory={name!r} has a placeholder that is not known; set "
            f"{' or '.join(PLACEHOLDERS)}"
        ) from error


def open_storage(
    directories: Sequence[str | Path],
    *,
    endurance: Endurance | None = None,
    on_fallback: Callable[[Fallback], None] = lambda _: None,
) -> Storage:
    """Check the directories and open a storage over them, a stripe if they are several.

    Args:
        directories: one, or several on different SSDs.
        endurance: count what is written to each disk, under a budget; None: do not.
        on_fallback: told what is not done the way it was asked for.

    Raises:
        ConfigError: a directory is missing, read-only, unsafe, or named twice.
        OSError: a file cannot be created.
    """
    return _open(directories, None, endurance, on_fallback)[0]


def _open(
    directories: Sequence[str | Path],
    device: torch.device | None,
    endurance: Endurance | None,
    on_fallback: Callable[[Fallback], None],
) -> tuple[Storage, PathChoice]:
    """Open a storage over all directories; from a CUDA device, on the fastest path."""
    paths = _checked(directories)
    with ExitStack() as undo:
        posix: list[PosixStorage] = []
        for path in paths:
            posix.append(PosixStorage(path, on_fallback=on_fallback))
            undo.callback(posix[-1].close)
        choice = PathChoice(tuple(posix), False, STAGED)
        if device is not None:
            choice = choose_path(posix, device)
        members = list(choice.members)
        if endurance is not None:
            for at, path in enumerate(paths):
                members[at] = MeteredStorage(members[at], disk_of(path), endurance)
        undo.pop_all()
    if len(members) == 1:
        return members[0], choice
    return StripeStorage(members, on_fallback=on_fallback), choice


def _checked(directories: Sequence[str | Path]) -> list[Path]:
    if not directories:
        raise ConfigError(
            "an SSD target needs a directory, got none; set directory='/path/on/nvme'."
        )
    paths = [check_directory(d) for d in directories]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(
                f"directory names {str(path)!r} twice; name each SSD's directory once."
            )
    return paths


class Opened(NamedTuple):
    """What lies after a rank's host memory."""

    storage: Storage | None
    """None: this rank works in host memory alone."""
    takes_device: bool
    """Whether `write` and `read` take CUDA buffers."""
    why: str
    """The path and the reason, one line for the report."""


class Opener(Protocol):
    """Opens what lies after host memory: `TargetRow.opener` in config.py."""

    def __call__(
        self,
        settings: OffloadConfig,
        device: torch.device,
        on_fallback: Callable[[Fallback], None],
    ) -> Opened:
        """Open it for this rank, for tensors of a device. on_fallback is told what is
        not done the way it was asked for.

        Raises:
            ConfigError: it cannot be had as the settings ask for it.
        """


def open_nothing(
    settings: OffloadConfig,
    device: torch.device,
    on_fallback: Callable[[Fallback], None],
) -> Opened:
    """Bytes stay in host memory; an `Opener`."""
    return Opened(None, False, "host memory")


def open_disks(
    settings: OffloadConfig,
    device: torch.device,
    on_fallback: Callable[[Fallback], None],
) -> Opened:
    """Files in `directory`, if there is one; an `Opener`."""
    if not settings.directories:
        return open_nothing(settings, device, on_fallback)
    look = settings.gpu_direct is GpuDirect.AUTO and device.type == "cuda"
    endurance = Endurance(
        budget_bytes=settings.write_budget, rated_bytes=settings.ssd_rated_bytes
    )
    return open_for_rank(
        settings.directories,
        rank_of(),
        device=device if look else None,
        endurance=endurance,
        on_fallback=on_fallback,
    )


def open_for_rank(
    directories: Sequence[str | Path],
    rank: RankId,
    *,
    device: torch.device | None = None,
    endurance: Endurance | None = None,
    on_fallback: Callable[[Fallback], None] = lambda _: None,
) -> Opened:
    """Open this rank's share of the directories, on the fastest path.

    Args:
        directories: of all ranks; see `directories_of`.
        rank: this process.
        device: a CUDA device to look for a direct path from; None: do not look.
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
        return Opened(None, False, f"host memory: {places} does not exist")
    if device is None:
        storage = open_storage(own.paths, endurance=endurance, on_fallback=on_fallback)
        return Opened(storage, False, f"{STAGED}: {storage.describe()}")
    storage, choice = _open(own.paths, device, endurance, on_fallback)
    if choice.is_missed:
        on_fallback(Fallback.NO_GDS)
    num = len(own.paths)
    over = f"; over {num} directories" if num > 1 else ""
    return Opened(storage, choice.is_direct, choice.why + over)


def budget_bytes_per_s(
    directories: Sequence[str | Path], rank: RankId, budget_bytes: int
) -> float:
    """Return what a rank may write on average for its disks to stay within their
    budgets.

    Ranks of this machine that share a disk share its budget. 0.0 without a disk.

    Args:
        directories: of all ranks; see `directories_of`.
        rank: this process.
        budget_bytes: a day and disk.
    """
    first = rank.rank - rank.local_rank
    sharing: dict[str, int] = {}
    own: set[str] = set()
    for local_rank in range(rank.local_world_size):
        one = RankId(first + local_rank, local_rank, rank.local_world_size)
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
        return [each for m in storage.members for each in wear_of(m.storage)]
    return []
