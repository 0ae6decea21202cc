"""Relational layers by sorted per-relation matrix products: the plain good baseline.

Edges are sorted by relation, so a typed linear layer is one `torch.mm` a relation on
contiguous rows (or one grouped product for all), and aggregation is an `index_add_`.
No weight is replicated. The layers take over the parameters of PyG's, so that they
also check the compiled layers: same parameters, same outputs.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.graph import HeteroGraph


class Segments(NamedTuple):
    """Rows [ptr[i], ptr[i + 1]) belong to weight i."""

    offsets: tuple[int, ...]
    ends: Tensor
    """int32 [num_segments]: `offsets` without the first, on the device."""


TypedLinear = Callable[[Tensor, Tensor, Segments], Tensor]
"""(rows [n, in], weight [num_segments, in, out], segments) -> [n, out]."""


def edge_segments(graph: HeteroGraph) -> Segments:
    return Segments(graph.etype_offsets, graph.etype_ptr[1:].int())


class SegmentMM(torch.autograd.Function):
    """One `torch.mm` a segment, into one preallocated result, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, offsets: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.offsets = offsets
        out = rows.new_empty(rows.size(0), weight.size(2))
        for i, a, b in _filled(offsets):
            torch.mm(rows[a:b], weight[i], out=out[a:b])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        d_rows, d_weight = torch.empty_like(rows), torch.zeros_like(weight)
        for i, a, b in _filled(ctx.offsets):
            torch.mm(grad[a:b], weight[i].t(), out=d_rows[a:b])
            torch.mm(rows[a:b].t(), grad[a:b], out=d_weight[i])
        return d_rows, d_weight, None


def _filled(offsets: tuple[int, ...]) -> list[tuple[int, int, int]]:
    pairs = pairwise(offsets)
    return [(i, a, b) for i, (a, b) in enumerate(pairs) if b > a]


def loop_linear(rows: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    out: Tensor = SegmentMM.apply(rows, weight, segments.offsets)
    return out


def grouped_linear(rows: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """torch's grouped matrix product (bfloat16, 16-byte aligned rows, CUDA)."""
    return functional.grouped_mm(rows, weight, offs=segments.ends)


def reached(graph: HeteroGraph) -> Tensor:
    """bool [num_nodes]: nodes of a type that some relation leads to."""
    ends = {b for _, _, b in graph.edge_type_metadata()}
    kinds = torch.tensor([name in ends for name in graph.node_type_names])
    return kinds.to(graph.device)[graph.node_type]


def segment_softmax(logits: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Softmax of logits [n, heads] over the rows of each group, max subtracted."""
    shape = (num_groups, logits.size(1))
    where = index[:, None].expand_as(logits)
    top = logits.new_full(shape, -math.inf)
    top = top.scatter_reduce(0, where, logits.detach(), "amax")
    power = (logits - top[index]).exp()
    total = power.new_zeros(shape).index_add(0, index, power)
    return power / (total[index] + 1e-16)


class SortedRGCN(nn.Module):
    """PyG's RGCNConv with mean aggregation."""

    def __init__(self, conv: nn.Module, graph: HeteroGraph, linear: TypedLinear):
        super().__init__()
        self.conv, self.linear = conv, linear
        self.segments = edge_segments(graph)
        pairs = graph.unique_dst()
        count = pairs.edges().ptr.diff()
        scale = (1 / count.double()).to(conv.weight.dtype)
        self.scale = scale[pairs.edge_to_unique][:, None]

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        conv = self.conv
        message = self.linear(x[graph.src], conv.weight, self.segments)
        message = message * self.scale
        out = x @ conv.root + conv.bias
        return out.index_add(0, graph.dst, message)


class SortedRGAT(nn.Module):
    """PyG's RGATConv with additive attention across relations, no edge features."""

    def __init__(self, conv: nn.Module, graph: HeteroGraph, linear: TypedLinear):
        super().__init__()
        self.conv, self.linear = conv, linear
        self.segments = edge_segments(graph)

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        conv = self.conv
        heads, channels = conv.heads, conv.out_channels
        query = self.linear(x[graph.dst], conv.weight, self.segments) @ conv.q
        value = self.linear(x[graph.src], conv.weight, self.segments)
        logits = functional.leaky_relu(query + value @ conv.k, conv.negative_slope)
        alpha = segment_softmax(logits, graph.dst, graph.num_nodes)
        message = (value.view(-1, heads, channels) * alpha[:, :, None]).flatten(1)
        out = message.new_zeros(graph.num_nodes, heads * channels)
        return out.index_add(0, graph.dst, message) + conv.bias


class SortedHGT(nn.Module):
    """PyG's HGTConv. Nodes of a type that no relation leads to, which PyG leaves out,
    get rows like the others: see `reached`."""

    def __init__(self, conv: nn.Module, graph: HeteroGraph, linear: TypedLinear):
        super().__init__()
        self.conv, self.linear = conv, linear
        self.edges, ends = edge_segments(graph), graph.node_type_ptr[1:].int()
        self.nodes = Segments(graph.node_type_offsets, ends)
        self.names = graph.node_type_names

    def _node_weights(self, lin: nn.Module) -> tuple[Tensor, Tensor]:
        weight = torch.stack([lin.lins[n].weight.t() for n in self.names])
        return weight, torch.stack([lin.lins[n].bias for n in self.names])

    def _edge_linear(self, rows: Tensor, lin: nn.Module) -> Tensor:
        """Apply [heads * num_edge_types, dim, dim] head by head."""
        weight = lin.weight.view(self.conv.heads, -1, *lin.weight.shape[1:])
        parts = [
            self.linear(rows[:, h].contiguous(), weight[h], self.edges)
            for h in range(self.conv.heads)
        ]
        return torch.stack(parts, 1)

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        conv = self.conv
        heads, dim = conv.heads, conv.out_channels // conv.heads
        weight, bias = self._node_weights(conv.kqv_lin)
        kqv = self.linear(x, weight, self.nodes) + bias[graph.node_type]
        key, query, value = kqv.view(-1, 3, heads, dim).unbind(1)
        key = self._edge_linear(key[graph.src], conv.k_rel)
        value = self._edge_linear(value[graph.src], conv.v_rel)
        priors = [conv.p_rel["__".join(e)] for e in conv.edge_types]
        prior = torch.cat(priors)[graph.edge_type]
        logits = (query[graph.dst] * key).sum(-1) * prior / math.sqrt(dim)
        alpha = segment_softmax(logits, graph.dst, graph.num_nodes)
        message = (value * alpha[:, :, None]).flatten(1)
        out = message.new_zeros(graph.num_nodes, heads * dim)
        out = functional.gelu(out.index_add(0, graph.dst, message))
        weight, bias = self._node_weights(conv.out_lin)
        out = self.linear(out, weight, self.nodes) + bias[graph.node_type]
        if out.size(1) == x.size(1):
            skip = torch.cat([conv.skip[n] for n in self.names]).sigmoid()
            gate = skip[graph.node_type][:, None]
            out = gate * out + (1 - gate) * x
        return out
