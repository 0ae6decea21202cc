"""Reversible patches, of instance attributes above all, undone in one place."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ssdtrain.errors import AttachError

MARK = "_ssdtrain_session"


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method for those who keep what they call: once its object is gone, calls
    do nothing."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> None:
        found = reference()
        if found is not None:
            found(*args, **kwargs)

    return call


class Patches:
    """Instance attributes that were replaced, undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> Callable[[], None]:
        """Set an attribute on the instance; returns what undoes it earlier.

        Undone only where it is still ours: who replaced it since keeps theirs.
        """
        had = name in vars(owner)
        before = vars(owner).get(name)
        # object.__setattr__: nn.Module would file modules and parameters elsewhere.
        object.__setattr__(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is not value:
                return
            if had:
                object.__setattr__(owner, name, before)
            else:
                object.__delattr__(owner, name)

        self._undo.append(undo)
        return undo

    def also(self, undo: Callable[[], None]) -> None:
        """Undo something that was not an attribute."""
        self._undo.append(undo)

    def mark(self, owner: Any) -> None:
        """Claim an object for this session.

        Raises:
            AttachError: another session holds it.
        """
        # By identity: a copy of the owner carries the mark and is nobody's.
        if vars(owner).get(MARK) == id(owner):
            raise AttachError(
                f"this {type(owner).__name__} is already offloaded by another session; "
                "call close() on that session first. Where SSDTRAIN is set, a trainer "
                "opens one: unset it, or leave out the script's own."
            )
        self.set(owner, MARK, id(owner))

    def undo(self) -> None:
        """Restore everything. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def __iter__(self) -> Iterator[Callable[[], None]]:
        return iter(self._undo)
