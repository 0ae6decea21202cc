"""Convolutions that read features of edges, with DGL's arguments."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.initialization import glorot
from hector.message import functions as fn
from hector.message.batches import EdgeBatch
from hector.message.nn.convs import (
    Activation,
    ExpectsEdges,
    Rows,
    check_degrees,
    relation_of,
    sides_of,
    weighed,
)
from hector.message.relation import Relation
from hector.precision import wide_linear
from hector.tracing import untraced


def edges_reduced(r: Relation, rows: Tensor, how: str = "sum") -> Tensor:
    """Reduce rows of edges."""
    with r.local_scope():
        r.edata["m"] = rows
        r.update_all(fn.copy_e("m", "m"), getattr(fn, how)("m", "o"))
        return r.dstdata["o"]


def _reducer(given: str) -> str:
    if given not in ("sum", "mean", "max"):
        raise ValueError(f"expected aggregator_type sum, mean or max, got {given!r}")
    return given


def _residual(ins: int, outs: int, wanted: bool) -> nn.Module | None:
    if not wanted:
        return None
    return nn.Identity() if ins == outs else nn.Linear(ins, outs, bias=False)


def _ended(layer: Any, out: Tensor, own: Tensor) -> Tensor:
    """Add what a layer has of residual and bias."""
    if layer.res_fc is not None:
        out = out + layer.res_fc(own)
    return out if layer.bias is None else out + layer.bias


@fn.pure
def _added(e: EdgeBatch) -> dict[str, Any]:
    return {"m": F.relu(e.src["h"] + e.data["e"])}


class GINEConv(nn.Module):
    """GIN with features of edges (arXiv 1905.12265): `apply_func` of (1 + eps) times a
    node's row plus the sum of relu(neighbour + edge)."""

    eps: Tensor

    def __init__(
        self,
        apply_func: Activation | None = None,
        init_eps: float = 0.0,
        learn_eps: bool = False,
    ) -> None:
        super().__init__()
        self.apply_func = apply_func
        if learn_eps:
            self.eps = nn.Parameter(torch.tensor([float(init_eps)]))
        else:
            self.register_buffer("eps", torch.tensor([float(init_eps)]))

    @untraced
    def forward(self, graph: Any, node_feat: Rows, edge_feat: Tensor) -> Tensor:
        """Return a row a destination."""
        r = relation_of(graph)
        rows, own = sides_of(r, node_feat)
        with r.local_scope():
            r.srcdata["h"], r.edata["e"] = rows, edge_feat
            r.update_all(_added(), fn.sum("m", "o"))
            out = (1 + self.eps) * own + r.dstdata["o"]
        return out if self.apply_func is None else self.apply_func(out)


class NNConv(nn.Module):
    """A neighbour's row times the matrix that `edge_func` makes of the edge's
    (arXiv 1704.01212)."""

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        edge_func: Callable[[Tensor], Tensor],
        aggregator_type: str = "mean",
        residual: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        source, own = in_feats if isinstance(in_feats, tuple) else (in_feats, in_feats)
        self.shape, self.edge_func = (source, out_feats), edge_func
        self.how = _reducer(aggregator_type)
        self.res_fc = _residual(own, out_feats, residual)
        self.bias = nn.Parameter(torch.zeros(out_feats)) if bias else None

    @untraced
    def forward(self, graph: Any, feat: Rows, efeat: Tensor) -> Tensor:
        """Return [destinations, out_feats]."""
        r = relation_of(graph)
        rows, own = sides_of(r, feat)
        matrix = self.edge_func(efeat).view(-1, *self.shape)
        parts = rows[r.edges()[0]][:, :, None] * matrix
        if self.how == "max":  # of each product, before the sum of them, as DGL's
            made = edges_reduced(r, parts.flatten(1), "max")
            return _ended(self, made.view(-1, *self.shape).sum(1), own)
        return _ended(self, edges_reduced(r, parts.sum(1), self.how), own)


class GMMConv(ExpectsEdges):
    """Neighbours weighed by Gaussians of pseudo-coordinates (arXiv 1611.08402)."""

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        dim: int,
        n_kernels: int,
        aggregator_type: str = "sum",
        residual: bool = False,
        bias: bool = True,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__()
        source, own = in_feats if isinstance(in_feats, tuple) else (in_feats, in_feats)
        self.how, self.kernels = _reducer(aggregator_type), n_kernels
        self.allow_zero_in_degree = allow_zero_in_degree
        self.mu = nn.Parameter(0.1 * torch.randn(n_kernels, dim))
        self.inv_sigma = nn.Parameter(torch.ones(n_kernels, dim))
        self.fc = nn.Linear(source, n_kernels * out_feats, bias=False)
        self.res_fc = _residual(own, out_feats, residual)
        self.bias = nn.Parameter(torch.zeros(out_feats)) if bias else None

    @untraced
    def forward(self, graph: Any, feat: Rows, pseudo: Tensor) -> Tensor:
        """Return [destinations, out_feats]."""
        r = relation_of(graph)
        check_degrees(r, self.allow_zero_in_degree)
        rows, own = sides_of(r, feat)
        off = (pseudo[:, None] - self.mu) * self.inv_sigma
        with r.local_scope():
            r.srcdata["h"] = wide_linear(self.fc, rows).unflatten(1, (self.kernels, -1))
            r.edata["w"] = (off.square().sum(-1, keepdim=True) * -0.5).exp()
            r.update_all(weighed("w"), getattr(fn, self.how)("m", "o"))
            made = r.dstdata["o"].sum(1)
        return _ended(self, made, own)


