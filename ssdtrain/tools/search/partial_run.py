"""Runs one worker's part of an operator: the same operator on smaller operands."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ssdtrain.tools.search.calls import OperatorCall, aten, operator_name
from ssdtrain.tools.search.describe_rows import positive
from ssdtrain.tools.search.placement import Cut, Placement, piece
from ssdtrain.tools.search.strategies import Shape, Strategy

RESULT_SIZES: Mapping[str, str] = {
    **dict.fromkeys(aten("view _unsafe_view expand"), "size"),
    **dict.fromkeys(aten("slice_backward select_backward"), "input_sizes"),
    "aten::upsample_nearest2d_backward": "input_size",
    "aten::upsample_bilinear2d_backward": "input_size",
}
"""Arguments that hold the shape of the result."""
MEANS = frozenset(
    f"aten::{name}{suffix}"
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss")
    for suffix in ("", "_backward")
)
MEAN, SUM = 1, 2
"""Values of the argument `reduction` of a loss."""


def local_shape(
    shape: Shape,
    placements: Sequence[Placement],
    ways: Sequence[int],
    at: Sequence[int],
) -> Shape:
    """Return the shape of a worker's piece, halos not counted: `placements` and `ways`
    of each axis, `at` which the worker stands."""
    found = list(shape)
    for placement, number, worker in zip(placements, ways, at, strict=True):
        if isinstance(placement, Cut):
            begin, end = piece(found[placement.dim], number, worker)
            found[placement.dim] = end - begin
    return tuple(found)


def run_part(
    call: OperatorCall,
    chosen: Sequence[Strategy],
    ways: Sequence[int],
    at: Sequence[int],
    arguments: Mapping[str, Any],
    total: Callable[[Tensor], Tensor],
) -> Any:
    """Run the part of the worker `at` this place of an operator split as `chosen` on
    each axis. `arguments`: with its operands, halos included, zeros beyond the tensor's
    ends; `total`: sums over the workers among whom a reduction is split."""
    own = _operands(call, chosen, at, dict(arguments))
    shapes = [
        local_shape(shape, [one.gives[i] for one in chosen], ways, at)
        for i, shape in enumerate(call.results)
    ]
    _resize(call, shapes, own)
    _unpad(call, chosen, own)
    if call.name == "aten::nll_loss_forward" and call["reduction"] == MEAN:
        summed, weight = _run(call.func, {**own, "reduction": SUM})
        return summed / total(weight), weight
    results = _run(call.func, own)
    share = _share(call, own)
    if share == 1:
        return results
    return tree_map_only(Tensor, lambda one: one * share, results)


VIEWS = frozenset({"aten::view", "aten::_unsafe_view"})
"""A piece may lie in memory as no view allows."""


def _run(func: Any, arguments: Mapping[str, Any]) -> Any:
    if operator_name(func) in VIEWS:
        source, size = list(arguments.values())[:2]
        return source.reshape(size)
    named = {a.name for a in func._schema.arguments if a.kwarg_only}
    args = [value for name, value in arguments.items() if name not in named]
    return func(*args, **{name: arguments[name] for name in named})


def _operands(
    call: OperatorCall,
    chosen: Sequence[Strategy],
    at: Sequence[int],
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Let one worker alone add what is added once."""
    once = {n for one, place in zip(chosen, at, strict=True) if place for n in one.once}
    if not once:
        return arguments
    leaves, spec = tree_flatten(arguments)
    count = -1
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            count += 1
            if count in once:
                leaves[i] = torch.zeros_like(leaf)
    found: dict[str, Any] = tree_unflatten(leaves, spec)
    return found


def _resize(call: OperatorCall, shapes: list[Shape], own: dict[str, Any]) -> None:
    """Change arguments that hold sizes of results."""
    if call.name in RESULT_SIZES:
        own[RESULT_SIZES[call.name]] = list(shapes[0])
    elif call.name in ("aten::native_group_norm", "aten::native_group_norm_backward"):
        own["N"] = own["input"].shape[0]
    elif call.name == "aten::convolution_backward" and call["bias_sizes"]:
        own["bias_sizes"] = [own["grad_output"].shape[1]]


def _unpad(call: OperatorCall, chosen: Sequence[Strategy], own: dict[str, Any]) -> None:
    """A halo holds the rows that padding would have made."""
    halos = {
        need.dim
        for one in chosen
        for need in one.needs
        if isinstance(need, Cut) and need.has_halo
    }
    if halos:
        rank = call["weight"].rank - 2
        padding = list(call["padding"])
        padding = padding * rank if len(padding) == 1 else padding
        own["padding"] = [0 if at in halos else n for at, n in enumerate(padding, 2)]


def _share(call: OperatorCall, own: Mapping[str, Any]) -> float:
    """Return this worker's share of the elements that a mean is over."""
    if call.name == "aten::mean":
        whole = call["self"].shape
        given = call.arguments.get("dim") or range(len(whole))
        dims = [positive(dim, len(whole)) for dim in given]
    elif call.name in MEANS and call["reduction"] == MEAN:
        whole = call["self"].shape
        dims = list(range(len(whole)))
    else:
        return 1
    mine = own["self"].shape
    return float(
        prod(mine[dim] for dim in dims) / max(1, prod(whole[dim] for dim in dims))
    )
