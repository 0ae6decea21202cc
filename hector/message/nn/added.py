"""Sums of what several layers make for one type of destinations, in fewer products."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.message.joined import Places, edges_in_a_row
from hector.message.layers import attending
from hector.message.nn.convs import GATConv, GraphConv, SAGEConv, check_degrees
from hector.message.relation import Relation
from hector.message.sums import PLAIN
from hector.precision import is_product, plainly_called


def sum_of_layers(
    layers: Sequence[Any], own: Tensor, near: Sequence[Tensor]
) -> Tensor | None:
    """Return the sum of what layers of one class make of what arrived at the
    destinations, whose rows are `own`; None where they are to be called one by one."""
    kind = type(layers[0])
    if any(type(layer) is not kind or layer.activation is not None for layer in layers):
        return None
    return _WAYS[kind](layers, own, near)


def _convolutions(
    layers: Sequence[Any], _: Tensor, near: Sequence[Tensor]
) -> Tensor | None:
    """Multiply the rows of all layers, side by side, by their matrices."""
    matrices = [layer.weight for layer in layers]
    for layer, matrix in zip(layers, matrices, strict=True):
        if layer.norm == "both" or matrix is None or matrix.dtype is not near[0].dtype:
            return None
        narrows = matrix.shape[0] > matrix.shape[1]  # then multiplied already
        if narrows or matrix.shape[1] != matrices[0].shape[1]:
            return None
    out = torch.cat(tuple(near), 1) @ torch.cat(matrices)
    bias = _total([layer.bias for layer in layers])
    return out if bias is None else out + bias


def _sage(layers: Sequence[Any], own: Tensor, near: Sequence[Tensor]) -> Tensor | None:
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
        return made + torch.stack(tuple(near)).sum(0)
    whole = torch.cat([neighbour.weight for neighbour, _ in pairs], 1)
    return torch.addmm(made, torch.cat(tuple(near), 1), whole.t())


def _attention(
    layers: Sequence[Any], own: Tensor, near: Sequence[Tensor]
) -> Tensor | None:
    """Add up, and then the layers' numbers."""
    heads = layers[0].heads
    for layer in layers:
        if layer.res_fc is not None or layer.heads != heads:
            return None
    if isinstance(near, Arrived):
        out = near.rows.sum(1)
    elif any(rows.shape != near[0].shape for rows in near):
        return None
    else:
        out = torch.stack(tuple(near)).sum(0)
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


Call = tuple[tuple[str, str, str], Any, Relation, tuple[Tensor, Tensor]]
"""A layer along a relation: its type, the layer, its edges, rows of both ends."""


class Arrived(Sequence[Tensor]):
    """What arrives along several relations, the last ones without edges."""

    def __init__(self, rows: Tensor, count: int) -> None:
        """`rows`: [destinations, relations with edges, ...]."""
        self.rows, self.count = rows, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Any:
        if i >= self.count:
            raise IndexError(i)
        there = i < self.rows.shape[1]
        return self.rows.narrow(1, i if there else 0, int(there)).sum(1)


