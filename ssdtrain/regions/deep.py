"""What lies further inside of what a forward reads than one level.

[Note: further inside]
An attribute or a global may be a tuple, an object with slots or a NumPy array. It may
be a class that serves as a namespace, a partial function or a module that is registered
nowhere. It may be a module around the region: of the parts of that one, those count
alone that the region's code may ask for by name. Any of them may hold others, some
levels deep (`self.config.rope["factor"]`). All of it is compared: what has changed is
put back for a re-run, and a forward that changes it does not run again. Where there is
more of it than `MAX_OBJECTS`, or further inside than `MAX_DEPTH`, the region runs once.
Of what installed packages lead to, `INSTALLED_DEPTH` levels are compared. A
`threading.local` is looked at in whichever thread asks: the thread of a re-run gets
what the forward's thread had, for as long as it runs. What goes on from where it stands
and cannot be set back (an iterator, a random generator that is not torch's, Python's or
NumPy's own) makes the region run once. Nobody looks at objects of the standard library,
but for its containers, or of torch, at classes and functions of installed packages, or
at containers of more than `MAX_ITEMS` items.
(tests/ssdtrain/regions/test_deep.py, test_threads.py)
"""

import ctypes
import functools
import gc
import random
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from enum import Enum
from functools import partial
from mmap import mmap
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from queue import Queue, SimpleQueue
from types import (
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssdtrain.regions.inventory import (
    Inventory,
    counts_changes,
    has_plain_attributes,
    slot_names,
)
from ssdtrain.regions.restore import (
    GONE,
    Undo,
    put_attribute,
    put_back,
    put_class,
    put_items,
    put_kind,
)

MAX_ITEMS = 1024
MAX_OBJECTS = 512
"""Of one region that are compared."""
MAX_DEPTH = 16
INSTALLED_DEPTH = 5
MAX_ARRAY_BYTES = 65536
"""A larger array of NumPy's is not compared, and its region runs once."""
PLAIN = (int, float, bool, str, bytes, complex, type(None))
# Of `nn.Module` itself; hooks are looked at by `Watch.hooks`.
STANDARD = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
FIXED = (*PLAIN, Enum, ModuleType, torch.dtype, torch.device)
OURS_OR_STANDARD = frozenset((*sys.stdlib_module_names, "torch", "numpy", "ssdtrain"))
CONTAINERS = frozenset(
    ("argparse", "collections", "configparser", "weakref", "_weakrefset")
)
"""Modules of the standard library whose objects hold what a program puts there."""
VIEWS = (MappingProxyType, *map(type, ({}.keys(), {}.values(), {}.items())))
"""Of a dictionary, which somebody else may change."""
UNCOUNTED = (
    *(bytearray, memoryview, array, mmap, SimpleQueue, Queue, SynchronizedBase),
    *(ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union),
    ctypes._Pointer,
)
"""Nobody counts their changes, or other threads change them."""
PACKAGES = frozenset(("site-packages", "dist-packages"))
CACHED = type(functools.lru_cache(len))
OF_CODE = FunctionType | type | CACHED
_GLOBAL_RANDOM = getattr(random.random, "__self__", None)


class ObjectContents(NamedTuple):
    """An object and what it held."""

    name: str
    """For errors: of the attribute or global that leads to it."""
    value: Any
    kind: type
    """Its class, which a program may change."""
    contents: Any


class Deep:
    """Everything that is compared by contents.

    Args:
        tops: attributes and globals, by what errors call them. One level into lists,
            dictionaries and plain objects among them is somebody else's.
        foreign: the same, of installed packages.
        modules: of the region; they are somebody else's, too.
        asked: names that its code may ask for.
    """

    def __init__(
        self,
        tops: Iterable[tuple[str, Any]],
        foreign: Iterable[tuple[str, Any]],
        modules: Iterable[nn.Module],
        asked: set[str],
    ) -> None:
        self.refusal: str | None = None
        """What cannot be set back; None: nothing."""
        self._held: list[ObjectContents] = []
        own = list(modules)
        self._root = own[0] if own else None
        self._asked = asked
        self._seen = set(map(id, own))
        self._is_foreign = False
        for self._is_foreign, each in ((False, tops), (True, foreign)):
            for name, value in each:
                waiting = [(value, 0)]
                while waiting:  # lists may be in one another deeper than calls may
                    inside = self._visit(name, *waiting.pop())
                    waiting += reversed(list(inside))

    def changed(self) -> str | None:
        """What has changed inside; None: nothing."""
        for name, value, kind, contents in self._held:
            if type(value) is not kind or not _is_same(contents, contents_of(value)):
                return name
        return None

    def put_back(self, undo: Undo) -> None:
        """Let all hold what it held, but for tensors that were written."""
        for _, value, kind, contents in self._held:
            put_kind(value, kind, undo)
            if not _is_same(contents, contents_of(value)):
                put_contents(value, contents, undo)

    def tell(self, inventory: Inventory) -> None:
        """Let an inventory hold what is compared."""
        for _, value, _, _ in self._held:
            if isinstance(value, Tensor):
                inventory.versions((value,))
            elif isinstance(value, dict | list | set | deque):
                inventory.inside(value)
            elif isinstance(value, nn.Module):
                inventory.owner(value)
            elif isinstance(value, type):
                inventory.class_of(value)
            elif isinstance(value, FunctionType):
                inventory.function(value)
            elif _is_told_by_attributes(value):
                inventory.owner(value)
            else:
                inventory.computed(value, contents_of)

    def _visit(self, name: str, value: Any, level: int) -> Iterator[tuple[Any, int]]:
        """Look at an object, and give what is inside."""
        if type(value) in weakref.ProxyTypes:  # says that it is what it leads to
            yield from ((each, level + 1) for each in _behind(value))
            return
        if isinstance(value, FIXED) or id(value) in self._seen:
            return
        if self._is_foreign and level == INSTALLED_DEPTH:
            return
        self._seen.add(id(value))  # `value` lives: its container is held
        if self.refusal is None:
            why = _goes_on(value)
            self.refusal = None if why is None else f"{name} {why}"
        is_around = isinstance(value, nn.Module) and not self._is_apart(value)
        is_elsewhere = level == 0 and _is_looked_into(value)
        contents = None if is_elsewhere else contents_of(value)
        if contents is not None:
            if len(self._held) == MAX_OBJECTS or level == MAX_DEPTH:
                if self.refusal is None and not self._is_foreign:
                    self.refusal = f"{name} holds more than is looked at"
                return
            self._held.append(ObjectContents(name, value, type(value), contents))
        for each in self._named_in(value) if is_around else children_of(value):
            # Containers in containers are one level, as deep as they are.
            is_level = level == 0 or not _are_containers(value, each)
            yield each, level + is_level

    def _named_in(self, module: nn.Module) -> list[Any]:
        """Attributes of a module around the region, and parts that its code may name:
        those of lists have numbers."""
        held = module._modules, module._parameters, module._buffers
        parts = (each for one in held for each in one.items())
        named = [x for name, x in parts if name in self._asked or name.isdigit()]
        return named + _attributes(module)

    def _is_apart(self, module: nn.Module) -> bool:
        """Whether a module has nothing to do with the region's: it is not around it."""
        every = list(module.modules())
        return len(every) <= MAX_OBJECTS and all(m is not self._root for m in every)


def _are_containers(*values: Any) -> bool:
    return all(isinstance(each, dict | list | tuple | set | deque) for each in values)


def _is_looked_into(value: Any) -> bool:
    """Whether [Note: state between forward and backward] covers its first level."""
    if isinstance(value, Tensor | dict | list | set | deque):
        return True
    fixed = FunctionType | MethodType | type | nn.Module | threading.local
    if isinstance(value, fixed) or not hasattr(value, "__dict__"):
        return False
    return not slot_names(value)


def _is_told_by_attributes(value: Any) -> bool:
    """Whether those in its dictionary are all that is compared of an object."""
    return not slot_names(value) and has_plain_attributes(value)


def _goes_on(value: Any) -> str | None:
    """Why a second run would not get the same of it; None: it would."""
    owner = getattr(value, "__self__", value)
    if isinstance(owner, torch.Generator) and owner is not torch.default_generator:
        return "is a generator of its own"
    if isinstance(owner, random.Random) and owner is not _GLOBAL_RANDOM:
        return "is a random state of its own"
    kind = type(owner)
    if str(kind.__module__).startswith("numpy.random") and not _is_numpys_own(owner):
        return "is a random state of its own"
    if isinstance(owner, Iterator):
        return "is an iterator"
    if isinstance(value, ContextVar):
        return "may be another in the thread of a backward"
    if isinstance(value, CACHED) and not is_installed(value.__module__):
        if any(map(contents_of, _cells_of(value.__wrapped__))):
            return "caches what may change"
    return _uncounted(value)


def _uncounted(value: Any) -> str | None:
    """What it is, where nobody counts its changes."""
    kind = type(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        is_plain = kind is numpy.ndarray and not value.dtype.hasobject
        if not is_plain or value.nbytes > MAX_ARRAY_BYTES:
            told = f"is an array ({kind.__name__}) of {value.nbytes} bytes"
            return f"{told}, whose changes nobody counts"
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        is_own = slot_names(value) and not is_installed(kind.__module__)
        return "is a container with slots" if is_own else None
    if isinstance(value, UNCOUNTED):
        return f"is of type {kind.__name__}, whose changes nobody counts"
    return None


def _is_numpys_own(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is None or value is getattr(numpy.random.mtrand, "_rand", None)


def is_standard(module: str | None) -> bool:
    """Whether it is of the standard library, torch, NumPy or ssdtrain."""
    return (module or "").partition(".")[0] in OURS_OR_STANDARD


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether it is of an installed package: its classes and functions stay as they
    are, although objects of them change."""
    if is_standard(module):
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return not PACKAGES.isdisjoint(Path(file).parts)


def children_of(value: Any) -> Iterable[Any]:
    """What is one level inside, as far as it is looked at."""
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        items = value.values() if isinstance(value, dict) else value
        return () if len(value) > MAX_ITEMS else [*items, *_own(value)]
    if isinstance(value, VIEWS):
        return gc.get_referents(value)
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType | weakref.ref):
        return (value.__self__,) if isinstance(value, MethodType) else (value(),)
    if isinstance(value, OF_CODE) and is_installed(value.__module__):
        return ()
    if isinstance(value, FunctionType):
        inner = value.__defaults__ or (), value.__kwdefaults__ or {}
        cells = _cells_of(value)
        return (*inner[0], *inner[1].values(), *cells, *value.__dict__.values())
    if isinstance(value, CACHED | type):
        others = value.__mro__[1:] if isinstance(value, type) else [value.__wrapped__]
        return (*vars(value).values(), *others, type(value))
    if isinstance(value, nn.Module):
        return *_parts(value), *_attributes(value)
    if isinstance(value, Tensor) or not is_users(value):
        is_marked = type(value) is Tensor and bool(value.__dict__)
        return _own(value) if is_marked else ()
    return (
        *getattr(value, "__dict__", {}).values(),
        *_slots(value),
        *type(value).__mro__,
    )


def content_of(cell: Any) -> Any:
    """The value of an enclosing variable; `GONE`: it has none."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return GONE


def _cells_of(function: Any) -> list[Any]:
    return [content_of(cell) for cell in getattr(function, "__closure__", None) or ()]


def _behind(proxy: Any) -> tuple[Any, ...]:
    """What a weak proxy leads to, unless it is gone: whose method it gives out."""
    try:
        return (proxy.__sizeof__.__self__,)
    except ReferenceError:
        return ()


def contents_of(value: Any) -> Any:
    """What is compared of an object; None: nothing of it can change."""
    kind = type(value)
    if isinstance(value, Tensor):
        return [value._version] if counts_changes(value) else None
    if isinstance(value, dict):
        return None if len(value) > MAX_ITEMS else [*value, *value.values()]
    if isinstance(value, list | deque):
        return None if len(value) > MAX_ITEMS else list(value)
    if isinstance(value, set):
        return None if len(value) > MAX_ITEMS else set(value)
    if isinstance(value, FunctionType):
        own = value.__dict__
        defaults, cells = (value.__defaults__, value.__kwdefaults__), _cells_of(value)
        inner = [*defaults, *cells, *own, *own.values()]
        is_told = cells or own or any(defaults)
        return inner if is_told and not is_installed(value.__module__) else None
    if isinstance(value, type):
        inside = vars(value)
        return None if is_installed(value.__module__) else [*inside, *inside.values()]
    if isinstance(value, nn.Module):
        return [*vars(value), *vars(value).values()]
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return [value.tobytes()] if value.nbytes <= MAX_ARRAY_BYTES else None
    if not is_users(value):
        return None
    own = getattr(value, "__dict__", {})
    return [*own, *own.values(), *_slots(value)]


def put_contents(value: Any, contents: Any, undo: Undo) -> None:
    """Let an object hold what `contents_of` gave, if that can be put back."""
    if isinstance(value, dict):
        put_back(value, _paired(contents), undo)
    elif isinstance(value, list | deque | set):
        put_items(value, contents, undo)
    elif isinstance(value, FunctionType):
        _put_function(value, contents, undo)
    elif isinstance(value, type):
        put_class(value, _paired(contents), undo)
    elif isinstance(value, nn.Module):
        put_back(vars(value), _paired(contents), undo)
    elif type(value).__module__ == "numpy":
        _put_array(value, contents[0], undo)
    elif not isinstance(value, Tensor):
        slots = slot_names(value)
        num_own = len(contents) - len(slots)
        put_back(getattr(value, "__dict__", {}), _paired(contents[:num_own]), undo)
        for name, old in zip(slots, contents[num_own:], strict=True):
            now = getattr(value, name, GONE)
            if now is not old:
                put_attribute(value, name, old, now, undo)


def _put_function(value: FunctionType, contents: list[Any], undo: Undo) -> None:
    put_attribute(value, "__defaults__", contents[0], value.__defaults__, undo)
    put_attribute(value, "__kwdefaults__", contents[1], value.__kwdefaults__, undo)
    cells = value.__closure__ or ()
    for cell, old in zip(cells, contents[2:], strict=False):
        now = content_of(cell)
        if now is not old:
            put_attribute(cell, "cell_contents", old, now, undo)
    put_back(value.__dict__, _paired(contents[2 + len(cells) :]), undo)


def _paired(contents: list[Any]) -> dict[Any, Any]:
    """Keys, then their values."""
    half = len(contents) // 2
    return dict(zip(contents[:half], contents[half:], strict=True))


def _put_array(value: Any, contents: bytes, undo: Undo) -> None:
    """NumPy's, whose bytes may be written."""
    if not value.flags.writeable or value.dtype.hasobject:
        return
    if value.nbytes != len(contents):
        return
    now = value.copy()
    value[...] = type(value)(value.shape, value.dtype, contents)

    def undone() -> None:
        value[...] = now

    undo.append(undone)


def _parts(module: nn.Module) -> list[Any]:
    held = module._modules, module._parameters, module._buffers
    return [*(each for one in held for each in one.values()), *held]


def _attributes(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name not in STANDARD]


def _own(container: Any) -> tuple[Any, ...]:
    """The attributes of a container of the program's own kind, or of a tensor."""
    own = getattr(container, "__dict__", None)
    return () if own is None else (own,)


def is_users(value: Any) -> bool:
    """Whether an object is the program's, or holds what a program puts there."""
    kind = type(value)
    if kind is SimpleNamespace or isinstance(value, threading.local):
        return True
    return kind.__module__ in CONTAINERS or not is_standard(kind.__module__)


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The values in slots, by name."""
    for name in slot_names(value):
        yield name, getattr(value, name, GONE)


def _slots(value: Any) -> list[Any]:
    return [each for _, each in slots_of(value)]


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, set):
        return bool(old == new)
    if old is None or new is None:
        return old is new
    return len(old) == len(new) and all(map(_is_alike, old, new))


def _is_alike(old: Any, new: Any) -> bool:
    if old is new:
        return True
    same = type(old) is type(new) and isinstance(old, PLAIN)
    return same and repr(old) == repr(new)  # 0.0 is not -0.0
