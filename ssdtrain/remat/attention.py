"""Recipes of fused attention on CUDA: the output from query, key and value.

Dear per byte, so used only where [Note: recipe budget] has time left: in large models
with short sequences, where attention is a small part of a step.

[Note: attention's dropout]
The state of the random generator is read when autograd saves the first input: inputs
are saved before the operator runs, and nothing draws in between.
(tests/ssdtrain/remat/test_attention.py)
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ssdtrain.remat.dropout import rewound
from ssdtrain.remat.expression import Expression, Operand, State
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
    rate = node.constant("dropout_p")
    if rate:
        operands.append(node.random_state("query"))
    return node.rebuilt_by(
        function,
        *operands,
        rate=rate,
        causal=node.constant("is_causal"),
        scale=node.constant("scale"),
    )


def _drawing(state: State | None) -> Any:
    return nullcontext() if state is None else rewound(state)


@ATTENTION.register("ScaledDotProductFlashAttentionBackward0")
def flash(node: Producer) -> Expression | None:
    """The flash kernel."""
    return attention(node, attend_flash)


def attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: State | None = None,
    **constants: Any,
) -> Tensor:
    """Query, key and value of shape (B, heads, S, head size)."""
    with _drawing(state):
        output = torch.ops.aten._scaled_dot_product_flash_attention(
            query,
            key,
            value,
            constants["rate"],
            constants["causal"],
            False,
            scale=constants["scale"],
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
    state: State | None = None,
    **constants: Any,
) -> Tensor:
    """As `attend_flash`. The log-sum is asked for: without it another kernel runs."""
    with _drawing(state):
        output = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query,
            key,
            value,
            None,
            True,
            constants["rate"],
            constants["causal"],
            False,
            scale=constants["scale"],
        )
    return output[0]  # type: ignore[no-any-return]
