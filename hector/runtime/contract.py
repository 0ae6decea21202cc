"""Contractions between parameters as one matrix product each.

`torch.einsum` takes operands apart and puts results together in a dozen small calls,
tens of microseconds of host time; which calls change anything depends on shapes
alone, so it is decided once.
"""

from collections.abc import Callable, Sequence
from math import prod

from torch import Tensor

from hector.ir.node import Node
from hector.ir.types import Domain

TYPE = "Z"
"""The letter of the type axis, which parameters of one row do not have."""


class Contraction:
    """An EINSUM node for given numbers of types: values [rows, *shape] in, out."""

    def __init__(self, node: Node, rows: Callable[[Domain], int]) -> None:
        left, right = str(node.attr("equation")).split("->")
        self.sizes = {TYPE: 1}
        names = []
        for letters, operand in zip(left.split(","), node.inputs, strict=True):
            typed = operand.domain is not Domain.GLOBAL
            if typed:
                self.sizes[TYPE] = rows(operand.domain)
            self.sizes.update(zip(letters, operand.shape, strict=True))
            names.append(TYPE + letters if typed else letters)
        typed = node.domain is not Domain.GLOBAL
        self.shape = (self.sizes[TYPE] if typed else 1, *node.shape)
        out = TYPE + right if typed else right
        # An axis of one element is there or not, whatever its place.
        one = {letter for letter, size in self.sizes.items() if size == 1}
        a, b, self.out = (
            "".join(c for c in text if c not in one) for text in (*names, out)
        )
        self.batch = _of(self.out, lambda c: c in a and c in b)
        self.rows = _of(self.out, lambda c: c in a and c not in b)
        self.columns = _of(self.out, lambda c: c in b and c not in a)
        self.inner = _of(a, lambda c: c in b and c not in self.out)
        if set(a) - set(b) - set(self.out) or set(b) - set(a) - set(self.out):
            raise ValueError(f"expected every axis in two of three places, got {node}")
        self.operands = a, b

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """fp32 [rows of the node's domain, *shape] for operands of one dtype."""
        x = self._matrix(a, self.operands[0], self.rows, self.inner)
        y = self._matrix(b, self.operands[1], self.inner, self.columns)
        found = x @ y
        made = self.batch + self.rows + self.columns
        if made != self.out:
            found = found.reshape([self.sizes[c] for c in made])
            found = found.permute([made.index(c) for c in self.out])
        return in_order(found, self.shape)

    def _matrix(self, x: Tensor, letters: str, rows: str, columns: str) -> Tensor:
        """[batch, rows, columns], without the batch if there is none."""
        order = self.batch + rows + columns
        sides = [prod(self.sizes[c] for c in part) for part in (rows, columns)]
        if self.batch:
            sides.insert(0, prod(self.sizes[c] for c in self.batch))
        if letters == self.batch + columns + rows:
            # Transposed as a whole: the product takes it as it is.
            sides[-2:] = sides[:-3:-1]
            return x.reshape(sides).transpose(-2, -1)
        if letters != order:
            x = x.reshape([self.sizes[c] for c in letters])
            x = x.permute([letters.index(c) for c in order])
        return x.reshape(sides)


def in_order(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Give `t` this shape and the strides of a new tensor, on axes of one element too.

    A gradient keeps the strides that it is made with, and DistributedDataParallel
    compares all of them with its bucket's.
    """
    return t.reshape(-1).view(shape)


def _of(letters: str, wanted: Callable[[str], bool]) -> str:
    return "".join(c for c in letters if wanted(c))
