"""What the code of modules reads that is none of their own."""

import dis
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
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

from ssdtrain.regions.deep import PLAIN, is_standard
from ssdtrain.regions.inventory import (
    MAX_ITEMS,
    NOTHING,
    Inventory,
    counts_changes,
)

FIXED = frozenset(
    (FunctionType, BuiltinFunctionType, MethodType, type, *PLAIN, *weakref.ProxyTypes)
)
FIXED_KINDS = (type, nn.Module, ModuleType, property, staticmethod, classmethod)
"""Kinds of values that are told by identity alone, or have nothing inside."""
FOREIGN = frozenset(("builtins", "torch", "numpy", "ssdtrain", "functools", "typing"))
"""Packages whose classes and functions are taken to read what stays."""
DRAWING = frozenset(("random", "numpy"))
SILENT = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"))
"""Instructions that may stand between a global and what is loaded of it."""
ENVIRONMENT = frozenset(("environ", "getenv"))
MAX_FUNCTIONS = 64
"""Most functions of a program's own that are looked into for the globals they read."""


class Inside(NamedTuple):
    """An object and what it held."""

    value: Any
    contents: Any
    written: tuple[int, ...] = ()
    """Versions of the tensors in it."""


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
        self._reads_environment = False
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
        self._functions = list(seen)
        self.may_draw |= bool(waiting)

    def _look_at(self, function: FunctionType) -> list[FunctionType]:
        space, found = function.__globals__, []
        names, imported, of_modules = names_of(function.__code__)
        for module, name in of_modules:
            value = space.get(module)
            if isinstance(value, ModuleType) and not is_standard(value.__name__):
                inner = vars(value)
                self._globals[f"{id(inner)} {name}"] = inner, name
                if isinstance(inner.get(name), FunctionType):
                    found.append(inner[name])
        self.may_draw |= not DRAWING.isdisjoint(imported)
        named = names | {name for _, name in of_modules}
        self._reads_environment |= not ENVIRONMENT.isdisjoint(named)
        for name in names:
            value = space.get(name, NOTHING)
            self.may_draw |= _draws(value)
            if value is NOTHING or isinstance(value, ModuleType):
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

    def tops(self) -> Iterator[tuple[str, Any]]:
        """What `values` gives, with what errors call it; classes item by item."""
        for space, name in self._globals.values():
            yield f"the global {name}", space.get(name)
        for cell, name in self._cells:
            yield f"{name} of a function around it", _content(cell)
        if self._reads_environment:
            # Not `os.environ`: nobody looks into objects of the standard library.
            yield "the environment", (os.environ._data,)  # type: ignore[attr-defined]
        for function in self._functions:
            yield f"the defaults of {function.__name__}", function
        for kind in self._classes:
            for value in vars(kind).values():
                yield f"an attribute of the class {kind.__name__}", value

    def tell(self, inventory: Inventory) -> None:
        """Let an inventory hold what `values` reads."""
        for space, name in self._globals.values():
            inventory.global_of(space, name)
            _tell_of(space.get(name), inventory)
        for cell, _ in self._cells:
            inventory.cell(cell)
            _tell_of(_content(cell), inventory)
        for kind in self._classes:
            inventory.class_of(kind)
            for value in vars(kind).values():
                _tell_of(value, inventory)

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


def names_of(code: CodeType) -> tuple[set[str], set[str], set[tuple[str, str]]]:
    """The globals that code loads, the packages that it imports, and what it loads of
    globals: `settings.SCALE`."""
    loaded: set[str] = set()
    imported: set[str] = set()
    inner: set[tuple[str, str]] = set()
    last = ""
    for step in dis.get_instructions(code):
        if step.opname in SILENT:
            continue
        if last and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            inner.add((last, step.argval))
        last = ""
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            last = step.argval
            loaded.add(last)
        elif step.opname == "IMPORT_NAME":
            imported.add(step.argval.partition(".")[0])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            others = names_of(constant)
            loaded |= others[0]
            imported |= others[1]
            inner |= others[2]
    return loaded, imported, inner


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
        return NOTHING


def _is_fixed(value: Any) -> bool:
    return type(value) in FIXED or isinstance(value, FIXED_KINDS)


def _seen(value: Any) -> Any:
    """A value, with what is inside where that may change."""
    if _is_fixed(value):
        return value
    if isinstance(value, Tensor):
        return Inside(value, None, versions_of((value,)))
    if isinstance(value, ContextVar):
        return Inside(value, value.get(NOTHING))
    inside: Any = value
    if not isinstance(value, dict | list | set | deque):
        inside = getattr(value, "__dict__", None)
        if not isinstance(inside, dict):
            return value
    if len(inside) > MAX_ITEMS:
        return value
    if isinstance(inside, dict):
        return Inside(value, dict(inside), versions_of(inside.values()))
    items = set(inside) if isinstance(inside, set) else list(inside)
    return Inside(value, items, versions_of(items))


def _tell_of(value: Any, inventory: Inventory) -> None:
    """Let an inventory hold what `_seen` holds besides the value."""
    if _is_fixed(value):
        return
    if isinstance(value, Tensor):
        inventory.versions((value,))
    elif isinstance(value, ContextVar):
        inventory.context(value)
    else:
        inventory.versions(inventory.inside(value, MAX_ITEMS))


def versions_of(values: Iterable[Any]) -> tuple[int, ...]:
    """Of the tensors among them that count their changes."""
    return tuple([each._version for each in values if counts_changes(each)])


def _is_alike(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, Inside):
        same = old.value is new.value and old.written == new.written
        return same and _is_alike(old.contents, new.contents)
    if isinstance(old, dict):
        same = old.keys() == new.keys()
        return same and all(_is_alike(old[name], new[name]) for name in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(map(_is_alike, old, new))
    if isinstance(old, set):
        return bool(old == new)
    return isinstance(old, PLAIN) and repr(old) == repr(new)
