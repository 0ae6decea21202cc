"""A recipe is used only where it was seen to give the same bytes.

[Note: admission]
Kernels differ by device, dtype, layout and size (vector width, tail, reduction order).
So a recipe is checked once for each class of those, when a real tensor is saved: one
comparison and, on a GPU, one wait for the device. The constants of the node are part of
the class. Later tensors of an admitted class are not compared; of a refused one they
are stored as bytes, and counted. Where there is no memory for the check nothing is
known: the tensor is stored, and the next one asked.
(tests/ssdtrain/rebuild/test_admission.py)
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from ssdtrain.rebuild.expression import Layout

# Sequence lengths that change at every step must not make this grow without end.
MAX_CLASSES = 4096
WORD = torch.int64
PART_BYTES = 1 << 26
"""That are compared at once."""


class Classes(dict[Hashable, bool]):
    """Whether recipes of a class were bitwise equal; forgotten when there are too many
    of them."""

    def __setitem__(self, key: Hashable, equal: bool) -> None:
        if len(self) >= MAX_CLASSES:
            self.clear()
        super().__setitem__(key, equal)


def same_bytes(rebuilt: Tensor, real: Tensor) -> bool:
    """Same layout and same bytes; NaN equals NaN of the same bits."""
    if Layout.of(rebuilt) != Layout.of(real) or rebuilt.storage_offset():
        return False
    both = raw(rebuilt), raw(real)
    # What a device finds of each element is a tensor as well, as large as the bytes
    # where these are compared one by one.
    are_words = all(_is_of_words(data) for data in both)
    one, other = (data.view(WORD) if are_words else data for data in both)
    size = PART_BYTES // one.itemsize
    return all(map(torch.equal, one.split(size), other.split(size)))


def _is_of_words(data: Tensor) -> bool:
    return data.nbytes % WORD.itemsize == 0 == data.data_ptr() % WORD.itemsize


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its storage from the first byte, without gaps."""
    if tensor.storage_offset() or tensor.numel() == 0:
        return False
    if tensor.is_contiguous():
        return True
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return steps + 1 == tensor.numel()


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, 1-D uint8, sharing its storage."""
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), 0, (tensor.nbytes,), (1,))
