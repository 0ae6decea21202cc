"""Storages under test and aligned buffers."""

import contextlib
import mmap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ssdtrain.storage import PosixStorage, Storage
from tests.ssdtrain.memory_storage import MemoryStorage

MIB = 1024 * 1024


@pytest.fixture
def aligned() -> Callable[..., torch.Tensor]:
    """`aligned(num_bytes, seed=None)`: page-aligned; random bytes if seeded."""

    def make(num_bytes: int, seed: int | None = None) -> torch.Tensor:
        buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            buffer.random_(0, 256, generator=generator)
        return buffer

    return make


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A private directory that passes the checks."""
    place = tmp_path / "ssd"
    place.mkdir(mode=0o700)
    return place


def open_memory(place: Path, **sizes: int) -> Storage:
    return MemoryStorage(**sizes)


def open_posix(place: Path, **sizes: int) -> Storage:
    return PosixStorage(made(place / "0"), **sizes)


def made(place: Path) -> Path:
    place.mkdir(mode=0o700)
    return place


@pytest.fixture(params=[open_memory, open_posix])
def opened(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., Storage]]:
    """Opens a storage of each kind, once: `opened(capacity_bytes=None)`."""
    with contextlib.ExitStack() as closing:

        def make(**sizes: int) -> Storage:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the test machine may use tmpfs
                store: Storage = request.param(tmp_path, extent_bytes=MIB, **sizes)
            closing.callback(store.close)
            return store

        yield make


@pytest.fixture
def storage(opened: Callable[..., Storage]) -> Storage:
    """Every kind of storage; each test of the contract runs on all of them."""
    return opened()
