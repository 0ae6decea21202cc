"""The arguments of a call as a list, and back.

Torch's `tree_flatten` asks in Python of every value what it is. Most arguments are
plain values or tuples of some, which takes no question; all others are given to it.
"""

import sys
from collections import UserDict
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ssdtrain.errors import RegionError
from ssdtrain.regions.deep import is_installed

LEAVES = frozenset(
    (
        *(Tensor, nn.Parameter, type(None), bool, int, float, str),
        *(torch.dtype, torch.device, torch.Size),
    )
)
"""Types of most values."""
VALUES = (
    *(Tensor, int, float, bool, str, bytes, complex, type(None), Enum, slice, range),
    *(torch.dtype, torch.device, torch.Size, torch.layout),
)
"""Types of arguments that cannot change between forward and backward, or are stored
with their version."""


class Mask(NamedTuple):
    """A mask of flex attention, which is given again itself: its tensors are stored as
    arguments are, and so compared, and all else in it is looked at again."""

    mask: Any
    inside: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    places: tuple[tuple[torch.UntypedStorage, Any], ...]
    """Where their bytes lie: `data` may be another, and no version tells."""

    @property
    def num_leaves(self) -> int:
        """Of its tensors."""
        return len(self.tensors)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing in it is another now, but for bytes."""
        now = tuple(_inside(self.mask))
        if len(now) != len(self.inside) or not all(map(_same, now, self.inside)):
            return False
        return all(
            storage._cdata == before._cdata and part == was
            for (storage, part), (before, was) in zip(
                map(_place, self.tensors), self.places, strict=True
            )
        )

    def again(self) -> Any:
        """The mask. Raises RegionError: something in it is another now."""
        if not self.is_unchanged:
            raise RegionError(
                "a BlockMask that a layer was given was changed between its forward "
                "and backward, so the layer cannot run again; make another mask, or "
                "set recompute='off'."
            )
        return self.mask


class WrappedDict(NamedTuple):
    """A dictionary in an object of Python's, such as the keys and values that layers of
    Gemma 3n share. A re-run gets one of its own, filled as the forward found it."""

    kind: type[UserDict[Any, Any]]
    spec: TreeSpec
    """Of the dictionary."""

    @property
    def num_leaves(self) -> int:
        """Of what is in it."""
        return self.spec.num_leaves

    def of(self, leaves: Iterable[Any]) -> UserDict[Any, Any]:
        """One with these values."""
        made = self.kind.__new__(self.kind)
        vars(made).update(data=tree_unflatten(leaves, self.spec))
        return made


ArgumentPart = int | TreeSpec | Mask | WrappedDict | None
"""Of one argument: None if it is one value, the length of a tuple of values, or how to
make it of its values."""


class Arguments(NamedTuple):
    """How the arguments of a call lie in a list of values."""

    num_args: int
    names: tuple[str, ...]
    """Of the keywords, after those."""
    parts: list[ArgumentPart]

    @property
    def are_unchanged(self) -> bool:
        """Whether all that is given again itself is as it was."""
        return all(part.is_unchanged for part in self.parts if isinstance(part, Mask))

    def of(self, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments and keywords of these values."""
        num_args = self.num_args
        if self.parts.count(None) == len(self.parts):  # each is one value
            keywords = zip(self.names, leaves[num_args:], strict=True)
            return leaves[:num_args], dict(keywords)
        rest = iter(leaves)
        found = [_made(part, rest) for part in self.parts]
        keywords = zip(self.names, found[num_args:], strict=True)
        return found[:num_args], dict(keywords)


def _made(part: ArgumentPart, rest: Iterator[Any]) -> Any:
    if part is None:
        return next(rest)
    if isinstance(part, int):
        return tuple(islice(rest, part))
    if isinstance(part, Mask):
        list(islice(rest, part.num_leaves))
        return part.again()
    if isinstance(part, WrappedDict):
        return part.of(islice(rest, part.num_leaves))
    return tree_unflatten(islice(rest, part.num_leaves), part)


