"""Derivatives of compiled programs beyond the first, and `torch.func`.

[Note: gradients of gradients] A compiled backward is no function that PyTorch could
differentiate, but its expressions are a program like any other. Where a gradient is to
have gradients (`create_graph=True`), that program is compiled and run instead, on what
forward saved, with a backward of its own; and so on for every order. It reads inputs
that gradients depend on, which are saved next to the rest: few, such as the scores of
attention. Transformations of `torch.func` know PyTorch's operators alone: for them
programs run in those.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hector.ir.node import Node, topological
from hector.runtime.reference import Reference


def inputs_of(nodes: Iterable[Node], inputs: Sequence[Node]) -> tuple[int, ...]:
    """Return the positions of the inputs that some nodes depend on."""
    leaves = set(topological(nodes))
    return tuple(i for i, n in enumerate(inputs) if n in leaves)


def in_pytorch(
    reference: Reference,
    nodes: Sequence[Node],
    given: Iterable[tuple[Node, Tensor]],
    like: Iterable[tuple[torch.dtype, Sequence[int]]],
) -> list[Tensor]:
    """Return values in the dtypes and shapes of `like`, by PyTorch's operators."""
    bindings = {
        n: t.to(reference.dtype).reshape(reference.arrays.rows(n.domain), *n.shape)
        for n, t in given
    }
    values = reference.run(nodes, bindings)
    return [
        values[n].to(dtype).reshape(tuple(shape))
        for n, (dtype, shape) in zip(nodes, like, strict=True)
    ]


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without the host's work for transformations of
    `torch.func`, for where none is in force. Tensors that left one are to be
    `alive`."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


alive: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""A tensor, or what one holds that left its transformation."""


in_transform: Callable[[], object | None] = getattr(
    torch._C._functorch, "peek_interpreter_stack", lambda: None
)
"""The transformation of `torch.func` that is in force; None: there is none."""
