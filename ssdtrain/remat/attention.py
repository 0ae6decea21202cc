"""Recipes of fused attention: the output from query, key and value.

Dear per byte, so used only where [Note: recipe budget] has time left, or where a plan
weighs it: in large models with short sequences attention is a small part of a step.

One that drops is stored: its kernel draws from the process-wide generator, which is
not ours to rewind while other threads may draw from it. So are the statistics (one
number a row and head, a fiftieth of the output): they have no node to go by. Attention
out of single operators (torch's math backend) is products, a softmax and casts.
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
DEAR_ATTENTION = Registry()
"""Where a plan weighs them."""


def attention(
    node: Producer, function: Callable[..., Tensor], bias: str | None = None
) -> Expression | None:
    """The expression of an attention that drops nothing.

    Args:
        node: it has made the output.
        function: takes query, key, value, perhaps a bias, and the constants.
        bias: the name under which the node saves one; None: it cannot be given.
    """
    operands: list[Operand | None] = [
        node.saved(name) for name in ("query", "key", "value")
    ]
    if node.constant("dropout_p"):
        return None
    for name in ("attn_bias", "attn_mask"):
        if node.has_saved(name):
            operands.append(node.saved(name) if name == bias else None)
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
    return attention(node, attend_cudnn, bias="attn_bias")


def attend_cudnn(*operands: Tensor, **constants: Any) -> Tensor:
    """As `attend_flash`. The log-sum is asked for: without it another kernel runs."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    return _with_bias(kernel, *operands, **constants)


def _with_bias(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    **constants: Any,
) -> Tensor:
    causal, scale = constants["causal"], constants["scale"]
    made = kernel(query, key, value, bias, True, 0.0, causal, scale=scale)
    return made[0]  # type: ignore[no-any-return]


@DEAR_ATTENTION.register("ScaledDotProductEfficientAttentionBackward0")
def efficient(node: Producer) -> Expression | None:
    """The memory-efficient kernel, which takes a mask."""
    return attention(node, attend_efficient, bias="attn_bias")


def attend_efficient(*operands: Tensor, **constants: Any) -> Tensor:
    """As `attend_flash`; the log-sum is asked for, as in training."""
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return _with_bias(kernel, *operands, **constants)


@DEAR_ATTENTION.register("ScaledDotProductFlashAttentionForCpuBackward0")
def flash_on_cpu(node: Producer) -> Expression | None:
    """The flash kernel of CPUs, which takes a mask."""
    return attention(node, attend_on_cpu, bias="attn_mask")


def attend_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    **constants: Any,
) -> Tensor:
    """As `attend_flash`."""
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        key,
        value,
        0.0,
        constants["causal"],
        attn_mask=mask,
        scale=constants["scale"],
    )
    return output[0]  # type: ignore[no-any-return]
