"""Batches of another size under one plan.

[Note: sizes]
A plan is by place in the step: the n-th tensor that a lane saves. A batch of another
length saves the same tensors with other sizes, so the plan holds as long as each has
the producer, dtype and number of dimensions that it expects, and no dimension is more
than four times larger or smaller. Nothing else depends on that: what is done to a
tensor is checked for the tensor itself at every step, so a program that only looks
alike gets more traffic or more memory, never other gradients.
(tests/ssdtrain/cache/test_sizes.py)
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 4
"""By how much a dimension may differ from the observed one, either way."""
NAMES = 65536
"""Pairs of names that are remembered."""


class Look(NamedTuple):
    """What a row expects of its tensor, but for the size."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor is this one at another size."""
        if tensor.dtype is not self.dtype or tensor.is_nested:  # those have no sizes
            return False
        return is_scaled(self.shape, tensor.shape)


def is_scaled(planned: tuple[int, ...], found: tuple[int, ...]) -> bool:
    """Whether each dimension is within a factor of `MOST`."""
    return len(planned) == len(found) and all(
        size == other or (0 < size <= MOST * other and other <= MOST * size)
        for size, other in zip(planned, found, strict=True)
    )


@lru_cache(maxsize=NAMES)
def is_same_item(planned: str, found: str) -> bool:
    """Whether two names differ in their sizes alone, and not by too much."""
    producer, _, sizes = planned.partition(" [")
    other, _, others = found.partition(" [")
    return producer == other and is_scaled(_dims(sizes), _dims(others))


def _dims(sizes: str) -> tuple[int, ...]:
    """`16x1024]` as numbers."""
    return tuple(map(int, filter(None, sizes.rstrip("]").split("x"))))
