"""Attention and gates without features of edges, with DGL's arguments."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.initialization import glorot
from hector.message import functions as fn
from hector.message.batches import EdgeBatch
from hector.message.joined import edge_softmax
from hector.message.nn.convs import (
    ExpectsEdges,
    Rows,
    check_degrees,
    relation_of,
    sides_of,
    summed,
    weighed,
)
from hector.message.nn.edge_layers import edges_reduced
from hector.precision import wide_linear
from hector.tracing import untraced
from hector.typed_linear import TypedLinear


@fn.pure
def _alike(e: EdgeBatch, scale: Tensor | float) -> dict[str, Any]:
    score = (e.src["l"] * e.dst["r"]).sum(-1, keepdim=True)
    return {"a": e.softmax(score * scale)}


class AGNNConv(ExpectsEdges):
    """Neighbours weighed by the softmax of `beta` times the cosine
    (arXiv 1803.03735)."""

    beta: Tensor

    def __init__(
        self,
        init_beta: float = 1.0,
        learn_beta: bool = True,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__()
        self.allow_zero_in_degree = allow_zero_in_degree
        if learn_beta:
            self.beta = nn.Parameter(torch.tensor([float(init_beta)]))
        else:
            self.register_buffer("beta", torch.tensor([float(init_beta)]))

    @untraced
    def forward(self, graph: Any, feat: Rows) -> Tensor:
        """Return a row a destination."""
        r = relation_of(graph)
        check_degrees(r, self.allow_zero_in_degree)
        rows, own = sides_of(r, feat)
        with r.local_scope():
            r.srcdata["h"] = rows
            r.srcdata["l"] = F.normalize(rows, dim=-1)
            r.dstdata["r"] = F.normalize(own, dim=-1)
            r.apply_edges(_alike(self.beta))
            r.update_all(weighed("a"), fn.sum("m", "o"))
            return r.dstdata["o"]


class DotGatConv(ExpectsEdges):
    """Attention of dot products: [destinations, heads, out_feats]."""

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        num_heads: int,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__()
        source, own = in_feats if isinstance(in_feats, tuple) else (in_feats, in_feats)
        self.heads, self.width = num_heads, out_feats
        self.allow_zero_in_degree = allow_zero_in_degree
        self.fc = None
        if isinstance(in_feats, tuple):
            self.fc_src = nn.Linear(source, num_heads * out_feats, bias=False)
            self.fc_dst = nn.Linear(own, num_heads * out_feats, bias=False)
        else:
            self.fc = nn.Linear(source, num_heads * out_feats, bias=False)

    @untraced
    def forward(self, graph: Any, feat: Rows, get_attention: bool = False) -> Any:
        """Return [destinations, heads, out_feats]; with `get_attention` also [edges,
        heads, 1]."""
        r = relation_of(graph)
        check_degrees(r, self.allow_zero_in_degree)
        rows, own = sides_of(r, feat)
        first, second = (
            (self.fc_src, self.fc_dst) if self.fc is None else (self.fc, self.fc)
        )
        with r.local_scope():
            left = wide_linear(first, rows).unflatten(1, (self.heads, -1))
            right = wide_linear(second, own).unflatten(1, (self.heads, -1))
            r.srcdata["l"], r.dstdata["r"] = left, right
            r.apply_edges(_alike(self.width**-0.5))
            share = r.edata["a"]
            r.update_all(weighed("a", "l"), fn.sum("m", "o"))
            out = r.dstdata["o"]
        return (out, share) if get_attention else out


class GatedGraphConv(nn.Module):
    """A GRU's steps over the sum of neighbours' rows, each times the matrix of its
    edge's type (arXiv 1511.05493)."""

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        n_steps: int,
        n_etypes: int,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if in_feats > out_feats:
            raise ValueError(f"expected in_feats up to {out_feats}, got {in_feats}")
        self.width, self.n_steps, self.n_etypes = out_feats, n_steps, n_etypes
        self.linears = nn.ModuleList(
            nn.Linear(out_feats, out_feats) for _ in range(n_etypes)
        )
        for p in self.linears.parameters():
            if p.dim() == 1:
                nn.init.zeros_(p)
        self.gru = nn.GRUCell(out_feats, out_feats, bias=bias)

    @untraced
    def forward(self, graph: Any, feat: Tensor, etypes: Tensor | None = None) -> Tensor:
        """Return [nodes, out_feats]; `etypes`: [edges], which a layer of one type need
        not have."""
        r = relation_of(graph)
        if etypes is None and self.n_etypes > 1:
            raise ValueError(f"expected etypes [edges] of {self.n_etypes} types")
        rows = F.pad(feat, (0, self.width - feat.shape[1]))
        for _ in range(self.n_steps):
            if etypes is None:
                near = summed(r, self.linears[0](rows))
            else:
                # A row a node and type is fewer than one an edge, as a rule.
                made = torch.stack([layer(rows) for layer in self.linears])
                near = edges_reduced(r, made[etypes, r.edges()[0]])
            rows = self.gru(near, rows)
        return rows


class HGTConv(nn.Module):
    """Heterogeneous graph transformer (arXiv 2003.01332) on a graph of one type whose
    nodes and edges have types."""

    def __init__(
        self,
        in_size: int,
        head_size: int,
        num_heads: int,
        num_ntypes: int,
        num_etypes: int,
        dropout: float = 0.2,
        use_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.scale = num_heads, head_size**-0.5
        width = head_size * num_heads
        self.linear_k, self.linear_q, self.linear_v = (
            TypedLinear(in_size, width, num_ntypes) for _ in range(3)
        )
        self.linear_a = TypedLinear(width, width, num_ntypes)
        self.relation_pri = nn.ParameterList(
            nn.Parameter(torch.ones(num_etypes)) for _ in range(num_heads)
        )
        self.relation_att, self.relation_msg = (
            nn.ModuleList(
                TypedLinear(head_size, head_size, num_etypes) for _ in range(num_heads)
            )
            for _ in range(2)
        )
        self.skip, self.drop = nn.Parameter(torch.ones(num_ntypes)), nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width) if use_norm else None
        self.residual_w = None
        if in_size != width:
            self.residual_w = nn.Parameter(torch.empty(in_size, width))
            glorot(self.residual_w)

    @untraced
    def forward(
        self,
        g: Any,
        x: Tensor,
        ntype: Tensor,
        etype: Tensor,
        *,
        presorted: bool = False,
    ) -> Tensor:
        """Return [destinations, heads * head_size]; `ntype`: of all sources. Of
        `presorted` nothing depends."""
        r = relation_of(g)
        own, kind = x[: r.num_dst_nodes()], ntype[: r.num_dst_nodes()]
        src, dst = r.edges()
        keys = self._split(self.linear_k(x, ntype))
        values = self._split(self.linear_v(x, ntype))
        queries = self._split(self.linear_q(own, kind))
        scores, messages = [], []
        for i in range(self.heads):
            key = self.relation_att[i](keys[src, i], etype)
            score = (key * queries[dst, i]).sum(-1) * self.scale
            scores.append(score * self.relation_pri[i][etype])
            messages.append(self.relation_msg[i](values[src, i], etype))
        share = edge_softmax(r, torch.stack(scores, 1))[..., None]
        near = edges_reduced(r, torch.stack(messages, 1) * share).flatten(1)
        made = self.drop(self.linear_a(near, kind))
        part = torch.sigmoid(self.skip[kind])[:, None]
        rest = own if self.residual_w is None else own @ self.residual_w
        out: Tensor = made * part + rest * (1 - part)
        if self.norm is not None:
            out = self.norm(out)
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, x.shape[1] // self.heads)
