"""Storages under test and aligned buffers."""

import mmap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ssdtrain.storage import MemoryStorage, PosixStorage, Storage

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


@pytest.fixture(params=["memory", "posix", "posix-2"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """Every kind of storage; each test of the contract runs on all of them."""
    if request.param == "memory":
        store: Storage = MemoryStorage(extent_bytes=MIB)
    else:
        places = [tmp_path / str(i) for i in range(2 if "2" in request.param else 1)]
        for place in places:
            place.mkdir(mode=0o700)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the test machine may use tmpfs
            store = PosixStorage(places, extent_bytes=MIB)
    yield store
    store.close()
