"""What the code of modules reads that is none of their own."""

import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Set
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

from torch import nn

from ssdtrain.regions.deep import (
    CACHED,
    PLAIN,
    content_of,
    is_installed,
    is_standard,
    is_users,
    slots_of,
)
from ssdtrain.regions.inside import is_alike, put_inside, seen, tell_of
from ssdtrain.regions.inventory import MAX_ITEMS, Inventory
from ssdtrain.regions.names import FIRST, Import, names_of
from ssdtrain.regions.restore import (
    GONE,
    Undo,
    put_attribute,
    put_class,
    put_item,
)

FIXED = frozenset(
    (FunctionType, BuiltinFunctionType, MethodType, type, *PLAIN, *weakref.ProxyTypes)
)
FUNCTIONS = FunctionType | BuiltinFunctionType
FIXED_KINDS = (
    *(type, nn.Module, ModuleType, property, staticmethod, classmethod),
    threading.local,
)
"""Kinds of values that are told by identity alone, or have nothing inside; or whose
inside `Deep` alone looks at."""
FOREIGN = frozenset(("builtins", "torch", "numpy", "ssdtrain", "functools", "typing"))
"""Packages whose classes and functions are taken to read what stays."""
DRAWING = frozenset(("random", "numpy"))
ENVIRONMENT = frozenset(("environ", "getenv"))
OTHER_AGAIN = frozenset(
    """
    grad grad_fn is_leaf retains_grad _base _is_view _version register_hook
    register_post_accumulate_grad_hook register_full_backward_hook
    register_full_backward_pre_hook register_multi_grad_hook
    """.split()
)
"""What tells a re-run from a forward: gradients, which backward changes, how an input
was made, and hooks, of which there would be two."""
BY_NAME = frozenset(("eval", "exec", "globals"))
"""Functions by which code may read whatever there is."""
PAST_VERSIONS = frozenset(
    """
    data storage untyped_storage data_ptr numpy asarray asanyarray __array__ to_dlpack
    from_dlpack __dlpack__ swap_tensors
    """.split()
)
"""What leads to a tensor's bytes past its version. Adapters of installed packages name
it, where they are merged."""
ANEW = frozenset("default_rng RandomState SystemRandom urandom secrets".split())
"""What draws other numbers each time, and leaves no state that tells."""
NAMED = PAST_VERSIONS | ANEW
MAX_FUNCTIONS = 64
"""Most functions of a program's own that are looked into for the globals they read."""


class Callee(NamedTuple):
    """A function, and by which name code may call it."""

    name: str
    function: FunctionType
    owner: type | None = None
    """The class that it was found in, if it is of an installed package."""


