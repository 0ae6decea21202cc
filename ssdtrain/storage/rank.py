"""Which directories are a rank's own: one SSD, or one share of the SSDs, a rank.

Wu gives every GPU its own array (5.4). Ranks of one machine that share a disk
halve each other's bandwidth and wait for each other in every collective; so several
directories are dealt out, and a rank whose SSD is missing works in host memory
(5.4.4) while the others keep theirs.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ssdtrain.errors import ConfigError

PLACEHOLDERS = ("{local_rank}", "{rank}")


class Rank(NamedTuple):
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


def rank_of(environment: Mapping[str, str] = os.environ) -> Rank:
    """As torchrun, the DeepSpeed launcher and most others announce it."""
    rank = int(environment.get("RANK", 0))
    local_rank = int(environment.get("LOCAL_RANK", rank))
    # torchrun's name, then DeepSpeed's; a job on one machine needs neither.
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
    size = next((int(environment[n]) for n in names if n in environment), 1)
    return Rank(rank, local_rank, max(size, local_rank + 1))


def directories_of(directories: Sequence[str | Path], rank: Rank) -> RankDirectories:
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
    """Whether a directory's name has a placeholder."""
    return any(placeholder in name for placeholder in PLACEHOLDERS)


def fill(name: str, rank: Rank) -> str:
    """A directory's name with its placeholders replaced.

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
