"""Tells in one pass whether something that a forward reads or may change is another.

[Note: one pass]
The state of a region's modules is asked for three times a call: before and behind its
forward, and before that runs again. To gather it by name and compare it takes about
0.1 ms a time for a decoder layer, all of it Python, and almost always nothing has
changed. So whoever gathers it leaves an `Inventory`: into which containers it went,
and which tensors it met. All of them are read again without a call of Python into a
`Fingerprint`, and two of those are compared object by object with `is`, and sizes and
versions with `==`. Equal fingerprints mean that everything gathered is as it was. Where
they differ it is gathered and compared by name: only that tells an equal number from a
change, or what has changed.
(tests/ssdtrain/regions/test_inventory.py)
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

MAX_ITEMS = 64
"""A larger list or dictionary of a program's globals is compared by identity alone."""
NOTHING = object()
"""Where a variable has no value."""
UNREAD = frozenset(
    """
    _non_persistent_buffers_set _backward_pre_hooks _backward_hooks
    _is_full_backward_hook _forward_hooks_with_kwargs _forward_hooks_always_called
    _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks
    """.split()
)
"""Attributes of every module that a forward without hooks does not read."""
HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
"""Hooks of `register_module_forward_hook` and its like."""
VERSION, REQUIRES_GRAD = attrgetter("_version"), attrgetter("requires_grad")
CONTENT = attrgetter("cell_contents")
# As Python finds it; a class may compute what it gives out, in Python.
OWN: Any = object.__getattribute__


def counts_changes(value: Any) -> bool:
    """Whether it is a tensor, and none of inference mode."""
    return isinstance(value, Tensor) and not value.is_inference()


class Fingerprint(NamedTuple):
    """What an `Inventory` holds at one time."""

    numbers: list[Any]
    """Sizes of containers, versions of tensors, whether gradients are required, bytes
    of arrays."""
    objects: list[Any]

    def is_same(self, other: "Fingerprint") -> bool:
        """Whether all objects are the same ones, and all numbers are equal."""
        if self.numbers != other.numbers or len(self.objects) != len(other.objects):
            return False
        return all(map(is_, self.objects, other.objects))


class Inventory:
    """The containers and tensors that hold the state of some modules."""

    def __init__(self) -> None:
        self.is_blind = False
        """Whether something cannot be read so: nothing is ever known to be the same."""
        self._owners: list[Any] = []
        self._picked: list[Any] = []
        self._pickers: list[Any] = []
        """What gives the values of known names of those."""
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Any] = []
        self._large: list[Any] = []
        self._tensors: list[Tensor] = []
        self._parameters: list[Tensor] = []
        self._spaces: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._cells: list[Any] = []
        self._contexts: list[ContextVar[Any]] = []
        self._computed: list[tuple[Any, Callable[[Any], Any]]] = []
        self._seen: set[int] = set()

    # -- what is read -------------------------------------------------------------

    def module(self, module: nn.Module, *, hooks: bool) -> None:
        """Attributes, parameters, buffers and submodules.

        Args:
            hooks: whether its forward hooks are looked at.
        """
        self.owner(module, UNREAD)
        for held in (module._parameters, module._buffers, module._modules):
            self.dictionary(held)
        if hooks:
            self.dictionary(module._forward_hooks)
            self.dictionary(module._forward_pre_hooks)
        self.versions(module._buffers.values())
        parameters = module._parameters.values()
        self._parameters += [each for each in parameters if each is not None]

    def owner(self, value: Any, passed: frozenset[str] = frozenset()) -> None:
        """The attributes of an object, but for those of these names."""
        try:
            own: Any = OWN(value, "__dict__")
        except AttributeError:
            own = None
        if own is None or getattr(value, "__dict__", None) is not own:
            self.is_blind = True  # its class computes them
        elif self._is_new(value):
            self._owners.append(value)
            self._pick(own, passed)

    def dictionary(self, value: dict[Any, Any]) -> None:
        """Keys and values, in order."""
        if self._is_new(value):
            self._dicts.append(value)

    def class_of(self, kind: type) -> None:
        """The attributes of a class."""
        if self._is_new(kind):
            self._pick(vars(kind))

    def _pick(self, held: Any, passed: frozenset[str] = frozenset()) -> None:
        """By name: with as many names as before there is no other name."""
        names = [name for name in held if name not in passed]
        if not names:
            names = list(held)
        self._picked.append(held)
        if names:  # of a single one it would give no tuple
            self._pickers.append((itemgetter(names[0], *names), held))

    def versions(self, values: Iterable[Any]) -> None:
        """Of the tensors among them that count their changes."""
        self._tensors += [each for each in values if counts_changes(each)]

    def inside(self, value: Any, most: int | None = None) -> Iterable[Any]:
        """One level into a container or an object: its items.

        Args:
            most: of a larger one no more than that it is larger.
        """
        items: Any = value
        if isinstance(value, dict):
            add: Any = self.dictionary
        elif isinstance(value, list | set | deque):
            add = self._add_list
        else:
            items, add = getattr(value, "__dict__", None), self.owner
            if not isinstance(items, dict):
                return ()
        if most is not None and len(items) > most:
            if self._is_new(items):
                self._large.append(items)
            return ()
        add(value)
        return items.values() if isinstance(items, dict) else items

    def global_of(self, space: dict[str, Any], name: str) -> None:
        """A variable of a module of Python."""
        self._spaces.append(space)
        self._names.append(name)

    def cell(self, cell: Any) -> None:
        """A variable of an enclosing function."""
        try:
            CONTENT(cell)
        except ValueError:  # not filled yet
            self.is_blind = True
        else:
            self._cells.append(cell)

    def context(self, variable: "ContextVar[Any]") -> None:
        """A context variable."""
        self._contexts.append(variable)

    def computed(self, value: Any, contents: Callable[[Any], Any]) -> None:
        """An object of a rare kind, by calls of Python.

        Args:
            contents: gives a list of what it holds.
        """
        if self._is_new(value):
            self._computed.append((value, contents))

    def _add_list(self, value: Any) -> None:
        if self._is_new(value):
            self._lists.append(value)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))  # it lives as long as this: whoever asks keeps it
        return True

    # -- the pass ------------------------------------------------------------------

    def fingerprint(self) -> Fingerprint:
        """All of it, as it is now.

        Raises:
            KeyError: an attribute is gone.
            ValueError: a variable is.
        """
        dicts, lists = self._dicts, self._lists
        numbers: list[Any] = [
            *map(len, self._picked),
            *map(len, dicts),
            *map(len, lists),
            *map(VERSION, self._tensors),
            *map(REQUIRES_GRAD, self._parameters),
            *[len(each) > MAX_ITEMS for each in self._large],
        ]
        objects = [
            *map(OWN, self._owners, repeat("__dict__")),
            *chain.from_iterable([pick(held) for pick, held in self._pickers]),
            *chain.from_iterable(dicts),
            *chain.from_iterable(map(dict.values, dicts)),
            *chain.from_iterable(lists),
            *map(dict.get, self._spaces, self._names),
            *map(CONTENT, self._cells),
            *map(ContextVar.get, self._contexts, repeat(NOTHING)),
        ]
        for value, contents in self._computed:
            for each in contents(value):
                # Bytes of an array are others in each look.
                (numbers if type(each) is bytes else objects).append(each)
        return Fingerprint(numbers, objects)
