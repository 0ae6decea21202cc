"""What graph programs should give: loops over nodes and edges, which know no graph."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hector.message import layers as message_layers
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.nn.reduce import VARIANCE_FLOOR

EDGE_TYPES = [("a", "r0", "a"), ("a", "r1", "a"), ("a", "r2", "b"), ("b", "r3", "a")]


def grouped(rows: Tensor, group: Tensor, count: int, how: str) -> Tensor:
    """[count, ...] sum, mean or max of the rows of each group; 0 for none."""
    index = group.view(-1, *(1,) * (rows.dim() - 1)).expand_as(rows)
    out = rows.new_zeros(count, *rows.shape[1:])
    if how == "max":
        return out.scatter_reduce(0, index, rows, "amax", include_self=False)
    total = out.index_add(0, group, rows)
    if how == "mean":
        num = torch.bincount(group, minlength=count).clamp(min=1).to(rows.dtype)
        total = total / num.view(-1, *(1,) * (rows.dim() - 1))
    return total


def softmax(score: Tensor, group: Tensor, count: int) -> Tensor:
    """Over the rows of each group."""
    top = grouped(score.detach(), group, count, "max")[group]
    power = (score - top).exp()
    return power / (grouped(power, group, count, "sum")[group] + 1e-16)


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


def rgat(
    conv: RGATConv,
    x: Tensor,
    ends: Tensor,
    kinds: Tensor,
    attr: Tensor | None = None,
) -> Tensor:
    """Additive or multiplicative attention across or within relations."""
    weight: Tensor = (
        torch.einsum("rb,bio->rio", conv.att, conv.basis)
        if conv.num_bases is not None
        else conv.weight
    )
    (src, dst), count = ends, x.shape[0]
    every = torch.einsum("ni,rio->rno", x, weight)
    left, right = every[kinds, dst], every[kinds, src]
    query, key = left @ conv.q, right @ conv.k
    if conv.attention_mode == "additive-self-attention":
        score = query + key
        if attr is not None and conv.lin_edge is not None and conv.e is not None:
            score = score + conv.lin_edge(attr) @ conv.e
        score = functional.leaky_relu(score, conv.negative_slope)
    else:
        score = query * key
    group, groups = dst, count
    if conv.attention_mechanism == "within-relation":
        group, groups = dst * conv.num_relations + kinds, count * conv.num_relations
    att = softmax(score, group, groups)
    rows = right.view(-1, conv.heads, conv.out_channels) * att[:, :, None]
    out = grouped(rows, dst, count, "sum")
    out = out.flatten(1) if conv.concat else out.mean(1)
    return out if conv.bias is None else out + conv.bias


def hgt(
    conv: HGTConv, x: dict[str, Tensor], edges: dict[Any, Tensor]
) -> dict[str, Tensor]:
    """Attention over all relations into a node."""
    heads, width = conv.heads, conv.out_channels // conv.heads
    kqv = {n: conv.kqv_lin.lins[n](t).chunk(3, 1) for n, t in x.items()}
    shaped = {n: [p.view(-1, heads, width) for p in ps] for n, ps in kqv.items()}
    scores: dict[str, list[Tensor]] = {n: [] for n in x}
    values: dict[str, list[Tensor]] = {n: [] for n in x}
    groups: dict[str, list[Tensor]] = {n: [] for n in x}
    k_rel, v_rel = conv.k_rel.by_relation(), conv.v_rel.by_relation()
    for i, kind in enumerate(conv.edge_types):
        if kind not in edges:
            continue
        src, dst = edges[kind]
        k = torch.einsum("ehd,hdf->ehf", shaped[kind[0]][0][src], k_rel[i])
        v = torch.einsum("ehd,hdf->ehf", shaped[kind[0]][2][src], v_rel[i])
        score = (shaped[kind[2]][1][dst] * k).sum(-1) * conv.p_rel["__".join(kind)]
        scores[kind[2]].append(score / width**0.5)
        values[kind[2]].append(v)
        groups[kind[2]].append(dst)
    out = {}
    for n, rows in x.items():
        if n not in conv.dst_node_types:
            continue
        total = rows.new_zeros(rows.shape[0], heads, width)
        if scores[n]:
            group = torch.cat(groups[n])
            att = softmax(torch.cat(scores[n]), group, rows.shape[0])
            total = grouped(
                torch.cat(values[n]) * att[:, :, None], group, rows.shape[0], "sum"
            )
        made = conv.out_lin.lins[n](functional.gelu(total.flatten(1)))
        if made.shape[1] == rows.shape[1]:
            gate = conv.skip[n].sigmoid()
            made = gate * made + (1 - gate) * rows
        out[n] = made
    return out


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
