"""What a program was read from besides its arguments, to be compared before it is used
again.

[Note: guards] Numbers, flags and functions that layer code takes from a module or a
global name are part of the program. Each such read is written down with its value; a
program is used again only while all of them would give the same.
"""

import weakref
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple


class _Read(NamedTuple):
    """One value: how to read it again, and what it was."""

    again: Callable[[Mapping[str, Any]], Any]
    was: object


class Guards:
    """The reads of one program; see [Note: guards]."""

    def __init__(self) -> None:
        self._reads: dict[object, _Read] = {}

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name` is `value`."""
        key = (id(owner), name)
        if key not in self._reads:
            self._reads[key] = _Read(_attribute(owner, name), snapshot(value))

    def tensor(self, owner: Any, name: str, argument: str) -> None:
        """`owner.name` is the tensor that is passed as `argument`."""
        read = _attribute(owner, name)
        key = (id(owner), name)
        self._reads[key] = _Read(lambda v: read(v) is v.get(argument), snapshot(True))

    def scope(self, names: Mapping[str, Any], name: str, value: Any) -> None:
        """A global name is `value`."""
        key = (id(names), name)
        if key not in self._reads:
            # The dict of a module's globals outlives its functions.
            again = lambda _: names.get(name, _GONE)  # noqa: E731
            self._reads[key] = _Read(again, snapshot(value))

    def cell(self, cell: Any, value: Any) -> None:
        """A variable of an enclosing function is `value`."""
        again = lambda _: cell.cell_contents  # noqa: E731
        self._reads[id(cell)] = _Read(again, snapshot(value))

    def size(self, argument: str, axis: int, size: int) -> None:
        """An argument's tensor has `size` along `axis`."""
        again = lambda v: v[argument].shape[axis]  # noqa: E731
        self._reads[argument, axis] = _Read(again, snapshot(size))

    def hold(self, values: Mapping[str, Any]) -> bool:
        """Whether every read would give now what it gave."""
        for again, was in self._reads.values():
            now = again(values)
            if isinstance(was, _Identity):
                if not was.of(now):
                    return False
            elif snapshot(now) != was:
                return False
        return True


_GONE = object()


def _attribute(owner: Any, name: str) -> Callable[[Mapping[str, Any]], Any]:
    try:
        ref = weakref.ref(owner)
    except TypeError:
        return lambda _: getattr(owner, name, _GONE)
    return lambda _: getattr(ref(), name, _GONE)


def snapshot(value: Any) -> object:
    """Equal for values that layer code cannot tell apart; it keeps no large object."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return type(value), value
    if isinstance(value, float):
        # -0.0 == 0.0, and nan is not itself.
        return float, value.hex()
    if isinstance(value, tuple | list | set | frozenset):
        parts = map(snapshot, value)
        return type(value), (
            tuple(parts) if isinstance(value, tuple | list) else frozenset(parts)
        )
    if isinstance(value, dict):
        return dict, tuple((snapshot(k), snapshot(v)) for k, v in value.items())
    if isinstance(value, MethodType):
        return _Identity(value.__func__), _Identity(value.__self__)
    return _Identity(value)


class _Identity:
    """Equal only for one and the same object, held weakly where that is possible."""

    def __init__(self, value: Any) -> None:
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def of(self, value: Any) -> bool:
        """Whether it is that of `value`."""
        return value is not None and self._ref() is value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.of(other._ref())

    def __hash__(self) -> int:
        return id(self._ref())
