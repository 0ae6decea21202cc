"""Tells in one pass whether something that a forward reads or may change is another.

[Note: one pass]
The state of a region's modules is asked for three times a call: before and after its
forward, and before that runs again. To gather it by name and compare it takes about
0.1 ms a time for a decoder layer, all of it Python, and almost always nothing has
changed. So whoever gathers it leaves an `Inventory`: into which containers it went,
and which tensors it met. All of them are read again without a call of Python into a
`Fingerprint`: the version that Python counts for each dictionary, which torch.compile
asks for as well, versions of tensors, sizes, and objects, which are compared with `is`.
Equal fingerprints mean that everything gathered is as it was. Where they differ it is
gathered and compared by name: only that tells an equal number from a change, or what
has changed.
(tests/ssdtrain/regions/test_inventory.py)
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, compress, repeat
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version
from torch.nn.parameter import is_lazy

MAX_ITEMS = 65536
"""A larger list or dictionary of a program's globals is compared by identity alone."""
HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
"""Hooks of `register_module_forward_hook` and its like."""
VERSION, REQUIRES_GRAD = attrgetter("_version"), attrgetter("requires_grad")
CONTENT = attrgetter("cell_contents")
DEFAULTS = attrgetter("__defaults__")
KEYWORD_DEFAULTS = attrgetter("__kwdefaults__")
# As Python finds it; a class may compute what it gives out, in Python.
OWN: Any = object.__getattribute__
MADE_BY_PYTHON = 1 << 9
"""The flag of classes that a program has made (`Py_TPFLAGS_HEAPTYPE`)."""


def counts_changes(value: Any) -> bool:
    """Whether it is a tensor with memory, and none of inference mode."""
    return isinstance(value, Tensor) and not (is_lazy(value) or value.is_inference())


class Fingerprint(tuple[list[Any], list[Any]]):
    """What an `Inventory` holds at one time: numbers (versions of dictionaries and
    tensors, sizes of other containers, whether gradients are required, bytes of
    arrays), and objects. A tuple: made without a call of Python."""

    __slots__ = ()

    def is_same(self, other: "Fingerprint") -> bool:
        """Whether all objects are the same ones, and all numbers are equal."""
        (numbers, objects), (others, other_objects) = self, other
        if numbers != others or len(objects) != len(other_objects):
            return False
        return all(map(is_, objects, other_objects))


