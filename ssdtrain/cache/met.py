"""What is known of saved tensors by their names: producer and shape.

See [Note: sizes] in sizes.py.

[Note: sizes that are equal by chance]
A router gives some expert of a long batch as many rows as another one, or the same one,
of a short batch. Taken for items that do not grow, they would make a plan that goes
beyond its limit. So the same place of a few lanes is looked at, and a name that a
changing place has had is none of a fixed one.
(tests/ssdtrain/cache/test_cursor.py)
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ssdtrain.cache.sizes import SLACK, elements_of, is_same_item, num_changed
from ssdtrain.plan.plan import Order
from ssdtrain.plan.profile import Item
from ssdtrain.plan.scaled import Growth

# Sequence lengths that change at every step must not make this grow without end.
MAX_NAMES = 4096
LEAST_LANES = 3
"""In so many lanes an item has one size before it is taken not to grow."""


class _Place(NamedTuple):
    """An item's place in lanes of a kind."""

    name: str
    """Of its item in all of them; "": it changes."""
    first_bytes: frozenset[int]
    """Of these lanes: bytes of their first items, which tell their sizes."""
    num_lanes: int


class MetNames:
    """Names of what was too small for an item, and of what does not grow."""

    def __init__(self) -> None:
        self.fixed: set[str] = set()
        """Items that had the same size in lanes of different sizes."""
        self.squares: set[tuple[str, int]] = set()
        """Kind of lane and number of the items that grow with the square of what their
        lane's first one grows by, as an attention's scores do."""
        self._small: set[str] = set()
        """What was too small in observed steps."""
        self._places: dict[tuple[str, int], _Place] = {}
        """By kind of lane and number of the item."""
        self._changing: set[str] = set()
        """Names that items had whose place had another one, too."""

    def note_small(self, name: str) -> None:
        """Something in the observed step was too small."""
        if len(self._small) >= MAX_NAMES:
            self._small.clear()
        self._small.add(name)

    def is_like_small(self, name: str) -> bool:
        """Whether something of its kind was, at any size."""
        return any(is_same_item(small, name) for small in self._small)

    def is_rather_small(self, item: str, name: str) -> bool:
        """Whether something that was too small is more like it than this item: queries
        and keys may differ in nothing but the number of heads."""
        most = num_changed(item, name)
        return any(
            is_same_item(small, name) and num_changed(small, name) < most
            for small in self._small
        )

    def note_item(self, kind: str, number: int, first_bytes: int, name: str) -> None:
        """A lane of this kind, whose first item has so many bytes, has such an item.
        See [Note: sizes that are equal by chance]."""
        key = kind, number
        place = self._places.get(key)
        if place is None:
            if len(self._places) < MAX_NAMES:
                self._places[key] = _Place(name, frozenset((first_bytes,)), 1)
            return
        if place.name != name:
            if place.name and len(place.first_bytes) == 1:
                (before,) = place.first_bytes
                if _is_square(first_bytes / before, place.name, name):
                    self.squares.add(key)
            for each in (place.name, name):
                self.fixed.discard(each)
                if len(self._changing) < MAX_NAMES:
                    self._changing.add(each)
            self._places[key] = place._replace(name="")
            return
        sizes, num_lanes = place.first_bytes, place.num_lanes + 1
        if len(sizes) == 1:  # two tell as much as more
            sizes |= {first_bytes}
        self._places[key] = _Place(name, sizes, num_lanes)
        knows_all = len(self._changing) < MAX_NAMES
        is_fixed = len(sizes) > 1 and num_lanes >= LEAST_LANES
        if is_fixed and knows_all and name not in self._changing:
            self.fixed.add(name)

    def growth(self, kinds: Mapping[str, Sequence[Item | Order]]) -> Growth:
        """Return how these items grow with their lane."""
        names = {item.name for items in kinds.values() for item in items}
        squares: dict[str, tuple[int, ...]] = {}
        for kind, number in sorted(self.squares):
            if kind in kinds:
                squares[kind] = *squares.get(kind, ()), number
        return Growth(fixed=tuple(sorted(names & self.fixed)), squares=squares)


def _is_square(ratio: float, name: str, other: str) -> bool:
    """Whether the second one of two tensors of a place is larger by the square."""
    own = elements_of(other) / max(1, elements_of(name))
    return ratio != 1.0 and math.isclose(own, ratio * ratio, rel_tol=SLACK)


def name_of(node: Any, shape: tuple[int, ...]) -> str:
    """Producer and shape: what a saved tensor is called in plans and reports.

    Args:
        node: of autograd, which made it, or what it is the part of; None: an input.
    """
    producer = "input" if node is None else node.name()
    return f"{producer} [{'x'.join(map(str, shape))}]"