def _is_data_alone(value: UserDict[Any, Any]) -> bool:
    """Whether it has nothing else, in slots neither."""
    slots = [vars(each).get("__slots__") for each in type(value).__mro__]
    return vars(value).keys() == {"data"} and not any(slots)


def flatten(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Arguments]:
    """The values of a call's arguments, in order, and how they lie."""
    leaves: list[Any] = []
    parts: list[ArgumentPart] = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind in LEAVES:
            leaves.append(value)
            parts.append(None)
        elif kind is tuple and LEAVES.issuperset(map(type, value)):
            leaves += value
            parts.append(len(value))
        elif (mask := _mask(value)) is not None:
            leaves += mask.tensors
            parts.append(mask)
        elif isinstance(value, UserDict) and _is_data_alone(value):
            own, spec = tree_flatten(value.data)
            leaves += own
            parts.append(WrappedDict(kind, spec))
        else:
            own, spec = tree_flatten(value)
            leaves += own
            parts.append(spec)
    # Not by its name: a call of Python more.
    given = len(args), tuple(kwargs), parts
    return leaves, tuple.__new__(Arguments, given)


def _mask(value: Any) -> Mask | None:
    """The parts of a mask of flex attention; None: it is none, or holds what may change
    unseen."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None or type(value) is not flex.BlockMask:
        return None
    inside = tuple(_inside(value))
    if any(each is Ellipsis for each in inside):
        return None
    tensors = tuple(each for each in inside if isinstance(each, Tensor))
    return Mask(value, inside, tensors, tuple(map(_place, tensors)))


def _place(tensor: Tensor) -> tuple[torch.UntypedStorage, Any]:
    """The storage, which lives as long as this does, and the part of it."""
    part = tensor.storage_offset(), tensor.size(), tensor.stride()
    return tensor.untyped_storage(), part


def _inside(value: Any, outer: tuple[Any, ...] = ()) -> Iterator[Any]:
    """What a mask, or the function in it, is made of; an ellipsis for what may change
    unseen. `outer`: functions that this is inside of."""
    if isinstance(value, VALUES):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _inside(each, outer)
    elif isinstance(value, FunctionType) and value not in outer:
        steady = is_installed(value.__module__) and value.__kwdefaults__ is None
        yield value if steady else ...
        for cell in value.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # nothing yet
                held = ...
            yield from _inside(held, (*outer, value))
        yield from _inside(value.__defaults__, outer)
    elif type(value).__name__ == "BlockMask":
        for each in vars(value).values():
            yield from _inside(each)
    else:
        yield ...


def _same(now: Any, before: Any) -> bool:
    plain = not isinstance(now, Tensor | FunctionType)
    return now is before or (plain and type(now) is type(before) and now == before)


def may_change(leaf: Any) -> bool:
    """Whether an argument could be another when its call runs again."""
    kind = type(leaf)
    if kind is Tensor or (
        isinstance(leaf, Tensor)
        # Parameters are given again themselves; the others are put together anew.
        and not isinstance(leaf, nn.Parameter)
        and not hasattr(kind, "__tensor_flatten__")
    ):
        return bool(leaf.__dict__) and has_marks(leaf)
    if kind in LEAVES or isinstance(leaf, VALUES):
        return False
    if not isinstance(leaf, FunctionType) or leaf.__closure__ is not None:
        return True
    return not is_installed(leaf.__module__)  # it may read globals of the program's


def has_marks(tensor: Tensor) -> bool:
    """Whether a tensor has attributes of Python's, which are not stored with it. The
    compiler's own tell it of sizes, when it sees them first; an empty type of
    spmd_types (torchtitan) is as good as none."""
    return not all(
        name.startswith("_dynamo") or (name == "_local_type" and value == {})
        for name, value in vars(tensor).items()
    )