class Inventory:
    """The containers and tensors that hold the state of some modules."""

    def __init__(self) -> None:
        self.is_blind = False
        """Whether something cannot be read so: nothing is ever known to be the same."""
        self._owners: list[Any] = []
        self._kinds: list[Any] = []
        """Containers whose class may change."""
        self._written: list[dict[Any, Any]] = []
        """Dictionaries told by their version."""
        self._dicts: list[dict[Any, Any]] = []
        """And by what is in them."""
        self._hooks: list[dict[Any, Any]] = []
        """The same, of hooks."""
        self._returning: list[dict[Any, Any]] = []
        """The same, of what may be replaced and put back."""
        self._empty: list[dict[Any, Any]] = []
        """Of these four, those that were empty; and those whose order may change
        without their version, which is never told."""
        self._filled: list[dict[Any, Any]] = []
        """The others."""
        self._lists: list[Any] = []
        self._large: list[Any] = []
        self.tensors: list[Tensor] = []
        """Told by their versions: buffers, and what is no module's."""
        self._parameters: list[Tensor] = []
        self._marked: list[Tensor] = []
        self._asked: set[str] = set()
        """Attributes of these by which they are told."""
        self._spaces: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._cells: list[Any] = []
        self._functions: list[Any] = []
        self._computed: list[tuple[Any, Callable[[Any], Any]]] = []
        self._seen: set[int] = set()

    # -- what is read -------------------------------------------------------------

    def module(self, module: nn.Module, *, hooks: bool, unread: set[int]) -> None:
        """Attributes, parameters, buffers and submodules.

        Args:
            hooks: whether its forward hooks are looked at.
            unread: ids of buffers that may be written.
        """
        self.owner(module)
        self.dictionary(module._modules)
        # FSDP2 takes the weights of a forward out and puts them back for backward.
        for held in (module._parameters, module._buffers):
            self.dictionary(held, comes_back=True)
        if hooks:
            self.hooks(module._forward_hooks)
            self.hooks(module._forward_pre_hooks)
        buffers = module._buffers.values()
        self.versions(each for each in buffers if id(each) not in unread)
        parameters = module._parameters.values()
        self._parameters += [each for each in parameters if each is not None]

    def marks_of_tensors(self, module: nn.Module, asked: set[str]) -> None:
        """Those attributes of its parameters and buffers that have these names."""
        tensors = (*module._parameters.values(), *module._buffers.values())
        self._marked += [each for each in tensors if each is not None]
        self._asked = asked

    def owner(self, value: Any) -> None:
        """The attributes of an object."""
        own = _own_of(value)
        if own is None:
            self.is_blind = True
            return
        if self._is_new(value):
            self._owners.append(value)
        self.dictionary(own)

    def dictionary(self, value: dict[Any, Any], *, comes_back: bool = False) -> None:
        """Keys and values, in order.

        Args:
            comes_back: whether what is in it may be replaced and put back.
        """
        told = self._written if type(value) is dict else self._dicts
        self._dictionary(value, self._returning if comes_back else told)

    def hooks(self, value: dict[Any, Any]) -> None:
        """Hooks of a module, or of all."""
        self._dictionary(value, self._hooks)

    def _dictionary(self, value: dict[Any, Any], kind: list[dict[Any, Any]]) -> None:
        if not self._is_new(value):
            return
        kind.append(value)
        is_told = len(value) > 0 and type(value) is dict
        (self._filled if is_told else self._empty).append(value)

    def class_of(self, kind: type) -> None:
        """The attributes of a class."""
        # Python gives out a view of the dictionary; this is what it refers to.
        held = gc.get_referents(vars(kind))
        if len(held) == 1 and type(held[0]) is dict:
            self.dictionary(held[0])
        else:
            self.is_blind = True

    def versions(self, values: Iterable[Any]) -> None:
        """Of the tensors among them that count their changes."""
        self.tensors += [each for each in values if counts_changes(each)]

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
        if items is value and type(value).__flags__ & MADE_BY_PYTHON:
            self._kinds.append(value)
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

    def function(self, value: FunctionType) -> None:
        """Its attributes, the defaults of its arguments, and enclosing variables."""
        if id(value) not in self._seen:
            self._functions.append(value)
            for cell in value.__closure__ or ():
                self.cell(cell)
        self.owner(value)

    def computed(self, value: Any, contents: Callable[[Any], Any]) -> None:
        """An object of a rare kind, by calls of Python, whatever else is told of it.

        Args:
            contents: gives a list of what it holds.
        """
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

    def fingerprint(
        self, *, returning: bool = True, versions: bool = True
    ) -> Fingerprint:
        """All of it, as it is now.

        Args:
            returning: with hooks, and with what may be replaced and put back.
            versions: with those of dictionaries and tensors, which only grow: where a
                forward has left them as they were, it has written nothing in between.

        Raises:
            ValueError: a variable has no value any more.
        """
        dicts = self._dicts
        if returning:
            dicts = dicts + self._hooks + self._returning
        numbers: list[Any] = [*map(len, dicts)]
        filled = [*compress(dicts, numbers)]  # most are empty: hooks
        objects = [*chain.from_iterable([*filled, *map(dict.values, filled)])]
        if versions:
            numbers += map(dict_version, self._written)
            numbers += map(VERSION, self.tensors)
        for own in map(OWN, self._marked, repeat("__dict__")):
            for name in own:  # most have none
                if name in self._asked:
                    objects += (name, own[name])
        return self._with_others(numbers, objects)

    def glance(self) -> Fingerprint | None:
        """All of it with `versions`, told by versions alone: it differs wherever the
        fingerprint does, and elsewhere. It takes less time. None: it cannot be told."""
        if any(self._empty):
            return None
        numbers: list[Any] = [
            *map(dict_version, self._filled),
            *map(VERSION, self.tensors),
        ]
        objects = [*map(OWN, self._marked, repeat("__dict__"))]
        numbers += map(dict_version, objects)
        try:
            return self._with_others(numbers, objects)
        except ValueError:  # a variable has no value any more
            return None

    def _with_others(self, numbers: list[Any], objects: list[Any]) -> Fingerprint:
        """With what is no dictionary."""
        lists, functions = self._lists, self._functions
        numbers += map(REQUIRES_GRAD, self._parameters)
        objects += map(OWN, self._owners, repeat("__dict__"))
        objects += map(type, self._owners)
        objects += map(type, self._kinds)
        objects += map(dict.get, self._spaces, self._names)
        objects += map(CONTENT, self._cells)
        if lists:
            numbers += map(len, lists)
            objects += chain.from_iterable(lists)
        if functions:
            objects += map(DEFAULTS, functions)
            objects += map(KEYWORD_DEFAULTS, functions)
        if self._large:
            numbers += [len(each) > MAX_ITEMS for each in self._large]
        for value, contents in self._computed:
            objects.append(type(value))
            for each in contents(value):
                # Bytes of an array are others in each look.
                (numbers if type(each) is bytes else objects).append(each)
        return Fingerprint((numbers, objects))


def has_plain_attributes(value: Any) -> bool:
    """Whether they are in a dictionary that its class gives out as it is."""
    return _own_of(value) is not None


def slot_names(value: Any) -> list[str]:
    """Of the slots that classes of Python gave an object."""
    names: list[str] = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name[:2] != "__":
                names.append(name)
            elif name[-2:] != "__":  # Python puts the class in front
                names.append(f"_{kind.__name__.lstrip('_')}{name}")
    return names


def _own_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object; None: its class computes them."""
    try:
        own = OWN(value, "__dict__")
    except AttributeError:
        return None
    given = getattr(value, "__dict__", None)
    return own if given is own and isinstance(own, dict) else None
