"""A training run's state on disk, written so that a crash leaves a whole file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that a run needs to go on bitwise as if never stopped."""

    settings: dict[str, Any]
    """The configuration's values that decide the result."""
    repetition: int
    """Index of the repetition under way."""
    epoch: int
    """Epochs done in it."""
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    cpu_rng: Tensor
    cuda_rng: Tensor | None
    accuracies: list[float]
    """Test accuracies of the repetitions done."""


class CheckpointMismatchError(ValueError):
    """A checkpoint belongs to another configuration, or is damaged."""


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Around what uses the content of `path`: an error there is a
    CheckpointMismatchError that names the file."""
    try:
        yield
    except (torch.OutOfMemoryError, CheckpointMismatchError):
        raise
    except Exception as error:  # whatever the parsers of torch.load raise
        raise CheckpointMismatchError(
            f"expected a checkpoint of this configuration in {path}, got "
            f"{type(error).__name__}: {error}; set resume=never to start anew"
        ) from error


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Write next to `path` and rename over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    values = {name: getattr(checkpoint, name) for name in Checkpoint.__annotations__}
    with partial.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path, settings: dict[str, Any], device: torch.device) -> Checkpoint:
    """Read `path`; CheckpointMismatchError names the settings that differ."""
    with fitting(path):
        found = Checkpoint(**torch.load(path, map_location=device, weights_only=True))
        if not isinstance(found.settings, dict):
            raise TypeError(f"settings are a {type(found.settings).__name__}")
        _ = found.repetition + 0, found.epoch + 0, [a + 0.0 for a in found.accuracies]
    differ = sorted(
        k
        for k in settings.keys() | found.settings.keys()
        if settings.get(k) != found.settings.get(k)
    )
    if differ:
        pairs = ", ".join(
            f"{k}: {found.settings.get(k)!r} there, {settings.get(k)!r} here"
            for k in differ
        )
        raise CheckpointMismatchError(
            f"expected a checkpoint of this configuration in {path}, got another "
            f"({pairs}); set resume=never to start anew"
        )
    return found


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def set_random_state(checkpoint: Checkpoint, device: torch.device) -> None:
    torch.set_rng_state(checkpoint.cpu_rng.cpu())
    if checkpoint.cuda_rng is not None:
        torch.cuda.set_rng_state(checkpoint.cuda_rng.cpu(), device)