class CFConv(nn.Module):
    """SchNet's filters of edges (arXiv 1706.08566)."""

    def __init__(
        self,
        node_in_feats: int,
        edge_in_feats: int,
        hidden_feats: int,
        out_feats: int,
    ) -> None:
        super().__init__()
        self.project_edge = nn.Sequential(
            nn.Linear(edge_in_feats, hidden_feats),
            ShiftedSoftplus(),
            nn.Linear(hidden_feats, hidden_feats),
            ShiftedSoftplus(),
        )
        self.project_node = nn.Linear(node_in_feats, hidden_feats)
        self.project_out = nn.Sequential(
            nn.Linear(hidden_feats, out_feats), ShiftedSoftplus()
        )

    @untraced
    def forward(self, g: Any, node_feats: Rows, edge_feats: Tensor) -> Tensor:
        """Return [destinations, out_feats]."""
        r = relation_of(g)
        with r.local_scope():
            r.srcdata["h"] = self.project_node(sides_of(r, node_feats)[0])
            r.edata["e"] = self.project_edge(edge_feats)
            r.update_all(weighed("e"), fn.sum("m", "o"))
            found: Tensor = self.project_out(r.dstdata["o"])
            return found


class ShiftedSoftplus(nn.Module):
    """softplus(x) - log 2."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x's."""
        return F.softplus(x) - math.log(2.0)


