"""Programs in PyTorch's own operators: for gradients of gradients and `torch.func`.

[Note: gradients of gradients] A compiled backward is no function that PyTorch could
differentiate. Where the gradient is to have one (`create_graph=True`), the expressions
of the gradients are run by the reference back end instead, from the inputs on: every
operator of it is PyTorch's, so derivatives of every order follow. Saved values are
computed again. Inputs that only they depend on are saved next to them: few, such as the
scores of attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hector.ir.node import Node, topological
from hector.runtime.reference import Reference


def inputs_of(nodes: Sequence[Node | None], inputs: Sequence[Node]) -> tuple[int, ...]:
    """Return the positions of the inputs that some nodes depend on."""
    leaves = set(topological(n for n in nodes if n is not None))
    return tuple(i for i, n in enumerate(inputs) if n in leaves)


class Again:
    """Runs a program's expressions on a graph, differentiably."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def run(
        self,
        nodes: Sequence[Node],
        given: Sequence[tuple[Node, Tensor]],
        like: Sequence[tuple[torch.dtype, Sequence[int]]],
    ) -> list[Tensor]:
        """Return values in the dtypes and shapes of `like`."""
        reference = self._reference
        if transformed():
            # torch.func knows PyTorch's operators alone.
            reference = Reference(reference.arrays, reference.dtype)
        bindings = {
            n: t.to(reference.dtype).reshape(reference.arrays.rows(n.domain), *n.shape)
            for n, t in given
        }
        values = reference.run(nodes, bindings)
        return [
            values[n].to(dtype).reshape(tuple(shape))
            for n, (dtype, shape) in zip(nodes, like, strict=True)
        ]


def transformed() -> bool:
    """Return whether a transformation of `torch.func` is in force."""
    stack = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return stack is not None and stack() is not None