def attended(calls: Sequence[Call]) -> list[tuple[list[Call], Arrived]] | None:
    """Return calls of `GATConv`s, those to one type of destinations together, and what
    arrives there. None where each is to send by itself.

    The rows of a type are multiplied once by the matrices of all relations from it,
    side by side: row i of relation j of n is row i * n + j. Scores are linear in the
    rows as well.
    """
    by_source: dict[str, list[Call]] = {}
    rest: list[Call] = []
    for c in calls:
        group = by_source.setdefault(c[0][0], []) if c[2].num_edges() else rest
        group.append(c)
    used = [c for group in by_source.values() for c in group]
    numbers = _numbers([*used, *rest]) if len(used) > 1 else None
    if numbers is None:
        return None
    weights, attention, slope = numbers
    matrix, sides = torch.cat(weights), torch.cat(attention)
    _, heads, width = sides.shape
    columns = torch.matmul(
        sides.view(-1, 2, heads, width).transpose(1, 2),
        matrix.view(-1, heads, width, matrix.shape[1]),
    )
    left, right = columns.unbind(2)
    sizes = [len(group) * heads for group in (*by_source.values(), rest)]
    lefts = left.reshape(-1, matrix.shape[1]).split(sizes)
    matrices = matrix.split([n * width for n in sizes])
    h, scores, froms, begin = [], [], [], 0
    for i, group in enumerate(by_source.values()):
        x, many = group[0][3][0], len(group)
        h.append(F.linear(x, matrices[i]).view(-1, heads, width))
        scores.append(F.linear(x, lefts[i]).view(-1, heads, 1))
        froms += [(begin + j, many) for j in range(many)]
        begin += x.shape[0] * many
    by_end: dict[str, list[int]] = {}
    for i, c in enumerate(used):
        by_end.setdefault(c[0][2], []).append(i)
    rights, each, tos, end = [], right.unbind(0), [(0, 0)] * len(used), 0
    for places in by_end.values():
        own, many = used[places[0]][3][1], len(places)
        columns = torch.cat([each[i] for i in places])
        rights.append(F.linear(own, columns).view(-1, heads, 1))
        for j, i in enumerate(places):
            tos[i] = end + j, many
        end += own.shape[0] * many
    relations = [c[2] for c in used]
    sources, ends = Places(tuple(froms), begin), Places(tuple(tos), end)
    whole = edges_in_a_row(relations, sources, ends)
    rows = {"h": torch.cat(h), "left": torch.cat(scores)}
    near = attending(slope)(whole, rows, {"right": torch.cat(rights)})
    parts = near.split([t.shape[0] for t in rights])
    found = {
        n: ([used[i] for i in places], t.view(-1, len(places), heads, width))
        for (n, places), t in zip(by_end.items(), parts, strict=True)
    }
    for c in rest:
        none = near.new_zeros(c[3][1].shape[0], 0, heads, width)
        found.setdefault(c[0][2], ([], none))[0].append(c)
    return [(group, Arrived(t, len(group))) for group, t in found.values()]


def _numbers(
    calls: Sequence[Call],
) -> tuple[list[Tensor], list[Tensor], float] | None:
    """Return the layers' matrices, their vectors of both ends in turn, and their slope;
    None unless they may share products: plain ones of one shape and dtype, without
    dropout."""
    _, first, _, (rows, _) = calls[0]
    shape, slope = first.attn_l.shape, first.slope
    size = torch.Size((shape.numel(), rows.shape[-1]))
    weights, attention, products = [], [], []
    for _, layer, relation, _ in calls:
        if not layer.allow_zero_in_degree:
            check_degrees(relation, False)
        fc, drop = layer._modules.get("fc"), layer._modules["feat_drop"]
        dropped = drop.p or (layer.training and layer._modules["attn_drop"].p)
        if type(fc) is not nn.Linear or fc.bias is not None or dropped:
            return None
        own = layer._parameters
        sides = own.get("attn_l"), own.get("attn_r")
        if sides[0] is None or sides[1] is None:  # of a replica
            sides = layer.attn_l, layer.attn_r
        if layer.slope != slope or fc.weight.shape != size:
            return None
        if not sides[0].shape == sides[1].shape == shape:
            return None
        weights.append(fc.weight)
        attention += sides
        products.append(fc)
    dtypes = {t.dtype for t in (*weights, *attention)}
    if dtypes == {rows.dtype} and _are_alike(calls) and plainly_called(*products):
        return weights, attention, slope
    return None


def _are_alike(calls: Sequence[Call]) -> bool:
    """Whether rows of all ends are matrices of one dtype and width, which products
    leave.

    Raises:
        ValueError: another number of rows than an end has, or on another device.
    """
    first = calls[0][3][0]
    dtype, width = first.dtype, first.shape[-1]
    for _, _, relation, feat in calls:
        for t, frame in zip(feat, (relation.srcdata, relation.dstdata), strict=True):
            if t.dtype is not dtype or t.dim() != 2 or t.shape[1] != width:
                return False
            if t.shape[0] != frame.num_rows or t.device != frame.device:
                frame.check("h", t)
    return dtype in PLAIN and not torch.is_autocast_enabled(first.device.type)
