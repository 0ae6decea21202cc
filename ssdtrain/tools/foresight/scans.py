"""Scans of state-space and delta-rule layers as the one kernel of `mamba_ssm` or `fla`:
without these transformers runs operators for every token or chunk."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SCANS = {
    "mamba_selective_scan": ("hidden_states", "dt", "return_last_state"),
    "mamba2_chunk_scan": ("hidden_states", "dt", "return_final_states"),
    "torch_chunk_gated_delta_rule": ("value", "g", ""),
}
"""Of transformers: the argument that the result is like, the step, and the flag with
which a last state is given as well; empty: always."""
WHOLE = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
"""Take more into their kernel, and give None where that is not there."""


class _Scan(torch.autograd.Function):
    """Reads, writes and saves what the kernel does; it computes something else."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, step: Tensor, *others: Tensor) -> Tensor:
        """Give a tensor like `values`."""
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
    step = step.unsqueeze(-1) if step.dim() < values.dim() else step
    return torch.addcmul(values, other, step).to(values.dtype)


@contextmanager
def fused_scans() -> Iterator[list[str]]:
    """Stand in for the functions, in modules that are loaded; give what is called."""
    called: list[str] = []

    def stand_in(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        values, step, flag = SCANS[name]
        signature, apply = inspect.signature(function), _Scan.apply

        def scan(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            given = signature.bind(*args, **kwargs).arguments
            first = given.pop(values), given.pop(step)
            out = apply(*first, *(x for x in given.values() if isinstance(x, Tensor)))  # type: ignore[no-untyped-call]
            return (out, out.new_zeros(())) if given.get(flag, not flag) else out

        return scan

    found = [
        (module, name, vars(module)[name])
        for path, module in list(sys.modules.items())
        if path.startswith("transformers.models.")
        for name in (*SCANS, *WHOLE)
        if callable(vars(module).get(name))
    ]
    for module, name, old in found:
        new = stand_in(name, old) if name in SCANS else lambda *_, **__: None
        setattr(module, name, new)
    try:
        yield called
    finally:
        for module, name, old in found:
            setattr(module, name, old)
