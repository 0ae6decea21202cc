"""The segment that a graph begins with: [Note: one segment]."""

from typing import Any

import pytest
import torch

from ssdtrain.transfer import allocator as arena
from ssdtrain.transfer.allocator import LEAST_BYTES, SPARE_BYTES, begin_with

CUDA = torch.device("cuda", 0)


class Allocator:
    """Of some settings."""

    def __init__(self, settings: str | None = None, backend: str = "native") -> None:
        self._settings, self._backend = settings, backend

    def backend(self) -> str:
        return self._backend

    def settings(self) -> str | None:
        return self._settings

    def set(self, settings: str) -> None:
        raise AssertionError("nobody asked for it")

    def grows(self) -> bool:
        return False


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the allocator of a device with 8 GiB left was told."""
    found: list[tuple[str, int]] = []

    def take(num_bytes: int, index: int, stream: Any) -> int:
        assert index == CUDA.index
        found.append(("take", num_bytes))
        return 4096

    own = torch.cuda
    monkeypatch.setattr(own, "mem_get_info", lambda device: (8 << 30, 80 << 30))
    monkeypatch.setattr(own, "current_stream", lambda device: "the captured one")
    monkeypatch.setattr(own, "caching_allocator_alloc", take)
    monkeypatch.setattr(
        own, "caching_allocator_delete", lambda address: found.append(("give", address))
    )
    for name in arena.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_piece_is_taken_and_left_to_the_pool(calls: list[tuple[str, int]]) -> None:
    assert begin_with(2 << 30, CUDA, Allocator())
    assert calls == [("take", (2 << 30) + SPARE_BYTES), ("give", 4096)]


@pytest.mark.parametrize(
    ("num_bytes", "allocator"),
    [
        (LEAST_BYTES - 1, Allocator()),
        (8 << 30, Allocator()),
        (2 << 30, Allocator(backend="cudaMallocAsync")),
        (2 << 30, Allocator("max_split_size_mb:512")),
    ],
)
def test_none_is_taken_that_would_be_of_no_use(
    num_bytes: int, allocator: Allocator, calls: list[tuple[str, int]]
) -> None:
    assert not begin_with(num_bytes, CUDA, allocator)
    assert calls == []


def test_a_block_that_is_never_cut_serves_nobody(
    calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older torch does not tell its settings."""
    monkeypatch.setenv(arena.VARIABLES[0], "max_split_size_mb:512")
    assert not begin_with(2 << 30, CUDA, Allocator())


def test_a_cpu_has_no_pools(calls: list[tuple[str, int]]) -> None:
    assert not begin_with(2 << 30, torch.device("cpu"), Allocator())
