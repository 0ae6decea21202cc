"""The dtype that a layer computes in.

[Note: numbers of a layer] Integers and booleans, such as counts or one-hot rows, are
taken in the dtype of the parameters that they meet. On a CPU, which has no half
precision arithmetic to be fast in, float16 and bfloat16 are storage: a layer and a
compiled program compute in float32 and round once, at the end. Sums of many rows are
accumulated in float64.
"""

from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

HALF = (torch.float16, torch.bfloat16)
MANY = 512
"""Rows of a sum, one after another, whose rounding would be seen in float32."""


def computed(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed on a CPU."""
    return torch.float32 if dtype in HALF else dtype


def features(name: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows` as numbers: integers and booleans in `dtype`, which is the parameters'.

    Raises:
        ValueError: complex rows.
    """
    if rows.is_complex():
        raise ValueError(f"expected real numbers for {name}, got {rows.dtype}")
    return rows if rows.is_floating_point() else rows.to(dtype)


def wide(t: Tensor) -> Tensor:
    """`t` in the dtype that it is computed in; see [Note: numbers of a layer]."""
    return t.float() if t.dtype in HALF and t.device.type == "cpu" else t


def entering(x: Tensor, weights: Tensor | nn.Module) -> tuple[Tensor, torch.dtype]:
    """Return the rows of a layer as it computes with them, and the dtype of its
    results.

    `weights`: what rows of integers get the dtype of; for a weight that may be
    parametrized its module, as each reading of it would be an evaluation.
    """
    dtype = x.dtype
    if not dtype.is_floating_point:
        if isinstance(weights, nn.Module):
            # Replicas of DataParallel have no parameters.
            found = next(weights.parameters(), None)
            weights = cast("Tensor", weights.weight) if found is None else found
        x = features("x", x, weights.dtype)
        dtype = x.dtype
    return (wide(x) if dtype in HALF else x), dtype


_HOOKS = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_GLOBAL_HOOKS = tuple(
    getattr(nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)
"""As `nn.modules.module._has_any_global_hook` reads them, without a Python call."""


def is_altered(module: nn.Module) -> bool:
    """Return whether a module has hooks or a forward of its own, beside its class's.
    Pruning and old norms of weights are hooks; parametrizations are not."""
    own = module.__dict__
    return any(_HOOKS(own)) or "forward" in own


def plainly_called(*modules: nn.Module) -> bool:
    """Return whether to call any of the modules is to run its class's forward, and
    nothing else."""
    for module in modules:
        own = module.__dict__
        if any(_HOOKS(own)) or "forward" in own:
            return False
        if module._compiled_call_impl is not None:
            return False
    return not any(_GLOBAL_HOOKS)


def is_product(module: nn.Module) -> bool:
    """Return whether `F.linear(x, weight, bias)` may replace a call of a module: it is
    an `nn.Linear` itself, without hooks. False under global hooks."""
    return type(module) is nn.Linear and plainly_called(module)


def wide_linear(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`; a plain `nn.Linear` in half precision is computed wide."""
    if x.dtype not in HALF and type(module) is nn.Linear and plainly_called(module):
        weight: Any = module._parameters.get("weight")
        bias: Any = module._parameters.get("bias")
        if weight is None:  # of a replica
            weight, bias = module.weight, module.bias
        if weight.dtype in HALF:
            weight = wide(weight)
        if bias is not None and bias.dtype in HALF:
            bias = wide(bias)
        return functional.linear(x, weight, bias)
    out: Tensor = module(x)
    return out


def index_sum(rows: Tensor, index: Tensor, count: int, longest: int) -> Tensor:
    """[count, ...]: the sum of the rows [n, ...] of each index [n], 0 for none;
    `longest` is the number of rows of the largest group."""
    shape = (count, *rows.shape[1:])
    if longest <= MANY:
        return rows.new_zeros(shape).index_add(0, index, rows)
    out = rows.new_zeros(shape, dtype=torch.float64)
    return out.index_add(0, index, rows.double()).to(rows.dtype)
