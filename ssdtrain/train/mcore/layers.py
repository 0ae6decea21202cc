"""What Megatron's local layer specs lack without Transformer Engine.

- `MarkedNorm`: torch's norm with the mark that sequence parallelism reads (its
  weights' gradients are summed over the tensor-parallel ranks); the stock
  `WrappedTorchNorm` refuses sequence parallelism.
- `FusedAttention`: torch's scaled_dot_product_attention; the stock local attention
  stores three matrices of sequence x sequence for every head.
"""

from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

NORMS = ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm")
ATTENTIONS = ("self_attention", "cross_attention")


class MarkedNorm:
    """A torch norm whose parameters carry `sequence_parallel`."""

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> nn.Module:
        """The norm that `config.normalization` names."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return norm


class FusedAttention(nn.Module):
    """Core attention of a layer spec. Shapes: S sequence, B batch, N heads of this
    rank, D head size."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        **rest: Any,
    ) -> None:
        super().__init__()
        self.config = config
        rate = rest.get("attention_dropout")
        self._rate = config.attention_dropout if rate is None else rate
        self._scale = rest.get("softmax_scale")
        self._is_causal = attn_mask_type.name == "causal"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **rest: Any,
    ) -> Tensor:
        """query: (S, B, N, D); attention_mask: bool, True where nothing is read, or
        None; returns (S, B, N * D)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        causal, mask = self._is_causal, None
        if attention_mask is not None and not causal:
            # Padding reads everything: a row without anything to read is not a number.
            mask = ~attention_mask | attention_mask.all(-1, keepdim=True)
        with self._dropout_state(), _kernels(mask):
            context = functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=self._rate if self.training else 0.0,
                is_causal=causal,
                scale=self._scale,
                enable_gqa=q.size(1) != k.size(1),
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _dropout_state(self) -> Any:
        """Draw apart on each rank; sequence parallelism does so already."""
        if self.config.sequence_parallel:
            return nullcontext()
        return get_cuda_rng_tracker().fork()


def _kernels(mask: Tensor | None) -> Any:
    """Choose the attention kernels: with a mask the fast one is not deterministic."""
    if mask is None or not torch.are_deterministic_algorithms_enabled():
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


def layer_spec(spec: Any, fused: bool) -> Any:
    """Return a local layer spec with marked norms and, if asked, fused attention."""
    parts = copy(spec.submodules)
    for name in NORMS:
        kind = getattr(parts, name, None)
        if isinstance(kind, type) and not kind.__name__.startswith("Identity"):
            setattr(parts, name, MarkedNorm)
    for name in ATTENTIONS if fused else ():
        attention = getattr(parts, name)
        if hasattr(attention, "submodules"):
            attention = copy(attention)
            attention.submodules = copy(attention.submodules)
            attention.submodules.core_attention = FusedAttention
            setattr(parts, name, attention)
    result = copy(spec)
    result.submodules = parts
    return result
