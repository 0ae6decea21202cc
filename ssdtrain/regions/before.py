"""Puts modules back into the state of a forward, for the time that it runs again.

[Note: state between forward and backward]
A program may change what a forward has read before backward comes: an attribute (a
rate, a scale, the adapter that is active), a weight or a whole submodule that another
object replaces (`functional_call`, `load_state_dict(assign=True)`), `requires_grad`.
Plain autograd does not notice, because it needs none of it again. So a re-run gets back
what its forward had: every attribute, parameter, buffer and submodule by identity, and
one level into lists, dictionaries and plain objects among the attributes. What cannot
be put back is an error: tensors that were written or freed, hooks that were added,
globals that the modules' code reads and that have another value now.
(tests/ssdtrain/regions/test_between.py)
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ssdtrain.errors import RegionError

PLAIN = (int, float, bool, str, bytes, complex, type(None))
_NOTHING = object()
MAX_FUNCTIONS = 64
"""Most functions of a program's own that are looked into for the globals they read."""
MAX_ITEMS = 64
"""A larger global list or dictionary is compared by identity alone."""

Undo = list[Callable[[], None]]


class Parts(NamedTuple):
    """One module as a forward found it."""

    module: nn.Module
    own: dict[str, Any]
    buffers: dict[str, Any]
    parameters: dict[str, Any]
    modules: dict[str, Any]
    written: tuple[int, ...]
    """Versions of the buffers."""
    insides: dict[str, Any]
    """Contents of attributes, by name."""
    requires: tuple[bool, ...]
    """`requires_grad` of the parameters."""

    @classmethod
    def of(cls, module: nn.Module, names: list[str]) -> "Parts":
        """As it is now, with the contents of these attributes."""
        own = vars(module)
        buffers, parameters = dict(module._buffers), dict(module._parameters)
        return cls(
            module,
            dict(own),
            buffers,
            parameters,
            dict(module._modules),
            _versions(buffers.values()),
            {name: contents_of(own.get(name)) for name in names},
            tuple([p is not None and p.requires_grad for p in parameters.values()]),
        )


class Before:
    """The modules of a region as its forward found them."""

    def __init__(self, path: str, parts: list[Parts], reads: "Reads") -> None:
        self.parts = parts
        self._path = path
        self._reads = reads
        self._values = reads.values()

    @contextmanager
    def restored(self, hooks: Callable[[Any], str | None]) -> Iterator[None]:
        """A block in which they are as they were.

        Args:
            hooks: tells of one of modules that would run twice; None: there is none.

        Raises:
            RegionError: something cannot be put back.
        """
        name = self._reads.changed(self._values)
        if name is not None:
            raise self._error(f"the global {name}, which its code reads")
        undo: Undo = []
        try:
            for part in self.parts:
                self._put_back(part, undo)
            reason = hooks([part.module for part in self.parts])
            if reason is not None:
                raise self._error(f"its hooks ({reason})")
            yield
        finally:
            while undo:
                undo.pop()()

    def _put_back(self, part: Parts, undo: Undo) -> None:
        module = part.module
        put_back(vars(module), part.own, undo)
        put_back(module._modules, part.modules, undo)
        put_back(module._buffers, part.buffers, undo)
        if put_back(module._parameters, part.parameters, undo):
            if not all(map(_is_here, part.parameters.values())):
                raise self._error("the memory of its weights")
        for (name, parameter), wanted in zip(
            part.parameters.items(), part.requires, strict=True
        ):
            if parameter is not None and parameter.requires_grad is not wanted:
                if not parameter.is_leaf:
                    raise self._error(f"requires_grad of {name}")
                parameter.requires_grad_(wanted)
                undo.append(_requiring(parameter, not wanted))
        for name, contents in part.insides.items():
            if not put_inside(part.own[name], contents, undo):
                raise self._error(f"the tensors in its attribute {name}")

    def _error(self, what: str) -> RegionError:
        return RegionError(
            f"{self._path} would run again, but {what} changed between its forward "
            "and its backward. Change it behind backward, set regions to leave it "
            "out, or set recompute='off'."
        )


def _requiring(parameter: Tensor, value: bool) -> Callable[[], None]:
    def undo() -> None:
        parameter.requires_grad_(value)

    return undo


