"""The weights that a re-run reads again."""

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain.gathered import any_gathered, is_gathered
from ssdtrain.regions.inventory import VERSION

PLACED = frozenset((Tensor, nn.Parameter))
"""Types of tensors that have bytes of their own."""
_TENSOR: Any = torch._C.TensorBase
# Without the calls of Python that the public methods are.
STORAGE, OFFSET = _TENSOR.untyped_storage, _TENSOR.storage_offset
SIZE, STRIDE = _TENSOR.size, _TENSOR.stride


PLACE, USES = attrgetter("_cdata"), torch._C._storage_Use_Count


def uses_of(tensors: Iterable[Tensor]) -> list[int]:
    """How many hold the storage of each: its tensors, and others."""
    return [*map(USES, map(PLACE, map(STORAGE, tensors)))]


(UNSHARED,) = uses_of([torch.empty(1, dtype=torch.uint8, device="cpu")])
"""`uses_of` a storage that one tensor alone has."""


def has_place(tensor: Tensor) -> bool:
    """Whether it has bytes of its own, at an address."""
    return type(tensor) in PLACED and tensor.layout is torch.strided


class RegionWeights:
    """The parameters and buffers that a re-run reads again, as its forward read them.

    Args:
        tensors: all of them.
        placed: those with bytes of their own (`has_place`).
    """

    __slots__ = ("_numbers", "_placed", "_places", "_storages", "tensors")

    def __init__(self, tensors: list[Tensor], placed: list[Tensor]) -> None:
        self.tensors = tensors
        self._numbers = [*map(VERSION, tensors)]
        if any_gathered(placed):  # its data come and go, and would be held here
            placed = [each for each in placed if not is_gathered(each)]
        self._placed = placed
        # Held, so that data which replace them (`weight.data = other`) lie elsewhere.
        self._storages = [*map(STORAGE, placed)]
        self._places = _places(placed)

    def unwritten(self) -> bool:
        """Whether none has been written."""
        return self._numbers == [*map(VERSION, self.tensors)]

    def stand(self) -> bool:
        """Whether none has been written, or given other data."""
        placed = self._placed
        return (
            self.unwritten()
            and self._places == _places(placed)
            and all(map(is_, map(STORAGE, placed), self._storages))
        )


def _places(tensors: list[Tensor]) -> list[Any]:
    """Where in their storages: `weight.data = weight.data.t()` has the same bytes."""
    return [*map(OFFSET, tensors), *map(SIZE, tensors), *map(STRIDE, tensors)]