class EdgeConv(ExpectsEdges):
    """The maximum of theta(destination - source) + phi(destination)
    (arXiv 1801.07829), each a matrix; with `batch_norm` over edges."""

    def __init__(
        self,
        in_feat: int,
        out_feat: int,
        batch_norm: bool = False,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__()
        self.theta, self.phi = (nn.Linear(in_feat, out_feat) for _ in range(2))
        self.bn = nn.BatchNorm1d(out_feat) if batch_norm else None
        self.allow_zero_in_degree = allow_zero_in_degree

    @untraced
    def forward(self, g: Any, feat: Rows) -> Tensor:
        """Return [destinations, out_feat]."""
        r = relation_of(g)
        check_degrees(r, self.allow_zero_in_degree)
        rows, own = sides_of(r, feat)
        # theta(v - u) + phi(v): what depends on v is made once a node.
        right = wide_linear(self.theta, own) + wide_linear(self.phi, own)
        with r.local_scope():
            r.srcdata["l"] = F.linear(rows, self.theta.weight)
            r.dstdata["r"] = right
            sides = (fn.Side.DESTINATION, "r"), (fn.Side.SOURCE, "l")
            message = fn.MessageFunction(fn.Combine.SUB, *sides, "m")
            if self.bn is not None:
                r.apply_edges(message)
                return edges_reduced(r, self.bn(r.edata["m"]), "max")
            r.update_all(message, fn.max("m", "o"))
            return r.dstdata["o"]


@fn.pure
def _scores(e: EdgeBatch, attn: Tensor) -> dict[str, Any]:
    made = F.leaky_relu(e.src["l"] + e.dst["r"] + e.data["e"])
    return {"f": made, "a": e.softmax((made * attn).sum(-1, keepdim=True))}


class EGATConv(nn.Module):
    """Attention that reads and makes features of edges (arXiv 2101.10181):
    [destinations, heads, out_node_feats] and [edges, heads, out_edge_feats]."""

    def __init__(
        self,
        in_node_feats: int | tuple[int, int],
        in_edge_feats: int,
        out_node_feats: int,
        out_edge_feats: int,
        num_heads: int,
        bias: bool = True,
    ) -> None:
        super().__init__()
        given = in_node_feats
        source, own = given if isinstance(given, tuple) else (given, given)
        nodes, edges = num_heads * out_node_feats, num_heads * out_edge_feats
        self.heads = num_heads
        self.fc_node_src = nn.Linear(source, nodes, bias=False)
        self.fc_ni = nn.Linear(source, edges, bias=False)
        self.fc_nj = nn.Linear(own, edges, bias=False)
        self.fc_fij = nn.Linear(in_edge_feats, edges, bias=False)
        self.attn = nn.Parameter(torch.empty(1, num_heads, out_edge_feats))
        glorot(self.attn)
        self.bias = nn.Parameter(torch.zeros(edges)) if bias else None

    @untraced
    def forward(
        self,
        graph: Any,
        nfeats: Rows,
        efeats: Tensor,
        edge_weight: Tensor | None = None,
        get_attention: bool = False,
    ) -> Any:
        """Return rows of destinations and of edges; with `get_attention` also [edges,
        heads, 1]."""
        r = relation_of(graph)
        check_degrees(r, False)
        rows, own = sides_of(r, nfeats)
        edge = wide_linear(self.fc_fij, efeats)
        edge = edge if self.bias is None else edge + self.bias
        with r.local_scope():
            r.srcdata["l"] = self._split(wide_linear(self.fc_ni, rows))
            r.dstdata["r"] = self._split(wide_linear(self.fc_nj, own))
            r.edata["e"] = self._split(edge)
            r.srcdata["h"] = self._split(wide_linear(self.fc_node_src, rows))
            r.apply_edges(_scores(self.attn))
            if edge_weight is not None:
                r.edata["a"] = r.edata["a"] * edge_weight.view(-1, 1, 1)
            share = r.edata["a"]
            r.update_all(weighed("a"), fn.sum("m", "o"))
            found = r.dstdata["o"], r.edata["f"]
        return (*found, share) if get_attention else found

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, x.shape[1] // self.heads)


@fn.pure
def _gates(e: EdgeBatch) -> dict[str, Any]:
    made = e.src["d"] + e.dst["e"] + e.data["c"]
    gate = torch.sigmoid(made)
    return {"e": made, "g": gate, "m": gate * e.src["b"]}


class GatedGCNConv(nn.Module):
    """Gates of edges (arXiv 1711.07553, benchmark of arXiv 2003.00982)."""

    def __init__(
        self,
        input_feats: int,
        edge_feats: int,
        output_feats: int,
        dropout: float = 0.0,
        batch_norm: bool = True,
        residual: bool = True,
        activation: Activation | None = F.relu,
    ) -> None:
        super().__init__()
        self.dropout, self.batch_norm = nn.Dropout(dropout), batch_norm
        same = input_feats == output_feats == edge_feats
        self.residual, self.activation = residual and same, activation
        self.A, self.B, self.D, self.E = (
            nn.Linear(input_feats, output_feats) for _ in range(4)
        )
        self.C = nn.Linear(edge_feats, output_feats)
        self.bn_node = nn.BatchNorm1d(output_feats)
        self.bn_edge = nn.BatchNorm1d(output_feats)

    @untraced
    def forward(
        self, graph: Any, feat: Tensor, edge_feat: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return rows of nodes and of edges."""
        r = relation_of(graph)
        with r.local_scope():
            for name, layer in (("b", self.B), ("d", self.D), ("e", self.E)):
                r.ndata[name] = wide_linear(layer, feat)
            r.edata["c"] = wide_linear(self.C, edge_feat)
            r.apply_edges(_gates())
            r.update_all(fn.copy_e("m", "m"), fn.sum("m", "near"))
            r.update_all(fn.copy_e("g", "m"), fn.sum("m", "gates"))
            near = r.ndata["near"] / (r.ndata["gates"] + 1e-6)
            h, e = wide_linear(self.A, feat) + near, r.edata["e"]
        if self.batch_norm:
            h, e = self.bn_node(h), self.bn_edge(e)
        if self.activation is not None:
            h, e = self.activation(h), self.activation(e)
        if self.residual:
            h, e = feat + h, edge_feat + e
        return self.dropout(h), self.dropout(e)


class EGNNConv(nn.Module):
    """Equivariant rows and coordinates (arXiv 2102.09844)."""

    def __init__(
        self, in_size: int, hidden_size: int, out_size: int, edge_feat_size: int = 0
    ) -> None:
        super().__init__()
        self.edge_feat_size = edge_feat_size
        self.edge_mlp = nn.Sequential(
            nn.Linear(in_size * 2 + edge_feat_size + 1, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.SiLU(),
        )
        self.node_mlp = nn.Sequential(
            nn.Linear(in_size + hidden_size, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, out_size),
        )
        self.coord_mlp = nn.Sequential(
            nn.Linear(hidden_size, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, 1, bias=False),
        )

    @untraced
    def forward(
        self,
        graph: Any,
        node_feat: Tensor,
        coord_feat: Tensor,
        edge_feat: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return rows [nodes, out_size] and coordinates of nodes."""
        if self.edge_feat_size and edge_feat is None:
            raise ValueError(f"expected edge_feat [edges, {self.edge_feat_size}]")
        r = relation_of(graph)
        src, dst = r.edges()
        off = coord_feat[src] - coord_feat[dst]
        radial = off.square().sum(1, keepdim=True)
        off = off / (radial.sqrt() + 1e-30)
        read = [node_feat[src], node_feat[dst], radial]
        if edge_feat is not None and self.edge_feat_size:
            read.append(edge_feat)
        message = self.edge_mlp(torch.cat(read, -1))
        moved = edges_reduced(r, self.coord_mlp(message) * off, "mean")
        near = edges_reduced(r, message)
        rows: Tensor = self.node_mlp(torch.cat((node_feat, near), -1))
        return rows, coord_feat + moved
