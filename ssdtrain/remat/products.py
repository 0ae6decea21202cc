"""Recipes of matrix products: the outputs of linear layers.

[Note: matrix products]
A product is a dear recipe: 5 ms a GB at a hidden size of 2,500 on an H100, where an
element-wise kernel takes 1 and a link 18. Only a plan that knows each tensor's price
can tell where it is worth it, so products and attention are rebuilt under such plans,
and where `recompute="full"` asks for them. The libraries choose a kernel by the exact
shapes and strides, so each of these is a class of its own. A factor that was not saved
(of a frozen weight's layer) is reached through its edge.

`_unsafe_view` is torch's own operator: a product of more dimensions is one of two, seen
in another shape, and what lies between the two is in nobody's hands. So where their
nodes follow one another, nobody can have written to it: see `Composite`.
(tests/ssdtrain/remat/test_products.py)
"""

from dataclasses import replace

import torch
from torch import Tensor

from ssdtrain.remat.expression import DEAR, Expression, Held, Layout, Operand
from ssdtrain.remat.layout import view
from ssdtrain.remat.producer import Producer
from ssdtrain.remat.registry import Registry

PRODUCTS = Registry()
Layouts = tuple[Layout | None, ...]


@PRODUCTS.register("AddmmBackward0")
def product_with_bias(node: Producer) -> Expression | None:
    """A linear layer with a bias."""
    factors = _factors(node, ("mat1", 1), ("mat2", 2))
    if None in factors:
        return None
    bias = node.edge(0)
    return node.rebuilt_by(
        multiply_add,
        bias,
        *factors,
        beta=node.constant("beta"),
        alpha=node.constant("alpha"),
        layouts=_layouts((bias, *factors)),
        size=node.shape,
    )


@PRODUCTS.register("MmBackward0")
def product(node: Producer) -> Expression | None:
    """A linear layer without a bias."""
    factors = _factors(node, ("self", 0), ("mat2", 1))
    return node.rebuilt_by(
        multiply, *factors, layouts=_layouts(factors), size=node.shape
    )


@PRODUCTS.register("BmmBackward0")
def products(node: Producer) -> Expression | None:
    """Products of many pairs."""
    factors = _factors(node, ("self", 0), ("mat2", 1))
    return node.rebuilt_by(
        multiply_many, *factors, layouts=_layouts(factors), size=node.shape
    )


@PRODUCTS.register("UnsafeViewBackward0")
def folded_product(node: Producer) -> Expression | None:
    """A product of more dimensions. It is called after what it costs."""
    found = view(node)
    source = None if found is None else found.operands[0]
    if found is not None and isinstance(source, Expression) and source.recipe in DEAR:
        return replace(found, recipe=source.recipe)
    return found


def multiply_add(
    bias: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float,
    alpha: float,
    layouts: Layouts,
    size: tuple[int, ...],
) -> Tensor:
    """`beta * bias + alpha * left @ right`; layouts and size name the class."""
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha)


def multiply(
    left: Tensor, right: Tensor, *, layouts: Layouts, size: tuple[int, ...]
) -> Tensor:
    """`left @ right`; layouts and size name the class."""
    return torch.mm(left, right)


def multiply_many(
    left: Tensor, right: Tensor, *, layouts: Layouts, size: tuple[int, ...]
) -> Tensor:
    """`left[i] @ right[i]`; layouts and size name the class."""
    return torch.bmm(left, right)


def _factors(node: Producer, *places: tuple[str, int]) -> tuple[Operand | None, ...]:
    """Each is saved where the other one needs a gradient; else it is at its edge."""
    found: list[Operand | None] = []
    for name, edge in places:
        saved = node.saved(name)
        found.append(node.edge(edge) if saved is None else saved)
    return tuple(found)


def _layouts(operands: tuple[Operand | None, ...]) -> Layouts:
    return tuple(
        operand.layout if isinstance(operand, Held) else None for operand in operands
    )
