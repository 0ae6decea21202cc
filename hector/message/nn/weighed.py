"""Layers with a weight an edge: relational, GATv2's attention, norms of weights."""

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
from hector.precision import wide_linear
from hector.tracing import untraced
from hector.typed_linear import TypedLinear


class RelGraphConv(nn.Module):
    """Relational graph convolution (arXiv 1703.06103) on a graph of one type whose
    edges have types: neighbours' rows times the matrix of the edge's type, summed; with
    a matrix for the node itself."""

    def __init__(
        self,
        in_feat: int,
        out_feat: int,
        num_rels: int,
        regularizer: str | None = None,
        num_bases: int | None = None,
        bias: bool = True,
        activation: Activation | None = None,
        self_loop: bool = True,
        dropout: float = 0.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        if regularizer is not None and num_bases is None:
            num_bases = num_rels
        self.linear_r = TypedLinear(in_feat, out_feat, num_rels, regularizer, num_bases)
        self.h_bias = nn.Parameter(torch.zeros(out_feat)) if bias else None
        self.loop_weight = None
        if self_loop:
            self.loop_weight = nn.Parameter(torch.empty(in_feat, out_feat))
            glorot(self.loop_weight)
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.layer_norm_weight = nn.LayerNorm(out_feat) if layer_norm else None

    @untraced
    def forward(
        self,
        g: Any,
        feat: Rows,
        etypes: Tensor | list[int],
        norm: Tensor | None = None,
        *,
        presorted: bool = False,
    ) -> Tensor:
        """Return [destinations, out_feat]. `etypes`: [edges], or how many edges each
        type has, type by type; `norm`: [edges, 1], multiplies messages."""
        r = relation_of(g)
        rows, own = sides_of(r, feat)
        kinds = torch.as_tensor(etypes, device=rows.device)
        if isinstance(etypes, list):
            kinds = torch.arange(len(etypes), device=rows.device)
            kinds = kinds.repeat_interleave(torch.tensor(etypes, device=rows.device))
        message = self.linear_r(rows[r.edges()[0]], kinds)
        if norm is not None:
            message = message * norm
        with r.local_scope():
            r.edata["m"] = message
            r.update_all(fn.copy_e("m", "m"), fn.sum("m", "o"))
            out = r.dstdata["o"]
        if self.layer_norm_weight is not None:
            out = self.layer_norm_weight(out)
        if self.h_bias is not None:
            out = out + self.h_bias
        if self.loop_weight is not None:
            out = out + own @ self.loop_weight
        if self.activation is not None:
            out = self.activation(out)
        return self.dropout(out)  # type: ignore[no-any-return]


@fn.pure
def _scored(e: EdgeBatch, attn: Tensor, slope: float) -> dict[str, Any]:
    score = F.leaky_relu(e.src["l"] + e.dst["r"], slope) * attn
    return {"a": e.softmax(score.sum(-1, keepdim=True))}


class GATv2Conv(ExpectsEdges):
    """Attention of a nonlinear score (arXiv 2105.14491): [destinations, heads,
    out_feats]."""

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        num_heads: int,
        feat_drop: float = 0.0,
        attn_drop: float = 0.0,
        negative_slope: float = 0.2,
        residual: bool = False,
        activation: Activation | None = None,
        allow_zero_in_degree: bool = False,
        bias: bool = True,
        share_weights: bool = False,
    ) -> None:
        super().__init__()
        source, own = in_feats if isinstance(in_feats, tuple) else (in_feats, in_feats)
        self.heads, self.slope, self.activation = num_heads, negative_slope, activation
        self.allow_zero_in_degree = allow_zero_in_degree
        width = num_heads * out_feats
        self.fc_src = nn.Linear(source, width, bias=bias)
        self.fc_dst = self.fc_src if share_weights else nn.Linear(own, width, bias=bias)
        self.attn = nn.Parameter(torch.empty(1, num_heads, out_feats))
        for t in (self.attn, self.fc_src.weight, self.fc_dst.weight):
            glorot(t)
        self.feat_drop, self.attn_drop = nn.Dropout(feat_drop), nn.Dropout(attn_drop)
        self.res_fc: nn.Module | None = None
        if residual:
            same = own == width
            self.res_fc = nn.Identity() if same else nn.Linear(own, width, bias=bias)

    @untraced
    def forward(self, graph: Any, feat: Rows, get_attention: bool = False) -> Any:
        """Return [destinations, heads, out_feats]; with `get_attention` also [edges,
        heads, 1]."""
        r = relation_of(graph)
        check_degrees(r, self.allow_zero_in_degree)
        given = tuple(map(self.feat_drop, feat)) if isinstance(feat, tuple) else None
        rows, own = sides_of(r, self.feat_drop(feat) if given is None else given)
        left = wide_linear(self.fc_src, rows).unflatten(1, (self.heads, -1))
        right = wide_linear(self.fc_dst, own).unflatten(1, (self.heads, -1))
        with r.local_scope():
            r.srcdata["l"], r.dstdata["r"] = left, right
            r.apply_edges(_scored(self.attn, self.slope))
            share = r.edata["a"]
            r.edata["a"] = self.attn_drop(share)
            r.update_all(weighed("a", "l"), fn.sum("m", "o"))
            out = r.dstdata["o"]
        if self.res_fc is not None:
            out = out + self.res_fc(own).unflatten(1, (self.heads, -1))
        if self.activation is not None:
            out = self.activation(out)
        return (out, share) if get_attention else out


class EdgeWeightNorm(nn.Module):
    """Weights of edges over the root of both ends' sums of them ("both"), or over the
    destination's sum ("right"); `eps` is added to sums."""

    def __init__(self, norm: str = "both", eps: float = 0.0) -> None:
        super().__init__()
        if norm not in ("both", "right", "none"):
            raise ValueError(f"expected norm 'both', 'right' or 'none', got {norm!r}")
        self.norm, self.eps = norm, eps

    @untraced
    def forward(self, graph: Any, edge_weight: Tensor) -> Tensor:
        """Return [edges]; ValueError for weights that are not positive, whose roots
        are none."""
        if edge_weight.dim() != 1:
            raise ValueError(f"expected weights [edges], got {edge_weight.shape}")
        if self.norm == "both" and bool((edge_weight <= 0).any()):
            raise ValueError("expected positive weights for norm 'both'")
        r = relation_of(graph)
        src, dst = r.edges()
        first = edge_weight.new_full((r.num_dst_nodes(),), self.eps)
        into = first.index_add(0, dst, edge_weight)
        if self.norm == "both":
            first = edge_weight.new_full((r.num_src_nodes(),), self.eps)
            out = first.index_add(0, src, edge_weight)
            return edge_weight / (out[src] * into[dst]) ** 0.5
        if self.norm == "right":
            return edge_weight / into[dst]
        return edge_weight
