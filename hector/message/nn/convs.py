"""Convolutions with DGL's arguments."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.initialization import glorot
from hector.message import functions as fn
from hector.message.batches import EdgeBatch
from hector.message.direct import neighbours
from hector.message.joined import Sent, as_features
from hector.message.layers import attending
from hector.message.relation import Relation
from hector.precision import wide_linear
from hector.tracing import untraced

Rows = Tensor | tuple[Tensor, Tensor]
Activation = Callable[[Tensor], Tensor]


def relation_of(graph: Any) -> Relation:
    """Return the edges of a graph of one type, with its features left alone."""
    found: Relation = graph if isinstance(graph, Relation) else graph[None]
    return found


def sides_of(g: Relation, feat: Rows) -> tuple[Tensor, Tensor]:
    """Return rows of sources and of destinations, which are the first sources of a
    block."""
    if isinstance(feat, tuple):
        return feat
    return feat, feat[: g.num_dst_nodes()]


def check_degrees(g: Relation, allowed: bool) -> None:
    """Raise ValueError for nodes without edges into them, unless they are allowed."""
    if not allowed and bool((g.in_degrees() == 0).any()):
        raise ValueError(
            "expected an edge into every node, some have none, whose results would be "
            "zeros; add self-loops, or set allow_zero_in_degree=True"
        )


class ExpectsEdges(nn.Module):
    """A layer that expects an edge into every node, unless it is told otherwise."""

    allow_zero_in_degree: bool

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        """Say whether nodes without edges into them are taken."""
        self.allow_zero_in_degree = set_value


@cache
def weighed(name: str, rows: str = "h") -> fn.MessageFunction:
    """Return the source's row times an edge feature."""
    sides = (fn.Side.SOURCE, rows), (fn.Side.EDGE, name)
    return fn.MessageFunction(fn.Combine.MUL, *sides, "m")


Reducers = Callable[[str, str], fn.ReduceFunction]
"""A function of `hector.message.functions`."""


def summed(
    g: Relation, rows: Tensor, how: str = "sum", weight: Tensor | None = None
) -> Tensor:
    """Reduce the rows of neighbours, times `weight` [edges]."""
    sent = _sums(rows, getattr(fn, how), weight)
    found: Tensor = sent.along(g, sent.sources, sent.ends)
    return found


def _sums(rows: Tensor, reducer: Reducers, weight: Tensor | None = None) -> Sent:
    if weight is None:
        return Sent(_along(reducer), reducer, {"h": rows}, {})
    return _weighed(rows, reducer("m", "o"), weight)


@cache
def _along(reducer: Reducers) -> Callable[..., Tensor]:
    return lambda g, sources, _: neighbours(g, sources["h"], reducer)


def _weighed(rows: Tensor, reduce: fn.ReduceFunction, weight: Tensor | None) -> Sent:
    along = as_features(partial(_reduced, reduce=reduce, weight=weight))
    return Sent(along, None, {"h": rows}, {})


def _reduced(g: Relation, reduce: fn.ReduceFunction, weight: Tensor | None) -> Tensor:
    message = fn.copy_u("h", "m")
    if weight is not None:
        g.edata["w"], message = weight.view(-1, 1), weighed("w")
    g.update_all(message, reduce)
    return g.dstdata["o"]


class _Sender(nn.Module):
    """A layer whose subclass has two halves: what is sent, and what is made of it.
    `HeteroGraphConv` sends for several layers at once."""

    def enters(self, feat: Rows) -> Rows:
        """Return the rows that the layer computes with."""
        return feat

    def sends(self, g: Relation, feat: Rows) -> Sent:
        """Return what is sent along the edges of `g`."""
        raise NotImplementedError

    def makes(self, g: Relation, feat: Rows, near: Tensor) -> Tensor:
        """Return the layer's result of what arrived at destinations."""
        raise NotImplementedError


