"""Sums of what several layers make for one type of destinations, in fewer products."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.message.joined import edges_in_a_row
from hector.message.layers import attending
from hector.message.nn.convs import GATConv, GraphConv, SAGEConv
from hector.message.relation import Relation
from hector.message.sums import PLAIN
from hector.message.typed import EdgeType
from hector.precision import is_product, plainly_called


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
    return rows.dtype in PLAIN


def _total(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the tensors that are there."""
    there = [p for p in parts if p is not None]
    if len(there) < 2:
        return there[0] if there else None
    return torch.stack(there).sum(0)


Call = tuple[EdgeType, Any, Relation, tuple[Tensor, Tensor]]
"""A layer along a relation: its type, the layer, its edges, rows of both ends."""


def attended(calls: Sequence[Call]) -> dict[EdgeType, Tensor] | None:
    """Return what arrives at the ends of `GATConv`s' calls, by relation. None where
    each is to send by itself.

    The rows of a type are multiplied once by the matrices of all relations from it,
    side by side: row i of relation j of n is row i * n + j. Scores are linear in the
    rows as well.
    """
    by_source: dict[str, list[Call]] = {}
    by_end: dict[str, list[int]] = {}
    rest: list[Call] = []
    for c in calls:
        (by_source.setdefault(c[0][0], []) if c[2].num_edges() else rest).append(c)
    used = [c for group in by_source.values() for c in group]
    numbers = _numbers([*used, *rest]) if len(used) > 1 else None
    if numbers is None:
        return None
    matrix, sides = map(torch.cat, numbers)
    _, heads, width = sides.shape
    pairs = sides.view(-1, 2, heads, width).transpose(1, 2)
    left, right = (pairs @ matrix.view(-1, heads, width, matrix.shape[1])).unbind(2)
    sizes = [len(group) * heads for group in (*by_source.values(), rest)]
    lefts = left.reshape(-1, matrix.shape[1]).split(sizes)
    matrices = matrix.split([n * width for n in sizes])
    h, scores, rights, each = [], [], [], right.unbind(0)
    begins, tos, begin, end = [], [(0, 0)] * len(used), 0, 0
    for i, group in enumerate(by_source.values()):
        x, many = group[0][3][0], len(group)
        group[0][2].srcdata.check("h", x)
        h.append(F.linear(x, matrices[i]).view(-1, heads, width))
        scores.append(F.linear(x, lefts[i]).view(-1, heads, 1))
        begins += [(begin + j, many) for j in range(many)]
        begin += x.shape[0] * many
    for i, c in enumerate(used):
        by_end.setdefault(c[0][2], []).append(i)
    for places in by_end.values():
        (_, _, r, (_, own)), many = used[places[0]], len(places)
        r.dstdata.check("h", own)
        columns = torch.cat([each[i] for i in places])
        rights.append(F.linear(own, columns).view(-1, heads, 1))
        for j, i in enumerate(places):
            tos[i] = end + j, many
        end += own.shape[0] * many
    whole = edges_in_a_row(
        [c[2] for c in used], (tuple(begins), begin), (tuple(tos), end)
    )
    rows = {"h": torch.cat(h), "left": torch.cat(scores)}
    near = attending(used[0][1].slope)(whole, rows, {"right": torch.cat(rights)})
    found = {c[0]: near.new_zeros(c[2].num_dst_nodes(), heads, width) for c in rest}
    parts = near.split([t.shape[0] for t in rights])
    for places, part in zip(by_end.values(), parts, strict=True):
        each = part.view(-1, len(places), heads, width).unbind(1)
        found |= zip([used[i][0] for i in places], each, strict=True)
    return found


def _numbers(calls: Sequence[Call]) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return the layers' matrices, and their vectors of both ends in turn; None unless
    they may share products: plain ones of one shape and dtype, without dropout."""
    _, first, _, (like, _) = calls[0]
    shape, width = first.attn_l.shape, like.shape[1:]
    weights: list[Tensor] = []
    attention: list[Tensor] = []
    for _, layer, _, _ in calls:
        fc, modules = layer._modules.get("fc"), layer._modules
        dropped = modules["feat_drop"].p or (layer.training and modules["attn_drop"].p)
        if dropped or layer.slope != first.slope or not layer.allow_zero_in_degree:
            return None
        if type(fc) is not nn.Linear or fc.bias is not None or not plainly_called(fc):
            return None
        weights.append(fc.weight)
        attention += layer.attn_l, layer.attn_r
    rows = [t for _, _, _, feat in calls for t in feat]
    if {t.shape for t in weights} != {(shape.numel(), *width)}:
        return None
    if {t.shape for t in attention} != {shape} or {t.shape[1:] for t in rows} != {
        width
    }:
        return None
    plain = like.dtype in PLAIN and not torch.is_autocast_enabled(like.device.type)
    same = {t.dtype for t in (*weights, *attention, *rows)} == {like.dtype}
    return (weights, attention) if plain and same else None
