"""What graph programs should give: loops over nodes and edges, which know no graph."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hector.message import layers as message_layers
from hector.nn import RGCNConv
from hector.nn.reduce import VARIANCE_FLOOR
from recipes.bench.safety.relational import softmax


def _softmax(rows: Tensor) -> Tensor:
    return (rows.softmax(0) * rows).sum(0)


def _std(rows: Tensor) -> Tensor:
    variance = (rows - rows.mean(0)).square().mean(0)
    # Of equal messages the root has no slope.
    some = variance > 0
    return torch.where(some, torch.where(some, variance, 1.0).sqrt(), 0.0)


def _floored_std(rows: Tensor) -> Tensor:
    variance = rows.square().mean(0) - rows.mean(0).square()
    root = variance.clamp(min=VARIANCE_FLOOR).sqrt()
    return root.masked_fill(root <= math.sqrt(VARIANCE_FLOOR), 0.0)


REDUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "std": _std,
    "softmax": _softmax,
    "mul": lambda rows: rows.prod(0),
    "median": lambda rows: rows.median(0).values,
}
"""Of the rows [messages, ...] of one node."""


def reduced(
    rows: Tensor,
    group: Tensor,
    count: int,
    how: Callable[[Tensor], Tensor],
    none: float = 0.0,
) -> Tensor:
    """[count, ...]: node by node; `none` for nodes without rows."""
    empty = rows.new_full(rows.shape[1:], none)
    made = []
    for node in range(count):
        mine = rows[group == node]
        made.append(how(mine) if len(mine) else empty)
    return torch.stack(made) if made else rows.new_zeros(0, *rows.shape[1:])


def rgcn(conv: RGCNConv, x: Tensor, ends: Tensor, kinds: Tensor) -> Tensor:
    """Equation 3.1 under every reducer."""
    weight: Tensor = conv.weight
    if conv.comp is not None:
        weight = torch.einsum("rb,bio->rio", conv.comp, weight)
    if conv.num_blocks is not None:
        weight = torch.stack([torch.block_diag(*w) for w in weight])
    how = _floored_std if conv.aggr == "std" else REDUCERS[conv.aggr]
    out = x.new_zeros(x.shape[0], conv.out_channels)
    for r in range(conv.num_relations):
        src, dst = ends[:, kinds == r]
        none = 1.0 if conv.aggr == "mul" else 0.0
        out = out + reduced(x[src], dst, x.shape[0], how, none) @ weight[r]
    if conv.root is not None:
        out = out + x @ conv.root
    return out if conv.bias is None else out + conv.bias


def message_layer(layer: Any, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """The layers of `hector.message`, node by node."""
    count = x.shape[0]
    if isinstance(layer, message_layers.SAGEConv):
        near = reduced(x[src], dst, count, REDUCERS[layer.reducer])
        made: Tensor = layer.lin_l(near) + layer.lin_r(x)
        return made
    total = REDUCERS["sum"]
    if isinstance(layer, message_layers.GINConv):
        near = reduced(x[src], dst, count, total)
        found: Tensor = layer.net(near + (1 + layer.eps) * x)
        return found
    if isinstance(layer, message_layers.GATConv):
        h = layer.lin(x).view(count, layer.heads, -1)
        left, right = (h * layer.att_src).sum(-1), (h * layer.att_dst).sum(-1)
        score = functional.leaky_relu(left[src] + right[dst], layer.slope)
        rows = softmax(score, dst, count)[:, :, None] * h[src]
        return reduced(rows, dst, count, total).flatten(1) + layer.bias
    degree = torch.bincount(dst, minlength=count) + 1
    h = layer.lin(x) * degree.to(x.dtype).rsqrt()[:, None]
    out = (reduced(h[src], dst, count, total) + h) * degree.to(x.dtype).rsqrt()[:, None]
    return out + layer.bias
