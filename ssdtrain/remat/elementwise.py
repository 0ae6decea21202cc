"""Recipes of activations, products and the scalar operators between them."""

import torch
from torch.nn import functional as F

from ssdtrain.remat.expression import Expression, Operand
from ssdtrain.remat.producer import Producer
from ssdtrain.remat.registry import Registry

ELEMENTWISE = Registry()


@ELEMENTWISE.register("GeluBackward0")
def gelu(node: Producer) -> Expression | None:
    """Both approximations."""
    return node.rebuilt_by(
        F.gelu, node.saved("self"), approximate=node.constant("approximate")
    )


@ELEMENTWISE.register("SiluBackward0")
def silu(node: Producer) -> Expression | None:
    """Also called swish."""
    return node.rebuilt_by(F.silu, node.saved("self"))


@ELEMENTWISE.register("SoftplusBackward0")
def softplus(node: Producer) -> Expression | None:
    """log(1 + exp(beta x)) / beta; linear where beta x is above the threshold."""
    beta, threshold = node.constant("beta"), node.constant("threshold")
    return node.rebuilt_by(
        F.softplus, node.saved("self"), beta=beta, threshold=threshold
    )


@ELEMENTWISE.register("HardshrinkBackward0")
def hardshrink(node: Producer) -> Expression | None:
    """Zero where |x| is at most lambd, x elsewhere."""
    return node.rebuilt_by(
        F.hardshrink, node.saved("self"), lambd=node.constant("lambd")
    )


@ELEMENTWISE.register("SoftshrinkBackward0")
def softshrink(node: Producer) -> Expression | None:
    """As `hardshrink`, and lambd nearer to zero elsewhere."""
    return node.rebuilt_by(
        F.softshrink, node.saved("self"), lambd=node.constant("lambd")
    )


@ELEMENTWISE.register("GluBackward0")
def glu(node: Producer) -> Expression | None:
    """Gated linear unit in one operator."""
    return node.rebuilt_by(F.glu, node.saved("self"), dim=node.dimension("dim"))


@ELEMENTWISE.register("TanhBackward0")
def tanh(node: Producer) -> Expression | None:
    """It saves its result, which is the tensor itself; its input is at the edge."""
    return node.rebuilt_by(torch.tanh, node.edge(0))


@ELEMENTWISE.register("SigmoidBackward0")
def sigmoid(node: Producer) -> Expression | None:
    """As `tanh`."""
    return node.rebuilt_by(torch.sigmoid, node.edge(0))


@ELEMENTWISE.register("PowBackward0")
def power(node: Producer) -> Expression | None:
    """A tensor to the power of a number."""
    return node.rebuilt_by(
        torch.pow, node.saved("self"), exponent=node.constant("exponent")
    )


@ELEMENTWISE.register("MulBackward0")
def product(node: Producer) -> Expression | None:
    """Gated products, unfused RMS norm, dropout from its noise, scaling.

    A factor is saved only if the other one needs a gradient; else it is at its edge.
    """
    first = _factor(node, "self", 0)
    return node.rebuilt_by(torch.mul, first, _factor(node, "other", 1))


def _factor(node: Producer, name: str, index: int) -> Operand | None:
    saved = node.saved(name)
    return node.edge(index) if saved is None else saved


@ELEMENTWISE.register("AddBackward0")
def total(node: Producer) -> Expression | None:
    """Of two tensors; or of a tensor and a number that the running module tells."""
    if node.has_edge(0) and node.has_edge(1):
        first = node.edge(0)
        if first is None:
            return None
        second = node.edge(1)
        return node.rebuilt_by(torch.add, first, second, alpha=node.constant("alpha"))
    if not node.has_edge(0):
        return None
    # Python's `1.0 + x` is add(x, 1.0).
    return node.rebuilt_by(torch.add, node.edge(0), node.addend())