class GraphConv(_Sender, ExpectsEdges):
    """Kipf and Welling (arXiv 1609.02907): neighbours' rows, over the root of the
    product of both degrees ("both"), the in-degree ("right"), the out-degree ("left"),
    or summed ("none"). No self-loops are added."""

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        norm: str = "both",
        weight: bool = True,
        bias: bool = True,
        activation: Activation | None = None,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__()
        if norm not in ("both", "right", "left", "none"):
            raise ValueError(
                f"expected norm 'both', 'right', 'left' or 'none', got {norm!r}"
            )
        self.norm, self.activation = norm, activation
        self.allow_zero_in_degree = allow_zero_in_degree
        self.weight = nn.Parameter(torch.empty(in_feats, out_feats)) if weight else None
        self.bias = nn.Parameter(torch.zeros(out_feats)) if bias else None
        if self.weight is not None:
            glorot(self.weight)

    @untraced
    def forward(
        self,
        graph: Any,
        feat: Rows,
        weight: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Return [destinations, out_feats]; `weight` takes the place of the layer's."""
        g = relation_of(graph)
        if weight is not None and self.weight is not None:
            raise ValueError("expected a layer with weight=False beside a weight")
        sent = self.sends(g, feat, weight, edge_weight)
        near = sent.along(g, sent.sources, sent.ends)
        return self.makes(g, feat, near, weight)

    def sends(
        self,
        g: Relation,
        feat: Rows,
        weight: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> Sent:
        """Return the sources' rows: times the matrix if that makes them narrower."""
        check_degrees(g, self.allow_zero_in_degree)
        matrix, rows = self._matrix(weight), sides_of(g, feat)[0]
        if self.norm in ("both", "left"):
            power = -0.5 if self.norm == "both" else -1.0
            rows = rows * g.derived(_scale(False, power, rows.dtype))
        if matrix is not None and _first(matrix):
            rows = rows @ matrix
        reducer = fn.mean if self.norm == "right" else fn.sum
        return _sums(rows, reducer, edge_weight)

    def makes(
        self, g: Relation, feat: Rows, near: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        """Return [destinations, out_feats]."""
        matrix, out = self._matrix(weight), near
        if matrix is not None and not _first(matrix):
            out = out @ matrix
        if self.norm == "both":
            out = out * g.derived(_scale(True, -0.5, out.dtype))
        if self.bias is not None:
            out = out + self.bias
        return out if self.activation is None else self.activation(out)

    def _matrix(self, weight: Tensor | None) -> Tensor | None:
        return self.weight if weight is None else weight


def _first(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


@cache
def _scale(
    incoming: bool, power: float, dtype: torch.dtype
) -> Callable[[Relation], Tensor]:
    """A power of each node's degree: of the edges alone."""

    def make(g: Relation) -> Tensor:
        degrees = g.in_degrees() if incoming else g.out_degrees()
        return degree_scale(degrees, power, dtype)

    return make


def degree_scale(degrees: Tensor, power: float, dtype: torch.dtype) -> Tensor:
    return degrees.clamp(min=1).to(dtype).pow(power)[:, None]


class SAGEConv(_Sender):
    """GraphSAGE (arXiv 1706.02216): a matrix of a node's row plus one of its
    neighbours': "mean", "gcn" (with the node itself, one matrix), "pool" (maximum of a
    layer's results), "lstm"."""

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        aggregator_type: str,
        feat_drop: float = 0.0,
        bias: bool = True,
        norm: Activation | None = None,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        kinds = ("mean", "gcn", "pool", "lstm")
        if aggregator_type not in kinds:
            raise ValueError(
                f"expected an aggregator_type of {kinds}, got {aggregator_type!r}"
            )
        source, own = in_feats if isinstance(in_feats, tuple) else (in_feats, in_feats)
        self.kind, self.norm, self.activation = aggregator_type, norm, activation
        self.feat_drop = nn.Dropout(feat_drop)
        self.fc_neigh = nn.Linear(source, out_feats, bias=False)
        self.fc_self = None
        if aggregator_type != "gcn":
            self.fc_self = nn.Linear(own, out_feats, bias=bias)
        self.bias = (
            nn.Parameter(torch.zeros(out_feats))
            if bias and self.fc_self is None
            else None
        )
        self.fc_pool = nn.Linear(source, source) if aggregator_type == "pool" else None
        self.lstm = None
        if aggregator_type == "lstm":
            self.lstm = nn.LSTM(source, source, batch_first=True)

    @untraced
    def forward(
        self, graph: Any, feat: Rows, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Return [destinations, out_feats]; `edge_weight` multiplies messages."""
        g = relation_of(graph)
        feat = self.enters(feat)
        sent = self.sends(g, feat, edge_weight)
        near = sent.along(g, sent.sources, sent.ends)
        return self.makes(g, feat, near)

    def enters(self, feat: Rows) -> Rows:
        """Return rows after dropout."""
        return after_dropout(self.feat_drop, feat)

    def multiplies_first(self) -> bool:
        """Return whether rows are multiplied before they are reduced."""
        narrower = self.fc_neigh.in_features > self.fc_neigh.out_features
        return narrower and self.kind in ("mean", "gcn")

    def sends(self, g: Relation, feat: Rows, edge_weight: Tensor | None = None) -> Sent:
        """Return the sources' rows: as they are added up."""
        rows, _ = sides_of(g, feat)
        if self.fc_pool is not None:
            rows = F.relu(wide_linear(self.fc_pool, rows))
        if self.multiplies_first():
            rows = wide_linear(self.fc_neigh, rows)
        if self.lstm is not None:
            return _weighed(rows, fn.lstm("m", "o", self.lstm), edge_weight)
        reducer = {"mean": fn.mean, "gcn": fn.sum, "pool": fn.max}[self.kind]
        return _sums(rows, reducer, edge_weight)

    def makes(self, g: Relation, feat: Rows, near: Tensor) -> Tensor:
        """Return [destinations, out_feats]."""
        own, first = sides_of(g, feat)[1], self.multiplies_first()
        if self.kind == "gcn":
            mine = wide_linear(self.fc_neigh, own) if first else own
            near = (near + mine) / (g.in_degrees().to(near.dtype) + 1)[:, None]
        out = near if first else wide_linear(self.fc_neigh, near)
        if self.fc_self is not None:
            out = out + wide_linear(self.fc_self, own)
        elif self.bias is not None:
            out = out + self.bias
        if self.activation is not None:
            out = self.activation(out)
        return out if self.norm is None else self.norm(out)


def after_dropout(drop: nn.Dropout, feat: Rows) -> Rows:
    """Return rows after dropout."""
    if not drop.p:
        return feat
    return tuple(map(drop, feat)) if isinstance(feat, tuple) else drop(feat)


class GINConv(nn.Module):
    """Graph isomorphism network (arXiv 1810.00826): `apply_func` of (1 + eps) times a
    node's row plus the sum, mean or max of its neighbours'."""

    def __init__(
        self,
        apply_func: Activation | None = None,
        aggregator_type: str = "sum",
        init_eps: float = 0.0,
        learn_eps: bool = False,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        if aggregator_type not in ("sum", "mean", "max"):
            raise ValueError(
                f"expected aggregator_type sum, mean or max, got {aggregator_type!r}"
            )
        self.apply_func, self.kind = apply_func, aggregator_type
        self.activation = activation
        self.eps: Tensor
        if learn_eps:
            self.eps = nn.Parameter(torch.tensor([init_eps]))
        else:
            self.register_buffer("eps", torch.tensor([init_eps]))

    @untraced
    def forward(
        self, graph: Any, feat: Rows, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Return a row a destination; `edge_weight` multiplies messages."""
        g = relation_of(graph)
        rows, own = sides_of(g, feat)
        out = (1 + self.eps) * own + summed(g, rows, self.kind, edge_weight)
        if self.apply_func is not None:
            out = self.apply_func(out)
        return out if self.activation is None else self.activation(out)


@fn.pure
def _scored(e: EdgeBatch, slope: float) -> dict[str, Any]:
    return {"a": e.softmax(F.leaky_relu(e.src["left"] + e.dst["right"], slope))}


class GATConv(_Sender, ExpectsEdges):
    """Graph attention (arXiv 1710.10903): [destinations, heads, out_feats]."""

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
    ) -> None:
        super().__init__()
        source, own = in_feats if isinstance(in_feats, tuple) else (in_feats, in_feats)
        self.heads, self.slope, self.activation = num_heads, negative_slope, activation
        self.allow_zero_in_degree = allow_zero_in_degree
        width = num_heads * out_feats
        if isinstance(in_feats, tuple):
            self.fc_src = nn.Linear(source, width, bias=False)
            self.fc_dst = nn.Linear(own, width, bias=False)
        else:
            self.fc = nn.Linear(source, width, bias=False)
        self.attn_l = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.attn_r = nn.Parameter(torch.empty(1, num_heads, out_feats))
        for t in (self.attn_l, self.attn_r):
            glorot(t)
        self.feat_drop, self.attn_drop = nn.Dropout(feat_drop), nn.Dropout(attn_drop)
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.res_fc: nn.Module | None = None
        if residual:
            same = own == width
            self.res_fc = nn.Identity() if same else nn.Linear(own, width, bias=False)

    def __getattr__(self, name: str) -> Any:
        # One matrix of both ends is `fc` in the state, as DGL names it.
        shared = name in ("fc_src", "fc_dst") and "fc" in self._modules
        return super().__getattr__("fc" if shared else name)

    @untraced
    def forward(
        self,
        graph: Any,
        feat: Rows,
        edge_weight: Tensor | None = None,
        get_attention: bool = False,
    ) -> Any:
        """Return [destinations, heads, out_feats]; with `get_attention` also
        [edges, heads, 1]."""
        g, feat = relation_of(graph), self.enters(feat)
        sent = self.sends(g, feat, edge_weight)
        if not get_attention:
            return self.makes(g, feat, sent.along(g, sent.sources, sent.ends))
        whole = as_features(partial(self._attended(edge_weight), attention=True))
        near, attention = whole(g, sent.sources, sent.ends)
        return self.makes(g, feat, near), attention

    def enters(self, feat: Rows) -> Rows:
        """Return rows after dropout."""
        return after_dropout(self.feat_drop, feat)

    def sends(self, g: Relation, feat: Rows, edge_weight: Tensor | None = None) -> Sent:
        """Return what scores are made of, and the sources' rows."""
        check_degrees(g, self.allow_zero_in_degree)
        rows, own = sides_of(g, feat)
        h = wide_linear(self.fc_src, rows).unflatten(1, (self.heads, -1))
        if self.fc_dst is self.fc_src and not isinstance(feat, tuple):
            right = h[: len(own)]
        else:
            right = wide_linear(self.fc_dst, own).unflatten(1, (self.heads, -1))
        left = (h * self.attn_l).sum(-1, keepdim=True)
        right = (right * self.attn_r).sum(-1, keepdim=True)
        sources, ends = {"h": h, "left": left}, {"right": right}
        if edge_weight is None and not (self.training and self.attn_drop.p):
            along = attending(self.slope)
            return Sent(along, along, sources, ends)
        return Sent(as_features(self._attended(edge_weight)), None, sources, ends)

    def _attended(self, weight: Tensor | None) -> Callable[..., Any]:
        drop = self.attn_drop if self.attn_drop.p and self.training else None
        return partial(_attended, slope=self.slope, drop=drop, weight=weight)

    def makes(self, g: Relation, feat: Rows, near: Tensor) -> Tensor:
        """Return [destinations, heads, out_feats]."""
        out = near
        if self.res_fc is not None:
            own = sides_of(g, feat)[1]
            out = out + self.res_fc(own).unflatten(1, (self.heads, -1))
        if self.bias is not None:
            out = out + self.bias.view(1, self.heads, -1)
        return out if self.activation is None else self.activation(out)


def _attended(
    g: Relation,
    slope: float,
    drop: nn.Module | None,
    weight: Tensor | None,
    attention: bool = False,
) -> Any:
    """Return neighbours' rows times their attention, summed."""
    g.apply_edges(_scored(slope))
    if drop is not None:
        g.edata["a"] = drop(g.edata["a"])
    if weight is not None:
        g.edata["a"] = g.edata["a"] * weight.view(-1, 1, 1)
    g.update_all(weighed("a"), fn.sum("m", "o"))
    return (g.dstdata["o"], g.edata["a"]) if attention else g.dstdata["o"]
