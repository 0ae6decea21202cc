"""What code names, from its bytecode."""

import dis
from types import CodeType
from typing import Any, NamedTuple

SILENT = frozenset(("CACHE", "COPY", "DUP_TOP", "EXTENDED_ARG", "NOP", "PUSH_NULL"))
"""Instructions that may stand between a global and what is loaded of it."""
ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"))
"""Python 3.12 and later load `super().name` by the last one."""
LOADS = frozenset(("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF"))
STORES = frozenset(("STORE_FAST", "STORE_DEREF", "STORE_NAME"))
IMPORTS = frozenset(("IMPORT_NAME", "IMPORT_FROM"))
FIRST = "first argument"
"""Where a chain of names begins: of a method, its object or class."""


class Import(NamedTuple):
    """A module that code imports when it runs."""

    name: str
    level: int
    """Dots in front of the name."""


class Names(NamedTuple):
    """What code names."""

    loaded: set[str]
    """Globals."""
    imported: set[str]
    """Packages."""
    chains: set[tuple[Any, ...]]
    """What it loads of globals, of what it imports, and of its first argument:
    `settings.SCALE`. They begin with a name, an `Import` or `FIRST`."""
    asked: set[str]
    """Attributes of anything, and strings, which `getattr` may be given."""


class Reader:
    """Reads one code object's instructions into `Names`.

    Args:
        known: chains that variables stand for when it begins.
    """

    def __init__(
        self, names: Names, code: CodeType, known: dict[str, tuple[Any, ...]]
    ) -> None:
        self._names = names
        self._code = code
        self._known = dict(known)
        self._chain: tuple[Any, ...] = ()
        """What the last instruction has loaded."""
        self._imported: tuple[Any, ...] = ()
        """What is imported, and not stored yet."""
        self._module = Import("", 0)
        self._is_from = False
        self._constants: list[Any] = []
        self._before = ""

    def read(self) -> None:
        """Read all of it, and of the functions inside."""
        for step in dis.get_instructions(self._code):
            if step.opname in SILENT:
                continue
            last, self._chain = self._chain, ()
            if step.opname in ATTRIBUTES:
                self._attribute(step.argval, last)
            elif step.opname in STORES:
                self._known[step.argval] = self._imported or last
                self._imported = ()
            elif step.opname in IMPORTS:
                self._import(step.argval, is_part=step.opname == "IMPORT_FROM")
            else:
                self._load(step.opname, step.argval)
            self._before = step.argval if isinstance(step.argval, str) else ""
        for constant in self._code.co_consts:
            if isinstance(constant, CodeType):
                Reader(self._names, constant, self._known).read()
            elif isinstance(constant, str):
                self._names.asked.add(constant)

    def _attribute(self, name: str, last: tuple[Any, ...]) -> None:
        if self._before != "autograd":  # `torch.autograd.grad`
            self._names.asked.add(name)
        if last:
            self._chain = *last, name
            self._names.chains.add(self._chain)

    def _load(self, how: str, value: Any) -> None:
        if how in ("LOAD_GLOBAL", "LOAD_NAME"):
            self._chain = (value,)
            self._names.loaded.add(value)
        elif how in LOADS:
            is_free = value in self._code.co_freevars
            self._chain = self._known.get(value, (value,) if is_free else ())
        elif how == "LOAD_CONST":
            self._constants.append(value)

    def _import(self, name: str, *, is_part: bool) -> None:
        if not is_part:
            level, parts = self._constants[-2:]
            self._module, self._is_from = Import(name, level), bool(parts)
            self._names.imported.add(name.partition(".")[0])
            self._names.chains.add((self._module,))
            # `import a.b` gives `a`; `import a.b as c` takes its parts one by one.
            self._imported = (Import(name.partition(".")[0], level),)
        elif self._is_from:
            self._imported = self._module, name
            self._names.chains.add(self._imported)
            self._names.asked.add(name)
        else:
            self._imported = (self._module,)


def names_of(code: CodeType) -> Names:
    """All that code names, functions inside of it included."""
    first = code.co_varnames[: min(1, code.co_argcount)]
    names = Names(set(), set(), set(), set())
    Reader(names, code, {name: (FIRST,) for name in first}).read()
    return names
