"""The part of ray 2.60's `ray.train` that a script with ssdtrain meets."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ray.train.context import TrainContext


@dataclass
class ScalingConfig:
    num_workers: int = 1
    use_gpu: bool = False


@dataclass
class FailureConfig:
    max_failures: int = 0


@dataclass
class RunConfig:
    storage_path: str | None = None
    failure_config: FailureConfig | None = None


@dataclass
class Checkpoint:
    path: str

    @classmethod
    def from_directory(cls, path: str) -> "Checkpoint":
        return cls(path)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        yield self.path


@dataclass
class Result:
    metrics: dict[str, Any]
    checkpoint: Checkpoint | None


LATEST = Result({}, None)


def get_context() -> TrainContext:
    return TrainContext()


def get_checkpoint() -> Checkpoint | None:
    return LATEST.checkpoint


def report(metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
    LATEST.metrics = metrics
    if checkpoint is not None:  # the script deletes its own copy
        kept = tempfile.mkdtemp()
        shutil.copytree(checkpoint.path, kept, dirs_exist_ok=True)
        LATEST.checkpoint = Checkpoint(kept)
