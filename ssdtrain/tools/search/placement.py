"""Where a tensor's elements are, on one axis of a mesh of workers."""

from typing import NamedTuple

from ssdtrain.tools.search.language import Reducer


class Cut(NamedTuple):
    """Equal pieces of one dimension, and the neighbours' rows that are read as well."""

    dim: int
    before: int = 0
    after: int = 0

    @property
    def has_halo(self) -> bool:
        """True if rows of neighbours are read."""
        return bool(self.before or self.after)


class Copied(NamedTuple):
    """Every worker has all of it."""


class Unreduced(NamedTuple):
    """Every worker has a part of each element's sum (or product, maximum, minimum)."""

    reducer: Reducer


Placement = Cut | Copied | Unreduced
Placements = tuple[Placement, ...]
"""One for each axis of the mesh, outermost first. Cuts of one dimension nest."""
COPIED = Copied()


def piece(size: int, ways: int, worker: int) -> tuple[int, int]:
    """Return begin and end of a worker's piece of a dimension, as torch.chunk cuts."""
    chunk = -(-size // ways)
    return min(size, worker * chunk), min(size, (worker + 1) * chunk)