def put_back(container: dict[str, Any], before: dict[str, Any], undo: Undo) -> bool:
    """Let a dictionary hold the same objects as before, in the same order; whether it
    held others."""
    if container.keys() != before.keys():
        now = dict(container)
        undo.append(lambda: _fill(container, now))
        _fill(container, before)
        return True
    changed = {
        name: container[name]
        for name, value in before.items()
        if container[name] is not value
    }
    if changed:
        undo.append(lambda: container.update(changed))
        container.update({name: before[name] for name in changed})
    return bool(changed)


def _fill(container: dict[str, Any], items: dict[str, Any]) -> None:
    container.clear()
    container.update(items)


def _is_here(tensor: Tensor | None) -> bool:
    """Whether its memory is there: FSDP frees that of weights that are not gathered."""
    if type(tensor) is not nn.Parameter or tensor.numel() == 0:
        return True
    return tensor.untyped_storage().nbytes() > 0


def contents_of(value: Any) -> Any:
    """What is inside an attribute, to be compared and put back; None: nothing that can
    change."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, dict):
        return dict(value), _versions(value.values())
    if isinstance(value, list | deque):
        return list(value), _versions(value)
    if isinstance(value, set):
        return set(value), ()
    inside = getattr(value, "__dict__", None)
    return None if inside is None else (dict(inside), _versions(inside.values()))


def _versions(values: Any) -> tuple[int, ...]:
    return tuple([each._version for each in values if isinstance(each, Tensor)])


def put_inside(value: Any, contents: Any, undo: Undo) -> bool:
    """Let an attribute have the same contents as before; False: a tensor in it was
    written."""
    if contents is None:
        return True
    if isinstance(value, Tensor):
        return bool(value._version == contents)
    held, versions = contents
    each = held.values() if isinstance(held, dict) else held
    if _versions(each) != versions:
        return False
    if isinstance(value, dict):
        put_back(value, held, undo)
    elif isinstance(value, list | deque | set):
        _put_items(value, held, undo)
    else:
        put_back(vars(value), held, undo)
    return True


def _put_items(value: Any, held: Any, undo: Undo) -> None:
    same = len(value) == len(held)
    if isinstance(value, set):
        same = same and value == held
    else:
        same = same and all(a is b for a, b in zip(value, held, strict=True))
    if same:
        return
    add = value.update if isinstance(value, set) else value.extend
    now = list(value)

    def undone() -> None:
        value.clear()
        add(now)

    undo.append(undone)
    value.clear()
    add(held)


class Reads:
    """The globals and enclosing variables with values that the code of modules reads.

    Functions, modules and classes are no values: nobody gives them another name.
    """

    def __init__(self, functions: list[FunctionType]) -> None:
        self._globals: list[tuple[dict[str, Any], str]] = []
        self._cells: list[tuple[Any, str]] = []
        seen: set[int] = set()
        waiting = list(functions)
        while waiting and len(seen) < MAX_FUNCTIONS:
            function = waiting.pop()
            if id(function) in seen:
                continue
            seen.add(id(function))
            waiting += self._look_at(function)
        self._is_empty = not self._globals and not self._cells

    def _look_at(self, function: FunctionType) -> list[FunctionType]:
        space, found = function.__globals__, []
        for name in _names(function.__code__):
            value = space.get(name, _NOTHING)
            if _is_value(value):
                self._globals.append((space, name))
            elif isinstance(value, FunctionType) and value.__globals__ is space:
                found.append(value)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if _is_value(_content(cell)):
                self._cells.append((cell, name))
        return found

    def values(self) -> list[Any]:
        """As they are now."""
        if self._is_empty:
            return []
        found = [_copied(space.get(name, _NOTHING)) for space, name in self._globals]
        return found + [_copied(_content(cell)) for cell, _ in self._cells]

    def changed(self, values: list[Any]) -> str | None:
        """The name of one that has another value than it had; None: there is none."""
        names = [name for _, name in (*self._globals, *self._cells)]
        for name, old, new in zip(names, values, self.values(), strict=False):
            if not _is_alike(old, new):
                return name
        return None


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _NOTHING


def _is_value(value: Any) -> bool:
    return isinstance(value, (*PLAIN, list, dict, set, deque))


def _copied(value: Any) -> Any:
    if isinstance(value, dict | list | set | deque) and len(value) > MAX_ITEMS:
        return value
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list | set | deque) else value


def _is_alike(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        same = old.keys() == new.keys()
        return same and all(_is_alike(old[name], new[name]) for name in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is_alike, old, new))
    if old is new:
        return True
    return type(old) is type(new) and isinstance(old, PLAIN) and repr(old) == repr(new)
