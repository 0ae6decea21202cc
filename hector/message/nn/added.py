"""Sums of what several layers make for one type of destinations, in fewer products."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hector.message.nn.convs import GATConv, GraphConv, SAGEConv
from hector.precision import is_product


def sum_of_layers(
    layers: Sequence[Any], own: Tensor, near: list[Tensor]
) -> Tensor | None:
    """Return the sum of what layers of one class make of what arrived at the
    destinations, whose rows are `own`; None where they are to be called one by one."""
    kind = type(layers[0])
    if any(type(layer) is not kind or layer.activation is not None for layer in layers):
        return None
    return _WAYS[kind](layers, own, near)


def _convolutions(
    layers: Sequence[Any], _: Tensor, near: list[Tensor]
) -> Tensor | None:
    """Multiply the rows of all layers, side by side, by their matrices."""
    matrices = [layer.weight for layer in layers]
    for layer, matrix in zip(layers, matrices, strict=True):
        if layer.norm == "both" or matrix is None or matrix.dtype is not near[0].dtype:
            return None
        narrows = matrix.shape[0] > matrix.shape[1]  # then multiplied already
        if narrows or matrix.shape[1] != matrices[0].shape[1]:
            return None
    out = torch.cat(near, 1) @ torch.cat(matrices)
    bias = _total([layer.bias for layer in layers])
    return out if bias is None else out + bias


def _sage(layers: Sequence[Any], own: Tensor, near: list[Tensor]) -> Tensor | None:
    """Multiply the rows of all layers, side by side, by their matrices, and the nodes'
    own by the matrices' sum."""
    pairs = [(layer.fc_neigh, layer.fc_self) for layer in layers]
    outs, first = pairs[0][0].out_features, layers[0].multiplies_first()
    for layer, (neighbour, mine) in zip(layers, pairs, strict=True):
        if layer.norm is not None or mine is None or neighbour.out_features != outs:
            return None
        if layer.multiplies_first() is not first:
            return None
        if not (_plain(neighbour, own) and _plain(mine, own)):
            return None
    matrix = torch.stack([mine.weight for _, mine in pairs]).sum(0)
    made = F.linear(own, matrix, _total([mine.bias for _, mine in pairs]))
    if first:
        return made + torch.stack(near).sum(0)
    whole = torch.cat([neighbour.weight for neighbour, _ in pairs], 1)
    return torch.addmm(made, torch.cat(near, 1), whole.t())


def _attention(layers: Sequence[Any], own: Tensor, near: list[Tensor]) -> Tensor | None:
    """Add up, and then the layers' numbers."""
    heads = layers[0].heads
    for layer in layers:
        if layer.res_fc is not None or layer.heads != heads:
            return None
    if any(rows.shape != near[0].shape for rows in near):
        return None
    out = torch.stack(near).sum(0)
    bias = _total([layer.bias for layer in layers])
    return out if bias is None else out + bias.view(1, heads, -1)


_WAYS: Mapping[type, Callable[..., Tensor | None]] = {
    GraphConv: _convolutions,
    SAGEConv: _sage,
    GATConv: _attention,
}


def _plain(module: Any, rows: Tensor) -> bool:
    """Whether a module is a plain product that computes in the dtype of rows."""
    if not is_product(module) or module.weight.dtype is not rows.dtype:
        return False
    return rows.dtype in (torch.float32, torch.float64)


def _total(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the tensors that are there."""
    there = [p for p in parts if p is not None]
    if len(there) < 2:
        return there[0] if there else None
    return torch.stack(there).sum(0)
