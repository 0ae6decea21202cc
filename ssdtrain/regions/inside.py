"""What is one level inside of a value that a forward reads."""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from ssdtrain.regions.deep import PLAIN
from ssdtrain.regions.inventory import Inventory, counts_changes
from ssdtrain.regions.restore import Undo, put_back, put_items, put_kind


class Inside(NamedTuple):
    """An object and what it held."""

    value: Any
    kind: type
    """Its class, which a program may change."""
    contents: Any
    """Items or attributes; None: it is a tensor."""
    written: tuple[int, ...] = ()
    """Versions of the tensors in it."""

    @property
    def items(self) -> Iterable[Any]:
        """What was in it."""
        held = self.contents
        return held.values() if isinstance(held, dict) else held or ()

    def is_unwritten(self) -> bool:
        """Whether the tensors in it are as they were."""
        own = (self.value,) if self.contents is None else self.items
        return versions_of(own) == self.written


def seen(value: Any, most: float = math.inf) -> Any:
    """What is inside a value, to be compared and put back; the value itself where that
    is more than so much, or nothing can be."""
    if isinstance(value, Tensor):
        return Inside(value, type(value), None, versions_of((value,)))
    inside: Any = value
    if not isinstance(value, dict | list | set | deque):
        inside = getattr(value, "__dict__", None)
        if not isinstance(inside, dict):
            return value
    if len(inside) > most:
        return value
    if isinstance(inside, dict):
        return Inside(value, type(value), dict(inside), versions_of(inside.values()))
    items = set(inside) if isinstance(inside, set) else list(inside)
    return Inside(value, type(value), items, versions_of(items))


def put_inside(seen: Any, undo: Undo) -> Any:
    """Let what `seen` saw hold the same, but for tensors that were written; the value
    itself."""
    if type(seen) is not Inside:
        return seen
    value, kind, contents, _ = seen
    put_kind(value, kind, undo)
    if isinstance(value, dict):
        put_back(value, contents, undo)
    elif isinstance(contents, dict):
        put_back(value.__dict__, contents, undo)
    elif contents is not None:
        put_items(value, contents, undo)
    return value


def tell_of(value: Any, inventory: Inventory, most: int | None = None) -> None:
    """Let an inventory hold what `seen` holds besides the value."""
    is_tensor = isinstance(value, Tensor)
    inventory.versions((value,) if is_tensor else inventory.inside(value, most))


def versions_of(values: Iterable[Any]) -> tuple[int, ...]:
    """Of the tensors among them that count their changes."""
    return tuple([each._version for each in values if counts_changes(each)])


def is_alike(old: Any, new: Any) -> bool:
    """Whether what `seen` saw at two times holds the same."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, Inside):
        same = old.value is new.value and old.written == new.written
        return same and old.kind is new.kind and is_alike(old.contents, new.contents)
    if isinstance(old, dict):
        same = list(old) == list(new)
        return same and all(is_alike(old[name], new[name]) for name in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(map(is_alike, old, new))
    if isinstance(old, set):
        return bool(old == new)
    return isinstance(old, PLAIN) and repr(old) == repr(new)
