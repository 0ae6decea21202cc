"""Puts modules back into the state of a forward, for the time that it runs again.

[Note: state between forward and backward]
A program may change what a forward has read before backward comes: an attribute (a
rate, a scale, the adapter that is active), a weight or a whole submodule that another
object replaces (`functional_call`, `load_state_dict(assign=True)`), `requires_grad`.
Plain autograd does not notice, because it needs none of it again. So a re-run gets back
what its forward had: every attribute, parameter, buffer and submodule by identity, and
one level into lists, dictionaries and plain objects among the attributes. What cannot
be put back is an error: tensors that were written or freed, hooks that were added, and
what the modules' code reads of globals, enclosing functions and classes.
(tests/ssdtrain/regions/test_between.py)
"""

import dis
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

from torch import Tensor, nn

from ssdtrain.errors import RegionError

PLAIN = (int, float, bool, str, bytes, complex, type(None))
FIXED = frozenset((FunctionType, BuiltinFunctionType, MethodType, type, *PLAIN))
FIXED_KINDS = (type, nn.Module, ModuleType, property, staticmethod, classmethod)
"""Kinds of values that are told by identity alone, or have nothing inside."""
FOREIGN = frozenset(("builtins", "torch", "numpy", "ssdtrain", "functools", "typing"))
"""Packages whose classes and functions are taken to read what stays."""
DRAWING = frozenset(("random", "numpy"))
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

    def elsewhere(self) -> str | None:
        """What the code reads of others and has changed since; None: nothing."""
        return self._reads.changed(self._values)

    @contextmanager
    def restored(self, hooks: Callable[[Any], str | None]) -> Iterator[None]:
        """A block in which they are as they were.

        Args:
            hooks: tells of one of modules that would run twice; None: there is none.

        Raises:
            RegionError: something cannot be put back.
        """
        name = self.elsewhere()
        if name is not None:
            raise self._error(f"{name}, which its code reads,")
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


class Inside(NamedTuple):
    """An object and what it held."""

    value: Any
    contents: Any


class Reads:
    """What the code of modules reads that is none of their own: globals, enclosing
    variables and attributes of classes, by identity and one level deep.

    Args:
        classes: of the modules; torch's own are passed over.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._classes: list[type] = []
        self._globals: dict[str, tuple[dict[str, Any], str]] = {}
        self._cells: list[tuple[Any, str]] = []
        self.may_draw = False
        """Whether it may draw random numbers of Python's or NumPy's."""
        waiting: list[FunctionType] = []
        for kind in classes:
            for each in kind.__mro__:
                if _is_foreign(each.__module__) or each in self._classes:
                    continue
                self._classes.append(each)
                for name, value in vars(each).items():
                    if isinstance(value, FunctionType) and name != "__init__":
                        waiting.append(value)
        seen: set[FunctionType] = set()
        while waiting and len(seen) < MAX_FUNCTIONS:
            function = waiting.pop(0)
            if function not in seen and not _is_foreign(function.__module__ or ""):
                seen.add(function)
                waiting += self._look_at(function)
        self.may_draw |= bool(waiting)

    def _look_at(self, function: FunctionType) -> list[FunctionType]:
        space, found = function.__globals__, []
        names, imported = names_of(function.__code__)
        self.may_draw |= not DRAWING.isdisjoint(imported)
        for name in names:
            value = space.get(name, _NOTHING)
            self.may_draw |= _draws(value)
            if value is _NOTHING or isinstance(value, ModuleType):
                continue
            self._globals[f"{id(space)} {name}"] = space, name
            if isinstance(value, FunctionType):
                found.append(value)
        cells = function.__closure__ or ()
        for cell, name in zip(cells, function.__code__.co_freevars, strict=True):
            value = _content(cell)
            self.may_draw |= _draws(value)
            if isinstance(value, FunctionType):
                found.append(value)
            self._cells.append((cell, name))
        return found

    def values(self) -> list[Any]:
        """As they are now."""
        found = [_seen(space.get(name)) for space, name in self._globals.values()]
        found += [_seen(_content(cell)) for cell, _ in self._cells]
        for kind in self._classes:
            found.append({name: _seen(value) for name, value in vars(kind).items()})
        return found

    def changed(self, values: list[Any]) -> str | None:
        """One that is another, or holds something else; None: there is none."""
        for number, (old, new) in enumerate(zip(values, self.values(), strict=True)):
            if old is not new and not _is_alike(old, new):
                return self._name(number)
        return None

    def _name(self, number: int) -> str:
        names = [f"the global {name}" for _, name in self._globals.values()]
        names += [f"{name} of a function around it" for _, name in self._cells]
        names += [
            f"an attribute of the class {kind.__name__}" for kind in self._classes
        ]
        return names[number]


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in FOREIGN


def names_of(code: CodeType) -> tuple[set[str], set[str]]:
    """The globals that code loads, and the packages that it imports."""
    loaded: set[str] = set()
    imported: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imported.add(step.argval.partition(".")[0])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = names_of(constant)
            loaded |= inner[0]
            imported |= inner[1]
    return loaded, imported


def _draws(value: Any) -> bool:
    """Whether it is a generator, a method of one, or a module that has some."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in DRAWING
    owner = getattr(value, "__self__", value)
    home = "" if isinstance(owner, ModuleType) else type(owner).__module__
    return home.partition(".")[0] in DRAWING


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _NOTHING


def _seen(value: Any) -> Any:
    """A value, with what is inside where that may change."""
    kind = type(value)
    if kind in FIXED or isinstance(value, FIXED_KINDS):
        return value
    if isinstance(value, Tensor):
        return Inside(value, value._version)
    if isinstance(value, ContextVar):
        return Inside(value, value.get(_NOTHING))
    inside: Any = value
    if not isinstance(value, dict | list | set | deque):
        inside = getattr(value, "__dict__", None)
        if not isinstance(inside, dict):
            return value
    if len(inside) > MAX_ITEMS:
        return value
    if isinstance(inside, dict):
        return Inside(value, dict(inside))
    return Inside(value, set(inside) if isinstance(inside, set) else list(inside))


def _is_alike(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, Inside):
        return old.value is new.value and _is_alike(old.contents, new.contents)
    if isinstance(old, dict):
        same = old.keys() == new.keys()
        return same and all(_is_alike(old[name], new[name]) for name in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(map(_is_alike, old, new))
    if isinstance(old, set):
        return bool(old == new)
    return isinstance(old, PLAIN) and repr(old) == repr(new)