class Reads:
    """What the code of modules reads that is none of their own: globals, enclosing
    variables and attributes of classes, by identity and one level deep.

    Args:
        classes: of the modules; torch's own are passed over.
        given: functions that they find among their attributes, by name.
        outer: those that none of them calls, though they may reach them.
    """

    def __init__(
        self,
        classes: Iterable[type],
        given: Iterable[Callee] = (),
        outer: Set[Any] = frozenset(),
    ) -> None:
        self._outer = outer
        self._classes: list[type] = []
        self._globals: dict[str, tuple[dict[str, Any], str]] = {}
        self._attributes: dict[str, tuple[type, str]] = {}
        """Of classes of installed packages."""
        self._late: set[str] = set()
        """Modules that its code imports, and that are not there yet."""
        self._cells: list[tuple[Any, str]] = []
        self._foreign: set[int] = set()
        """Ids of those of functions of installed packages."""
        self.may_draw = False
        """Whether it may draw random numbers of Python's or NumPy's."""
        self._named: set[str] = set()
        """Names of these kinds in the program's own code."""
        self._reads_environment = False
        self.asked = {"forward"}
        """Names of whatever its forwards may ask for, in functions that they call."""
        self._loaded: set[str] = set()
        own: list[Callee] = []
        for kind in classes:
            for each in kind.__mro__:
                if _is_foreign(each.__module__ or "") or each in self._classes:
                    continue
                self._classes.append(each)
                own += functions_of_class(each)
        self._of_classes = {each.function for each in own}
        # What a forward calls first: other methods as far as they go.
        seen = dict.fromkeys(self._look_at_all([*own, *given]))
        for call in own:
            _, function, _ = call
            if len(seen) < MAX_FUNCTIONS and not _is_taken_to_stay(function):
                self._look_at(call, is_called=False)
                seen[function] = None
        self._functions = list(seen)
        told = sorted(self.asked & OTHER_AGAIN) + sorted(self._loaded & BY_NAME)
        told += sorted(self._named)
        self.refusal = f"its code names {told[0]}" if told else None
        """Why it cannot run again; None: it can."""

    def _look_at_all(self, waiting: list[Callee]) -> Iterator[FunctionType]:
        """Look at those of these functions that a forward may call, and at what they
        find."""
        seen: set[FunctionType] = set()
        while True:
            called = [each for each in waiting if self._calls(each.name)]
            if not called:
                return
            waiting = [each for each in waiting if not self._calls(each.name)]
            for call in called:
                _, function, _ = call
                if function in seen or _is_taken_to_stay(function):
                    continue
                if function in self._outer and function not in self._of_classes:
                    continue
                if len(seen) == MAX_FUNCTIONS:
                    self.may_draw = True
                    return
                seen.add(function)
                yield function
                waiting += self._look_at(call, is_called=True)

    def _calls(self, name: str) -> bool:
        """Whether a forward may call what has this name."""
        return name in self.asked or name.startswith("__")  # by an operator

    def _look_at(self, call: Callee, *, is_called: bool) -> list[Callee]:
        _, function, _ = call
        space = function.__globals__
        found: list[Callee] = []
        names, imported, chains, asked = names_of(function.__code__)
        is_own = is_called and not is_installed(function.__module__)
        if is_called:
            self._loaded |= names
            self.asked |= names | asked | set(function.__code__.co_freevars)
        if is_own:
            self._named |= NAMED & asked | ANEW & (names | imported)
        for root, *inner in chains:
            found += self._follow(self._root(root, call), inner)
        self.may_draw |= not DRAWING.isdisjoint(imported)
        named = names.union(*(inner for _, *inner in chains))
        self._reads_environment |= not ENVIRONMENT.isdisjoint(named)
        for name in names:
            value = space.get(name, GONE)
            self.may_draw |= _draws(value)
            if value is GONE or isinstance(value, ModuleType):
                continue
            self._globals[f"{id(space)} {name}"] = space, name
            found += functions_of(name, value)
            if is_own and isinstance(value, FUNCTIONS | type):  # `import x as y`
                if is_installed(value.__module__):
                    self._named |= NAMED & {value.__name__}
        cells = function.__closure__ or ()
        for cell, name in zip(cells, function.__code__.co_freevars, strict=True):
            value = content_of(cell)
            self.may_draw |= _draws(value)
            found += functions_of(name, value)
            self._cells.append((cell, name))
            if is_installed(function.__module__):
                self._foreign.add(id(cell))
        return found

    def _root(self, root: Any, call: Callee) -> Any:
        """What a chain of names begins with; `GONE`: nothing that is known."""
        _, function, owner = call
        if root is FIRST:
            return GONE if owner is None else owner
        if isinstance(root, Import):
            name = root.name
            if root.level:
                package = str(function.__globals__.get("__package__"))
                name = ".".join((*package.split(".")[: 1 - root.level or None], name))
                name = name.rstrip(".")
            if name not in sys.modules and not is_standard(name):
                self._late.add(name)
            return sys.modules.get(name, GONE)
        if root in function.__code__.co_freevars:
            at = function.__code__.co_freevars.index(root)
            return content_of((function.__closure__ or ())[at])
        return function.__globals__.get(root, GONE)

    def _follow(self, value: Any, names: list[str]) -> Iterator[Callee]:
        """Into modules and classes of installed packages: `library.Context.current`.
        Of torch functions alone: a program may put others in their place."""
        for name in names:
            owner = None
            if isinstance(value, ModuleType):
                of_torch = value.__name__.partition(".")[0] == "torch"
                if is_standard(value.__name__) and not of_torch:
                    return
                space = vars(value)
                value = space.get(name, GONE)
                is_function = isinstance(value, FUNCTIONS)
                if is_function or not (of_torch or isinstance(value, ModuleType)):
                    self._globals[f"{id(space)} {name}"] = space, name
            elif isinstance(value, type) and is_installed(value.__module__):
                if is_standard(value.__module__):
                    return
                owner, value = value, GONE
                for kind in owner.__mro__[:-1]:  # one in front may get it later
                    self._attributes[f"{id(kind)} {name}"] = kind, name
                    value = _of_class(kind, name)
                    if value is not GONE:
                        break
            else:  # all of a program's own is looked at
                return
            for each in functions_of(name, value):
                yield each if owner is None else each._replace(owner=owner)

    @property
    def came(self) -> str | None:
        """A module that has been imported since the code was looked at, and that it
        reads; None: there is none."""
        for name in self._late:
            if name in sys.modules:
                return name
        return None

    def values(self) -> list[Any]:
        """As they are now."""
        found = [_seen(space.get(name, GONE)) for space, name in self._globals.values()]
        found += [_seen(_of_class(*each)) for each in self._attributes.values()]
        found += [_seen(content_of(cell)) for cell, _ in self._cells]
        for kind in self._classes:
            found.append({name: _seen(value) for name, value in vars(kind).items()})
        return found

    def tops(self) -> Iterator[tuple[str, Any]]:
        """What `values` gives, with what errors call it, but for `foreign`: classes
        item by item."""
        for space, name in self._globals.values():
            if not is_installed(space.get("__name__")):
                yield f"the global {name}", space.get(name)
        for cell, name in self._cells:
            if id(cell) not in self._foreign:
                yield f"{name} of a function around it", content_of(cell)
        if self._reads_environment:
            # Not `os.environ`: nobody looks into objects of the standard library.
            yield "the environment", (os.environ._data,)  # type: ignore[attr-defined]
        for function in self._functions:
            yield f"the defaults of {function.__name__}", function
        for kind in self._classes:
            for value in vars(kind).values():
                yield f"an attribute of the class {kind.__name__}", value

    def foreign(self) -> Iterator[tuple[str, Any]]:
        """What `values` gives of installed packages, with what errors call it."""
        for space, name in self._globals.values():
            if is_installed(space.get("__name__")):
                yield f"the global {name}", space.get(name)
        for kind, name in self._attributes.values():
            yield f"{name} of the class {kind.__name__}", _of_class(kind, name)
        for cell, name in self._cells:
            if id(cell) in self._foreign:
                yield f"{name} of a function around it", content_of(cell)

    def tell(self, inventory: Inventory) -> None:
        """Let an inventory hold what `values` reads."""
        for space, name in self._globals.values():
            inventory.global_of(space, name)
            _tell_of(space.get(name), inventory)
        for kind, name in self._attributes.values():
            inventory.class_of(kind)
            _tell_of(_of_class(kind, name), inventory)
        for cell, _ in self._cells:
            inventory.cell(cell)
            _tell_of(content_of(cell), inventory)
        for kind in self._classes:
            inventory.class_of(kind)
            for value in vars(kind).values():
                _tell_of(value, inventory)

    def changed(self, values: list[Any]) -> str | None:
        """One that is another, or holds something else; None: there is none."""
        for number, (old, new) in enumerate(zip(values, self.values(), strict=True)):
            if old is not new and not is_alike(old, new):
                return self._name(number)
        return None

    def put_back(self, values: list[Any], undo: Undo) -> None:
        """Let all be as `values` gave it, but for tensors that were written."""
        waiting = iter(values)
        for space, name in self._globals.values():
            value = put_inside(next(waiting), undo)
            put_item(space, name, value, undo)
        for kind, name in self._attributes.values():
            value, now = put_inside(next(waiting), undo), _of_class(kind, name)
            if value is not now:
                put_attribute(kind, name, value, now, undo, type)
        for cell, _ in self._cells:
            value, now = put_inside(next(waiting), undo), content_of(cell)
            if value is not now:
                put_attribute(cell, "cell_contents", value, now, undo)
        for kind, own in zip(self._classes, waiting, strict=True):
            before = {name: put_inside(value, undo) for name, value in own.items()}
            put_class(kind, before, undo)

    def _name(self, number: int) -> str:
        names = [f"the global {name}" for _, name in self._globals.values()]
        names += [
            f"{name} of the class {kind.__name__}"
            for kind, name in self._attributes.values()
        ]
        names += [f"{name} of a function around it" for _, name in self._cells]
        names += [
            f"an attribute of the class {kind.__name__}" for kind in self._classes
        ]
        return names[number]


