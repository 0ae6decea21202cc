"""Batches of another size under one plan.

[Note: sizes]
A plan is by place in the step: the n-th tensor that a lane saves. A batch of another
length saves the same tensors with other sizes. So the plan holds as long as each has
the producer, dtype and number of dimensions that it expects. No dimension may be more
than four times larger or smaller. Nothing else depends on that: what is done to a
tensor is checked for the tensor itself at every step, so a program that only looks the
same gets more traffic or more memory, never other gradients.

What is smaller than `min_bytes` is no item, and that depends on the length: 1 MiB may
lie between what a tensor has now and what it had in the observed step. So under a plan
the observed step decides. What was an item there is one at any size, and what was too
small stays (`Cursor.counts`).

A table is made of the first lane under a plan, whatever its length, so what its rows
expect is not what the plan does: a lane's size is told over the plan's (`Table.sizes`),
and where it was another one, two lanes may differ by four times four (`Table.most`).

Under a memory limit a plan has room for batches up to some size. A lane whose first
tensor of another size tells that it is larger leaves its plan there: everything that
can move does, waiting for the link, and where there are regions all run again, as in
the first steps. So does the rest of a lane that turns out to be another program. The
planner hears of its size, and the next plan has room for it. The first one has room
for all lanes that came before it, and no step before it runs without hooks: nobody
would see that it is larger than the observed one. How large a lane is its first tensor
tells, which is compared with that room; where all that it saves has grown by more, that
does. What a profile scales evenly is all but the items that had one size in lanes of
different sizes (`MetNames.fixed`), and those that grew with the square of the first
one (`MetNames.squares`): scaled evenly, a plan that keeps them needs more than it may.
(tests/ssdtrain/cache/test_sizes.py)
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 4
"""By how much a dimension may differ from the observed one, either way."""
SLACK = 0.01
"""By how much a lane may be larger than there is room for; and by how much a view may
have been scaled otherwise than its lane."""
NAMES = 65536
"""Pairs of names that are remembered."""


class TensorMetadata(NamedTuple):
    """What a row expects of its tensor, but for the size."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def fits(self, tensor: Tensor, most: int = MOST) -> bool:
        """Whether the tensor is this one at another size."""
        if tensor.dtype is not self.dtype or tensor.is_nested:  # those have no sizes
            return False
        return is_scaled(self.shape, tensor.shape, most)


@lru_cache(maxsize=NAMES)
def is_scaled(
    planned: tuple[int, ...], found: tuple[int, ...], most: int = MOST
) -> bool:
    """Whether each dimension is within a factor of `most`."""
    return len(planned) == len(found) and all(
        size == other or (0 < size <= most * other and other <= most * size)
        for size, other in zip(planned, found, strict=True)
    )


@lru_cache(maxsize=NAMES)
def is_same_item(planned: str, found: str) -> bool:
    """Whether two names differ in their sizes alone, and not by too much."""
    producer, _, sizes = planned.partition(" [")
    other, _, others = found.partition(" [")
    return producer == other and is_scaled(_dims(sizes), _dims(others))


@lru_cache(maxsize=NAMES)
def num_changed(name: str, other: str) -> int:
    """Return how many dimensions differ, of two names with as many."""
    both = (_dims(each.partition(" [")[2]) for each in (name, other))
    return sum(one != another for one, another in zip(*both, strict=True))


def producer_of(name: str) -> str:
    """Return what made a tensor of this name."""
    return name.partition(" [")[0]


def elements_of(name: str) -> int:
    """Return how many elements a tensor of this name has."""
    return math.prod(_dims(name.partition(" [")[2]))


def _dims(sizes: str) -> tuple[int, ...]:
    """`16x1024]` as numbers."""
    return tuple(map(int, filter(None, sizes.rstrip("]").split("x"))))
