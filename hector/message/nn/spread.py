"""Convolutions that spread rows over several steps, with DGL's arguments."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.initialization import glorot
from hector.message.batching import broadcast_nodes
from hector.message.nn.convs import (
    Activation,
    ExpectsEdges,
    check_degrees,
    degree_scale,
    relation_of,
    summed,
)
from hector.message.nn.weighed import EdgeWeightNorm
from hector.message.relation import Relation
from hector.precision import wide_linear
from hector.tracing import untraced


def _step(r: Relation, x: Tensor, weight: Tensor | None, out: bool = False) -> Tensor:
    """Return neighbours' rows over the roots of both ends' degrees: in-degrees, `out`:
    the source's out-degree; `weight`: weights that are normalized already instead."""
    if weight is not None:
        return summed(r, x, weight=weight)
    into = degree_scale(r.in_degrees(), -0.5, x.dtype)
    first = degree_scale(r.out_degrees(), -0.5, x.dtype) if out else into
    return summed(r, x * first) * into


def _normed(r: Relation, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else EdgeWeightNorm("both")(r, weight)


class SGConv(ExpectsEdges):
    """A matrix of rows that were spread `k` times (arXiv 1902.07153). `cached` keeps
    the first call's rows."""

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        k: int = 1,
        cached: bool = False,
        bias: bool = True,
        norm: Activation | None = None,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(in_feats, out_feats, bias=bias)
        self.k, self.cached, self.norm = k, cached, norm
        self.allow_zero_in_degree = allow_zero_in_degree
        self._rows: Tensor | None = None

    @untraced
    def forward(
        self, graph: Any, feat: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Return [nodes, out_feats]."""
        r = relation_of(graph)
        check_degrees(r, self.allow_zero_in_degree)
        rows = self._rows
        if rows is None:
            weight, rows = _normed(r, edge_weight), feat
            for _ in range(self.k):
                rows = _step(r, rows, weight)
            if self.norm is not None:
                rows = self.norm(rows)
            if self.cached:
                self._rows = rows
        return wide_linear(self.fc, rows)


class APPNPConv(nn.Module):
    """Rows spread `k` times, with a part `alpha` of the first ones in each
    (arXiv 1810.05997). `edge_drop`: dropout of edges."""

    def __init__(self, k: int, alpha: float, edge_drop: float = 0.0) -> None:
        super().__init__()
        self.k, self.alpha, self.edge_drop = k, alpha, nn.Dropout(edge_drop)

    @untraced
    def forward(
        self, graph: Any, feat: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Return [nodes, width]."""
        r, rows = relation_of(graph), feat
        weight = _normed(r, edge_weight)
        drops = self.training and self.edge_drop.p > 0
        for _ in range(self.k):
            if not drops:
                near = _step(r, rows, weight, out=True)
            elif weight is not None:
                near = _step(r, rows, self.edge_drop(weight))
            else:
                kept = self.edge_drop(feat.new_ones(r.num_edges()))
                start = degree_scale(r.out_degrees(), -0.5, feat.dtype)
                near = summed(r, rows * start, weight=kept)
                near = near * degree_scale(r.in_degrees(), -0.5, feat.dtype)
            rows = (1 - self.alpha) * near + self.alpha * feat
        return rows


class TAGConv(nn.Module):
    """A matrix of rows spread 0 to `k` times, side by side (arXiv 1710.10370)."""

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        k: int = 2,
        bias: bool = True,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.k, self.activation = k, activation
        self.lin = nn.Linear(in_feats * (k + 1), out_feats, bias=bias)

    @untraced
    def forward(
        self, graph: Any, feat: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Return [nodes, out_feats]."""
        r, rows = relation_of(graph), [feat]
        weight = _normed(r, edge_weight)
        for _ in range(self.k):
            rows.append(_step(r, rows[-1], weight))
        out = wide_linear(self.lin, torch.cat(rows, -1))
        return out if self.activation is None else self.activation(out)


class ChebConv(nn.Module):
    """A matrix of `k` Chebyshev polynomials of the scaled Laplacian
    (arXiv 1606.09375)."""

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        k: int,
        activation: Activation | None = F.relu,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.k, self.activation = k, activation
        self.linear = nn.Linear(k * in_feats, out_feats, bias)

    @untraced
    def forward(self, graph: Any, feat: Tensor, lambda_max: Any = None) -> Tensor:
        """Return [nodes, out_feats]. `lambda_max`: the largest eigenvalue for each
        graph of a batch; None: 2."""
        r = relation_of(graph)
        if lambda_max is None:
            lambda_max = [2.0] * graph.batch_size
        largest = torch.as_tensor(lambda_max, dtype=feat.dtype, device=feat.device)
        scale = 2 / broadcast_nodes(graph, largest.view(-1, 1))
        rows = [feat]
        for i in range(1, self.k):
            last = rows[-1]
            made = last * (scale - 1) - scale * _step(r, last, None)
            rows.append(made if i == 1 else 2 * made - rows[-2])
        out = wide_linear(self.linear, torch.cat(rows, 1))
        return out if self.activation is None else self.activation(out)


class GCN2Conv(ExpectsEdges):
    """A layer of GCNII (arXiv 2007.02133): spread rows and a part `alpha` of the first
    layer's, and of both a matrix with the part log(lambda / layer + 1)."""

    def __init__(
        self,
        in_feats: int,
        layer: int,
        alpha: float = 0.1,
        lambda_: float = 1,
        project_initial_features: bool = True,
        allow_zero_in_degree: bool = False,
        bias: bool = True,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, math.log(lambda_ / layer + 1)
        self.activation, self.allow_zero_in_degree = activation, allow_zero_in_degree
        self.weight1 = nn.Parameter(torch.empty(in_feats, in_feats))
        self.weight2 = None
        if not project_initial_features:
            self.weight2 = nn.Parameter(torch.empty(in_feats, in_feats))
        self.bias = nn.Parameter(torch.zeros(in_feats)) if bias else None
        for weight in (self.weight1, self.weight2):
            if weight is not None:
                glorot(weight)

    @untraced
    def forward(
        self,
        graph: Any,
        feat: Tensor,
        feat_0: Tensor,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Return [nodes, in_feats]; `feat_0`: the first layer's rows."""
        r = relation_of(graph)
        check_degrees(r, self.allow_zero_in_degree)
        near = _step(r, feat, _normed(r, edge_weight)) * (1 - self.alpha)
        first = feat_0[: near.shape[0]] * self.alpha
        whole = near + first
        if self.weight2 is None:
            made = whole @ self.weight1
        else:
            made = near @ self.weight1 + first @ self.weight2
        out = (1 - self.beta) * whole + self.beta * made
        out = out if self.bias is None else out + self.bias
        return out if self.activation is None else self.activation(out)
