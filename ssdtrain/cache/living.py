"""A set of objects that others own."""

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
FEWEST = 64
"""Members below which nobody looks for those that are gone."""


class Living(Generic[T]):
    """Members by identity, as long as they live.

    A `WeakSet` would run Python when one dies; see [Note: destructors] in record.py.
    """

    def __init__(self) -> None:
        self._members: dict[int, weakref.ref[T]] = {}
        self._most = FEWEST

    def add(self, member: T) -> None:
        """Know it from now on."""
        if len(self._members) >= self._most:
            self._members = {id(each): weakref.ref(each) for each in self}
            self._most = 2 * len(self._members) + FEWEST
        self._members[id(member)] = weakref.ref(member)

    def discard(self, member: T) -> None:
        """Forget it; if it is no member, nothing happens."""
        if member in self:
            del self._members[id(member)]

    def clear(self) -> None:
        """Forget all."""
        self._members.clear()

    def __contains__(self, member: T) -> bool:
        # By identity: the id of one that is gone may be another's by now.
        found = self._members.get(id(member))
        return found is not None and found() is member

    def __iter__(self) -> Iterator[T]:
        """Those that live now, in the order in which they came."""
        for reference in list(self._members.values()):
            member = reference()
            if member is not None:
                yield member

    def __bool__(self) -> bool:
        return any(True for _ in self)