def functions_of(name: str, value: Any, depth: int = 3) -> Iterator[Callee]:
    """The functions of Python that may run where a name of this value is used: itself,
    those in a container, and the methods of a class of the program's own, also where
    the value is an object of it; and what such an object holds."""
    if isinstance(value, FunctionType):
        yield Callee(name, value)
    elif not depth:
        return
    elif not isinstance(value, type):
        for each in _leading_from(value):
            yield from functions_of(name, each, depth - 1)
        for inner, each in _held_by(value):
            yield from functions_of(inner, each, depth - 1)
    elif not is_installed(value.__module__):
        yield from functions_of_class(value)


def _leading_from(value: Any) -> Iterable[Any]:
    """What a value calls, or holds, or what class it is of."""
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, partial):
        return (value.func,)
    if isinstance(value, CACHED):
        return (value.__wrapped__,)
    if isinstance(value, staticmethod | classmethod | MethodType):
        return (value.__func__,)
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return list(items) if len(value) <= MAX_FUNCTIONS else ()
    return () if isinstance(value, PLAIN) else type(value).__mro__


def _held_by(value: Any) -> Iterable[tuple[str, Any]]:
    """Attributes of an object that is none of torch's or the standard library's."""
    if isinstance(value, (*PLAIN, nn.Module)) or not is_users(value):
        return ()
    return [*getattr(value, "__dict__", {}).items(), *slots_of(value)]


