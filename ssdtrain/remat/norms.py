"""Recipes of fused normalizations. See [Note: epsilon] in scene.py."""

from torch import Tensor
from torch.nn import functional as F

from ssdtrain.remat.expression import Expression, Operand
from ssdtrain.remat.producer import Producer
from ssdtrain.remat.registry import Registry

NORMS = Registry()


@NORMS.register("NativeLayerNormBackward0")
def layer_norm(node: Producer) -> Expression | None:
    """`F.layer_norm` with a weight, with or without a bias."""
    source, weight, bias = (node.saved(name) for name in ("input", "weight", "bias"))
    epsilon = None if source is None else node.epsilon("input")
    if epsilon is None:
        return None
    shape = tuple(node.constant("normalized_shape"))
    if bias is None and node.has_saved("bias"):
        return None
    operands: list[Operand | None] = [source, weight]
    if bias is not None:
        operands.append(bias)
    return node.rebuilt_by(normalize, *operands, shape=shape, epsilon=epsilon.value)


def normalize(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    shape: tuple[int, ...],
    epsilon: float,
) -> Tensor:
    """Layer norm with an optional bias, all over the last dimensions `shape`."""
    return F.layer_norm(source, shape, weight, bias, epsilon)


@NORMS.register("FusedRmsNormBackward0")
def rms_norm(node: Producer) -> Expression | None:
    """`F.rms_norm` where the device has a fused kernel."""
    source, weight = node.saved("input"), node.saved("weight")
    epsilon = None if source is None else node.epsilon("input")
    if epsilon is None:
        return None
    shape = tuple(node.constant("normalized_shape"))
    return node.rebuilt_by(
        normalize_rms, source, weight, shape=shape, epsilon=epsilon.value
    )


def normalize_rms(
    source: Tensor, weight: Tensor, *, shape: tuple[int, ...], epsilon: float | None
) -> Tensor:
    """RMS norm; an epsilon of None is the dtype's own."""
    return F.rms_norm(source, shape, weight, epsilon)
