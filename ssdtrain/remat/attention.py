"""Recipes of fused attention on CUDA: the output from query, key and value.

Dear per byte, so used only where [Note: recipe budget] has time left: in large models
with short sequences, where attention is a small part of a step.

One that drops is stored: its kernel draws from the process-wide generator, which is
not ours to rewind while other threads may draw from it.
(tests/ssdtrain/remat/test_attention.py)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssdtrain.remat.expression import Expression, Operand
from ssdtrain.remat.producer import Producer
from ssdtrain.remat.registry import Registry

ATTENTION = Registry()


def attention(node: Producer, function: Callable[..., Tensor]) -> Expression | None:
    """The expression of an attention without a bias."""
    if node.has_saved("attn_bias") or node.has_saved("attn_mask"):
        return None
    operands: list[Operand | None] = [
        node.saved(name) for name in ("query", "key", "value")
    ]
    if node.constant("dropout_p"):
        return None
    return node.rebuilt_by(
        function,
        *operands,
        causal=node.constant("is_causal"),
        scale=node.constant("scale"),
    )


@ATTENTION.register("ScaledDotProductFlashAttentionBackward0")
def flash(node: Producer) -> Expression | None:
    """The flash kernel."""
    return attention(node, attend_flash)


def attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **constants: Any,
) -> Tensor:
    """Query, key and value of shape (B, heads, S, head size)."""
    output = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, constants["causal"], False, scale=constants["scale"]
    )
    return output[0]  # type: ignore[no-any-return]


@ATTENTION.register("ScaledDotProductCudnnAttentionBackward0")
def cudnn(node: Producer) -> Expression | None:
    """cuDNN's kernel."""
    return attention(node, attend_cudnn)


def attend_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **constants: Any,
) -> Tensor:
    """As `attend_flash`. The log-sum is asked for: without it another kernel runs."""
    output = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query,
        key,
        value,
        None,
        True,
        0.0,
        constants["causal"],
        False,
        scale=constants["scale"],
    )
    return output[0]  # type: ignore[no-any-return]
