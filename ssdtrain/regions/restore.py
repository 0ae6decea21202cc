"""Puts containers, objects and classes back into a state that was seen.

By the methods of Python's own kinds: what a container's class makes of them is no way
to set one (`Counter.update` adds).
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

Undo = list[Callable[[], None]]
"""What sets everything back again; to be called from the last to the first."""
GONE: Any = object()
"""Where a variable or an attribute has no value."""


def put_back(container: dict[str, Any], before: dict[str, Any], undo: Undo) -> bool:
    """Let a dictionary hold the same objects as before, in the same order; whether it
    held others, or in another order."""
    now = {name: dict.__getitem__(container, name) for name in container}
    if list(now) != list(before):
        undo.append(lambda: _fill(container, now))
        _fill(container, before)
        return True
    changed = {name: now[name] for name, old in before.items() if now[name] is not old}
    if changed:
        undo.append(lambda: _set(container, changed))
        _set(container, {name: before[name] for name in changed})
    return bool(changed)


def _fill(container: dict[str, Any], items: dict[str, Any]) -> None:
    _own_kind(container).clear(container)
    _set(container, items)


def _set(container: dict[str, Any], items: dict[str, Any]) -> None:
    put = _own_kind(container).__setitem__
    for name, value in items.items():
        put(container, name, value)


def _own_kind(container: dict[str, Any]) -> type[dict[str, Any]]:
    return OrderedDict if isinstance(container, OrderedDict) else dict


def put_item(container: dict[str, Any], name: str, value: Any, undo: Undo) -> None:
    """Let a dictionary have one item as before; `GONE`: it was not there."""

    def put(wanted: Any) -> None:
        if wanted is GONE:
            container.pop(name, None)
        else:
            container[name] = wanted

    now = container.get(name, GONE)
    if now is not value:
        put(value)
        undo.append(lambda: put(now))


def put_items(value: Any, held: Any, undo: Undo) -> None:
    """Let a list, deque or set hold the same objects as before."""
    same = len(value) == len(held)
    if isinstance(value, set):
        same = same and value == held
    else:
        same = same and all(a is b for a, b in zip(value, held, strict=True))
    if same:
        return
    kinds: tuple[Any, ...] = set, deque, list
    kind = next(each for each in kinds if isinstance(value, each))
    add = kind.update if kind is set else kind.extend
    now = list(value)

    def fill(items: Any) -> None:
        kind.clear(value)
        add(value, items)

    undo.append(lambda: fill(now))
    fill(held)


def put_kind(value: Any, kind: type, undo: Undo) -> None:
    """Let an object be of the same class as before."""
    now = type(value)
    if now is not kind:
        put_attribute(value, "__class__", kind, now, undo)


def put_class(kind: type, before: dict[str, Any], undo: Undo) -> None:
    """Let a class have the same attributes as before; not one of C's, which cannot."""
    now = dict(vars(kind))
    for name in [*before, *(now.keys() - before.keys())]:
        old, new = before.get(name, GONE), now.get(name, GONE)
        if old is not new:
            put_attribute(kind, name, old, new, undo, type)


def put_attribute(
    value: Any, name: str, old: Any, new: Any, undo: Undo, home: Any = object
) -> None:
    """Let an object have an attribute as before, past what its class says to that.

    Args:
        old: what it was; `GONE`: it was not there.
        new: what it is.
        home: whose way to set attributes is taken.
    """

    def put(wanted: Any) -> None:
        if wanted is GONE:
            home.__delattr__(value, name)
        else:
            home.__setattr__(value, name, wanted)

    try:
        put(old)
    except (AttributeError, TypeError):
        return  # whoever compares behind this will see it
    undo.append(lambda: put(new))
