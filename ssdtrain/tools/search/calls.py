"""One call of an ATen operator, as descriptions read it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.language import Description, Tensor
from ssdtrain.tools.search.strategies import Shape


@dataclass(frozen=True)
class OperatorCall:
    """An operator, the shapes of its operands and results, and its other arguments."""

    func: Any
    """Such as `torch.ops.aten.mm.default`."""
    arguments: Mapping[str, Any]
    """By the schema's names; tensors are `language.Tensor`."""
    results: tuple[Shape, ...]

    @property
    def name(self) -> str:
        """Such as `aten::mm`; in-place operators go by the name of the other."""
        return operator_name(self.func)

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    @property
    def tensors(self) -> list[Tensor]:
        """Operands, in the order of the schema."""
        leaves = tree_leaves(list(self.arguments.values()))
        return [x for x in leaves if isinstance(x, Tensor)]

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of the operands."""
        return [tensor.shape for tensor in self.tensors]

    @property
    def ranks(self) -> list[int]:
        """Ranks of the results."""
        return [len(shape) for shape in self.results]


def operator_name(func: Any) -> str:
    """Return an operator's name without its overload, and without `_` in place."""
    name = str(func._schema.name)
    return name.removesuffix("_") if not name.endswith("__") else name


def call_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
) -> OperatorCall:
    """Return what a call on real (or meta) tensors looked like."""
    count = 0

    def operand(tensor: torch.Tensor) -> Tensor:
        nonlocal count
        count += 1
        return Tensor(count - 1, tensor.shape)

    given: dict[str, Any] = bound(func, args, kwargs)
    named = tree_map_only(torch.Tensor, operand, given)
    made = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
    return OperatorCall(func, named, tuple(tuple(x.shape) for x in made))


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by their names, defaults included."""
    found = {}
    for at, argument in enumerate(func._schema.arguments):
        if at < len(args):
            found[argument.name] = args[at]
        else:
            found[argument.name] = kwargs.get(argument.name, argument.default_value)
    return found


Describer = Callable[[OperatorCall], Description]
_TABLE: dict[str, Describer] = {}


def aten(names: str) -> list[str]:
    """Return the full names of operators."""
    return [f"aten::{name}" for name in names.split()]


def describes(*names: str) -> Callable[[Describer], Describer]:
    """Register the description of operators, such as `aten::mm`."""

    def register(function: Describer) -> Describer:
        for name in names:
            if name in _TABLE:
                raise ConfigError(f"{name} expects one description, got two")
            _TABLE[name] = function
        return function

    return register


def described_names() -> list[str]:
    """Return operators that have a description of their own."""
    return sorted(_TABLE)


def describer_of(name: str) -> Describer | None:
    """Return the describer of an operator that has one of its own."""
    return _TABLE.get(name)