def functions_of_class(kind: type) -> Iterator[Callee]:
    """Its methods; not what makes its objects."""
    for name, value in vars(kind).items():
        if name != "__init__" and not isinstance(value, type):
            yield from functions_of(name, value, depth=1)


def _is_taken_to_stay(function: FunctionType) -> bool:
    """Whether it is of a package whose functions are taken to read what stays."""
    own = str(function.__globals__.get("__name__"))
    return _is_foreign(function.__module__ or "") or _is_foreign(own)


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in FOREIGN


def _draws(value: Any) -> bool:
    """Whether it is a generator, a method of one, or a module that has some."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in DRAWING
    owner = getattr(value, "__self__", value)
    home = "" if isinstance(owner, ModuleType) else type(owner).__module__
    return str(home).partition(".")[0] in DRAWING


def _of_class(kind: type, name: str) -> Any:
    return vars(kind).get(name, GONE)


def _is_fixed(value: Any) -> bool:
    return type(value) in FIXED or isinstance(value, FIXED_KINDS)


def _seen(value: Any) -> Any:
    """A value, with what is inside where that may change."""
    return value if _is_fixed(value) else seen(value, MAX_ITEMS)


def _tell_of(value: Any, inventory: Inventory) -> None:
    """Let an inventory hold what `_seen` holds besides the value."""
    if not _is_fixed(value):
        tell_of(value, inventory, MAX_ITEMS)
