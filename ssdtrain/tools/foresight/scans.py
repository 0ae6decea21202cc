"""Scans of state-space and delta-rule layers as the one kernel of `mamba_ssm` or `fla`.
Without these packages transformers runs operators for every token or chunk, which take
minutes to capture, and nobody trains with them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MODULES = "transformers.models."


class _Scan(torch.autograd.Function):
    """Reads, writes and saves what the kernel does; it computes something else."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, step: Tensor, *others: Any) -> Tensor:
        """Give a tensor like `values`; `others`: what else is read, or None."""
        ctx.save_for_backward(values, step, *others)
        return _read(values, values, step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Give each input that needs it a gradient of its shape."""
        values, step, *others = ctx.saved_tensors
        rest = zip([step, *others], ctx.needs_input_grad[1:], strict=True)
        own = (x * 1.0 if needed else None for x, needed in rest)
        return _read(values, grads[0], step), *own


def _read(values: Tensor, other: Tensor, step: Tensor) -> Tensor:
    if step.dim() < values.dim():
        step = step.unsqueeze(-1)
    return torch.addcmul(values, other, step).to(values.dtype)


class Scans:
    """Counts the scans that were called, of functions that transformers has."""

    def __init__(self) -> None:
        self.number = 0

    def mamba_selective_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        *others: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        """Mamba's: (batch, width, tokens)."""
        out = self._scanned(hidden_states, dt, A, *others, D, z, delta_bias)
        if not return_last_state:
            return out
        return out, hidden_states.new_zeros(*hidden_states.shape[:2], A.shape[-1])

    def mamba2_chunk_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        return_final_states: bool = False,
        **_: Any,
    ) -> Any:
        """Mamba 2's: (batch, tokens, heads, width)."""
        out = self._scanned(hidden_states, dt, A, B, C, D, dt_bias)
        if not return_final_states:
            return out
        heads = hidden_states.shape[2:]
        return out, hidden_states.new_zeros(len(dt), *heads, B.shape[-1])

    def torch_chunk_gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        output_final_state: bool = False,
        **_: Any,
    ) -> Any:
        """Qwen3-Next's: (batch, tokens, heads, width)."""
        out = self._scanned(value, g, query, key, beta)
        size = (len(value), *value.shape[2:], key.shape[-1])
        state = value.new_zeros(size)
        return out, state if output_final_state else None

    def mamba_inner_fn(self, *_: Any, **__: Any) -> None:
        """None: transformers calls the scan alone, and the operators around it."""

    mamba2_split_conv1d_scan_combined = mamba_inner_fn

    def _scanned(self, *given: Tensor | None) -> Any:
        self.number += 1
        apply: Any = _Scan.apply
        return apply(*given)

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Stand in for the functions, in transformers' modules that are loaded."""
        names = [name for name in dir(self) if not name.startswith("_")]
        loaded = [
            m for path, m in list(sys.modules.items()) if path.startswith(MODULES)
        ]
        found = [
            (module, name, vars(module)[name])
            for module in loaded
            for name in names
            if callable(vars(module).get(name))
        ]
        for module, name, _ in found:
            setattr(module, name, getattr(self, name))
        try:
            yield
        finally:
            for module, name, old in found:
                setattr(module, name, old)
