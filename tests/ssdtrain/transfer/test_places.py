"""Places in pinned memory: what waits for what, and what fits where."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdtrain.transfer.copies import Copies, buffer_for, fits_buffer, give_back
from ssdtrain.transfer.device import CpuDevice
from ssdtrain.transfer.pinned import PinnedPool
from tests.ssdtrain.bits import same_bits


class Point(str):
    """Compute runs beside the host: what it waits for has not been reached."""

    __slots__ = ()

    def query(self) -> bool:
        return False


class Told:
    """A device that copies at once and remembers what each copy was to wait for."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.after: list[list[Any]] = []
        self.waited: list[Any] = []

    def now(self) -> str:
        return "compute"

    def order(self) -> None:
        return None

    def is_capturing(self) -> bool:
        return False

    def wait(self, event: Any) -> None:
        self.waited.append(event)

    def copy_out(self, source: Tensor, buffer: Tensor, after: Sequence[Any]) -> str:
        return self._copy(source, buffer, after, "out")

    def copy_in(self, buffer: Tensor, target: Tensor, after: Sequence[Any]) -> str:
        return self._copy(buffer, target, after, "in")

    def _copy(self, source: Tensor, target: Tensor, after: Any, way: str) -> str:
        self.after.append(list(after))
        target.copy_(source)
        return Point(f"{way} {len(self.after)}")


@pytest.fixture
def pool() -> PinnedPool:
    return PinnedPool(CpuDevice(), 1 << 20)


def test_what_a_place_waits_for(pool: PinnedPool) -> None:
    told = Told()
    copies = Copies(told)  # type: ignore[arg-type]
    first, second = torch.randn(8, 4), torch.randn(8, 4)
    place = buffer_for(pool, first)
    assert place is not None
    copies.out(place, first)
    assert same_bits(copies.back([place]), [first])
    copies.arrive(place)
    copies.out(place, second)
    assert same_bits(copies.back([place]), [second])
    assert told.after == [
        ["compute"],
        ["out 1", "compute"],  # its bytes are there
        ["compute", "in 2"],  # and are not overwritten while they are read
        ["out 3", "compute"],
    ]
    assert told.waited == ["in 2"]


def test_a_place_holds_no_events_of_copies_that_ended(pool: PinnedPool) -> None:
    device = CpuDevice()
    copies, tensor = Copies(device), torch.randn(8, 4)
    place = buffer_for(pool, tensor)
    assert place is not None
    for _ in range(3):
        copies.out(place, tensor)
        before = place.copied
        for _ in range(2):  # backward may come again
            (found,) = copies.back([place])
            copies.arrive(place)
            assert same_bits(found, tensor)
        assert place.copied is not before and place.loaded is None
        copies.arrive(place)  # as behind an interrupt
    device.close()


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 8),
        torch.zeros(4, 8).t(),
        torch.zeros(8, 4, dtype=torch.int32),
        torch.zeros(8, 4)._neg_view(),
        torch.zeros(8, 1).expand(8, 4),
    ],
)
def test_another_layout_does_not_fit(pool: PinnedPool, other: Tensor) -> None:
    tensor = torch.zeros(8, 4)
    place = buffer_for(pool, tensor)
    assert place is not None
    assert fits_buffer(place, tensor) and not fits_buffer(place, other)


def test_a_permuted_tensor_comes_back_as_it_was(pool: PinnedPool) -> None:
    copies = Copies(CpuDevice())
    tensor = torch.randn(3, 4, 5).permute(2, 0, 1)
    place = buffer_for(pool, tensor)
    assert place is not None
    copies.out(place, tensor)
    (found,) = copies.back([place])
    copies.arrive(place)
    assert same_bits(found, tensor) and found.stride() == tensor.stride()


def test_memory_is_the_pools_again(pool: PinnedPool) -> None:
    place = buffer_for(pool, torch.zeros(1 << 16))
    assert place is not None and pool.used_bytes == 1 << 18
    assert buffer_for(pool, torch.zeros(1 << 18)) is None, "above the cap"
    give_back(pool, place)
    assert pool.used_bytes == 0
