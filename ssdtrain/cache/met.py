"""What is known of saved tensors by their names: producer and shape.

See [Note: sizes] in sizes.py.
(tests/ssdtrain/cache/test_course.py)
"""

from typing import Any

from ssdtrain.cache.sizes import is_same_item, num_changed

# Sequence lengths that change at every step must not make this grow without end.
MAX_NAMES = 4096


class MetNames:
    """Names of what was too small for an item, and of what does not grow."""

    def __init__(self) -> None:
        self.fixed: set[str] = set()
        """Items that had the same size in lanes of different sizes."""
        self._small: set[str] = set()
        """What was too small in observed steps."""
        self._first_bytes: dict[tuple[str, str], int] = {}
        """By kind of lane and name of an item: bytes of such a lane's first item."""

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

    def note_item(self, kind: str, first_bytes: int, name: str) -> None:
        """A lane of this kind, whose first item has so many bytes, has such an item."""
        if len(self._first_bytes) >= MAX_NAMES:
            self._first_bytes.clear()
        before = self._first_bytes.setdefault((kind, name), first_bytes)
        if before != first_bytes and len(self.fixed) < MAX_NAMES:
            self.fixed.add(name)


def name_of(node: Any, shape: tuple[int, ...]) -> str:
    """Producer and shape: what a saved tensor is called in plans and reports.

    Args:
        node: of autograd, which made it, or what it is the part of; None: an input.
    """
    producer = "input" if node is None else node.name()
    return f"{producer} [{'x'.join(map(str, shape))}]"
