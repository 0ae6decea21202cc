"""Checkpoints in files, which may be damaged, cut off, or another model's."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ssdtrain.errors import ConfigError, DamagedFileError

REMEDY = "resume from another one, or start anew without train.resume"


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a file that is whole, or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    torch.save(state, partial)
    partial.replace(path)


def read_checkpoint(
    path: Path, device: torch.device, keys: Sequence[str]
) -> dict[str, Any]:
    """Return what `torch.save` wrote: tensors and plain values under these keys. Raises
    ConfigError: there is no such file; DamagedFileError: it holds something else."""
    if not path.is_file():
        raise ConfigError(f"train.resume expects a checkpoint, got none at {path}")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # torch raises what its parsers do
        raise _damaged(path, error) from error
    if not isinstance(state, dict) or not set(keys) <= set(state):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state)
        raise DamagedFileError(
            f"{path}: a checkpoint has {', '.join(keys)}, got {found}; {REMEDY}."
        )
    return state


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Wrap `load_state_dict` calls with values of `path`. Raises DamagedFileError: the
    values are not of this model and optimizer."""
    try:
        yield
    except (torch.OutOfMemoryError, DamagedFileError):
        raise
    except Exception as error:  # torch raises what its parsers do
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> DamagedFileError:
    text = (str(error).splitlines() or [""])[0][:200]
    return DamagedFileError(
        f"{path}: expected a checkpoint of this model and optimizer, got "
        f"{type(error).__name__}: {text}; {REMEDY}."
    )
