"""Recipes of matrix products: the outputs of linear layers.

[Note: matrix products]
A product is a dear recipe. At 700 TFLOP/s and an inner dimension of 7,000 a GPU makes
0.1 TB/s of 16-bit numbers by it, and some TB/s by an element-wise kernel. Yet a link
brings less, and once the links are full nothing else lowers the peak. It is worth it
where some percent of a step may be spent, so `recompute="full"` asks for it.

The libraries choose a kernel by the exact shapes and strides, so each is a class of its
own. Only a tensor that was itself saved is rebuilt, from inputs that were saved: chains
of products would hold as much as they free.
(tests/ssdtrain/remat/test_products.py)
"""

import torch
from torch import Tensor

from ssdtrain.remat.expression import Expression, Held, Layout
from ssdtrain.remat.layout import view
from ssdtrain.remat.producer import Producer
from ssdtrain.remat.registry import Registry

PRODUCTS = Registry()


@PRODUCTS.register("AddmmBackward0")
def product_with_bias(node: Producer) -> Expression | None:
    """A linear layer with a bias."""
    bias = node.edge(0) if node.is_saved_itself else None
    factors = _factors(node, "mat1")
    if bias is None or factors is None:
        return None
    return node.rebuilt_by(
        multiply_add,
        bias,
        *factors,
        beta=node.constant("beta"),
        alpha=node.constant("alpha"),
        layouts=_layouts(factors),
    )


@PRODUCTS.register("MmBackward0")
def product(node: Producer) -> Expression | None:
    """A linear layer without a bias, of two dimensions."""
    factors = _factors(node, "self") if node.is_saved_itself else None
    if factors is None:
        return None
    return node.rebuilt_by(multiply, *factors, layouts=_layouts(factors))


@PRODUCTS.register("UnsafeViewBackward0")
def folded_product(node: Producer) -> Expression | None:
    """A linear layer without a bias, of more dimensions: a product, seen as these."""
    source = node.source(0) if node.is_saved_itself else None
    if source is None or source.name != "MmBackward0":
        return view(node)
    factors = _factors(source, "self")
    if factors is None:
        return None
    return source.rebuilt_by(
        multiply, *factors, size=node.shape, layouts=_layouts(factors)
    )


def multiply_add(
    bias: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float,
    alpha: float,
    layouts: tuple[Layout, ...],
) -> Tensor:
    """`beta * bias + alpha * left @ right`; `layouts` names the class."""
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha)


def multiply(
    left: Tensor,
    right: Tensor,
    *,
    layouts: tuple[Layout, ...],
    size: tuple[int, ...] | None = None,
) -> Tensor:
    """`left @ right`, in the shape `size`; `layouts` names the class."""
    found = torch.mm(left, right)
    return found if size is None else found.view(size)


def _factors(node: Producer, left: str) -> tuple[Held, Held] | None:
    """Both matrices, where both were saved: each is for the other one's gradient."""
    first, second = node.saved(left), node.saved("mat2")
    if isinstance(first, Held) and isinstance(second, Held):
        return first, second
    return None


def _layouts(factors: tuple[Held, Held]) -> tuple[Layout, ...]:
    return tuple(factor.layout for factor in factors)
