"""Convolutions with DGL's arguments."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.message import functions as fn
from hector.message.batches import EdgeBatch
from hector.message.hetero import CROSS, HeteroGraph
from hector.message.relation import Relation
from hector.nn.common import glorot
from hector.precision import linear
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


def weighed(name: str, rows: str = "h") -> fn.MessageFunction:
    """Return the source's row times an edge feature."""
    sides = (fn.Side.SOURCE, rows), (fn.Side.EDGE, name)
    return fn.MessageFunction(fn.Combine.MUL, *sides, "m")


def summed(
    g: Relation, rows: Tensor, how: str = "sum", weight: Tensor | None = None
) -> Tensor:
    """Reduce the rows of neighbours, times `weight` [edges]."""
    with g.local_scope():
        g.srcdata["h"] = rows
        message = fn.copy_u("h", "m")
        if weight is not None:
            g.edata["w"], message = weight.view(-1, 1), weighed("w")
        g.update_all(message, getattr(fn, how)("m", "o"))
        return g.dstdata["o"]


class GraphConv(nn.Module):
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

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        """Say whether nodes without edges into them are taken."""
        self.allow_zero_in_degree = set_value

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
        check_degrees(g, self.allow_zero_in_degree)
        if weight is not None and self.weight is not None:
            raise ValueError("expected a layer with weight=False beside a weight")
        matrix = self.weight if weight is None else weight
        rows = sides_of(g, feat)[0]
        if self.norm in ("both", "left"):
            power = -0.5 if self.norm == "both" else -1.0
            rows = rows * degree_scale(g.out_degrees(), power, rows)
        first = matrix is not None and matrix.shape[0] > matrix.shape[1]
        if matrix is not None and first:
            rows = rows @ matrix
        out = summed(g, rows, weight=edge_weight)
        if matrix is not None and not first:
            out = out @ matrix
        if self.norm in ("both", "right"):
            power = -0.5 if self.norm == "both" else -1.0
            out = out * degree_scale(g.in_degrees(), power, out)
        if self.bias is not None:
            out = out + self.bias
        return out if self.activation is None else self.activation(out)


def degree_scale(degrees: Tensor, power: float, like: Tensor) -> Tensor:
    return degrees.clamp(min=1).to(like.dtype).pow(power)[:, None]


class SAGEConv(nn.Module):
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
        given = tuple(map(self.feat_drop, feat)) if isinstance(feat, tuple) else None
        rows, own = sides_of(g, self.feat_drop(feat) if given is None else given)
        if self.fc_pool is not None:
            rows = F.relu(linear(self.fc_pool, rows))
        first = self.kind in ("mean", "gcn")
        first = first and self.fc_neigh.in_features > self.fc_neigh.out_features
        near = linear(self.fc_neigh, rows) if first else rows
        mine = near[: own.shape[0]] if not isinstance(feat, tuple) else None
        near = self._reduced(g, near, edge_weight)
        if self.kind == "gcn":
            if mine is None:
                mine = linear(self.fc_neigh, own) if first else own
            near = (near + mine) / (g.in_degrees().to(near.dtype) + 1)[:, None]
        out = near if first else linear(self.fc_neigh, near)
        if self.fc_self is not None:
            out = out + linear(self.fc_self, own)
        elif self.bias is not None:
            out = out + self.bias
        if self.activation is not None:
            out = self.activation(out)
        return out if self.norm is None else self.norm(out)

    def _reduced(self, g: Relation, rows: Tensor, weight: Tensor | None) -> Tensor:
        if self.lstm is None:
            names = {"mean": "mean", "gcn": "sum", "pool": "max"}
            return summed(g, rows, names[self.kind], weight)
        reduce = fn.lstm("m", "o", self.lstm)
        with g.local_scope():
            g.srcdata["h"] = rows
            message = fn.copy_u("h", "m")
            if weight is not None:
                g.edata["w"] = weight.view(-1, 1)
                message = weighed("w")
            g.update_all(message, reduce)
            return g.dstdata["o"]


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
    return {"a": e.softmax(F.leaky_relu(e.src["l"] + e.dst["r"], slope))}


class GATConv(nn.Module):
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

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        """Say whether nodes without edges into them are taken."""
        self.allow_zero_in_degree = set_value

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
        g = relation_of(graph)
        check_degrees(g, self.allow_zero_in_degree)
        dropped = (
            tuple(map(self.feat_drop, feat))
            if isinstance(feat, tuple)
            else self.feat_drop(feat)
        )
        rows, own = sides_of(g, dropped)
        h = linear(self.fc_src, rows).unflatten(1, (self.heads, -1))
        if self.fc_dst is self.fc_src and not isinstance(feat, tuple):
            right = h[: len(own)]
        else:
            right = linear(self.fc_dst, own).unflatten(1, (self.heads, -1))
        with g.local_scope():
            g.srcdata["h"] = h
            g.srcdata["l"] = (h * self.attn_l).sum(-1, keepdim=True)
            g.dstdata["r"] = (right * self.attn_r).sum(-1, keepdim=True)
            g.apply_edges(_scored(self.slope))
            if self.attn_drop.p and self.training:
                g.edata["a"] = self.attn_drop(g.edata["a"])
            if edge_weight is not None:
                weight = edge_weight.view(-1, 1, 1)
                g.edata["a"] = g.edata["a"] * weight
            g.update_all(weighed("a"), fn.sum("m", "o"))
            out = g.dstdata["o"]
            attention = g.edata["a"] if get_attention else None
        if self.res_fc is not None:
            out = out + self.res_fc(own).unflatten(1, (self.heads, -1))
        if self.bias is not None:
            out = out + self.bias.view(1, self.heads, -1)
        if self.activation is not None:
            out = self.activation(out)
        return out if attention is None else (out, attention)


class HeteroGraphConv(nn.Module):
    """A layer for each relation, by its name or (source, relation, destination);
    results for one type of nodes are joined by `aggregate`: sum, mean, max, min, stack,
    or a function of (list, type). Layers take nodes without edges, as along one
    relation they are common."""

    def __init__(
        self,
        mods: Mapping[str, nn.Module],
        aggregate: str | Callable[[list[Tensor], str], Tensor] = "sum",
    ) -> None:
        super().__init__()
        if not callable(aggregate) and aggregate not in CROSS:
            raise ValueError(
                f"expected aggregate of {sorted(CROSS)} or a function, got "
                f"{aggregate!r}"
            )
        self.mods = nn.ModuleDict({str(k): m for k, m in mods.items()})
        for module in self.mods.values():
            allow = getattr(module, "set_allow_zero_in_degree", None)
            if allow is not None:
                allow(True)
        self.aggregate = aggregate

    @untraced
    def forward(
        self,
        g: HeteroGraph,
        inputs: Any,
        mod_args: Mapping[str, tuple[Any, ...]] | None = None,
        mod_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> dict[str, Tensor]:
        """Return rows by destination type for rows by type, or for a pair of them.
        Relations without rows are left out; those without edges are not: their layer
        may have a row of the node's own.

        Raises ValueError for a relation without a layer.
        """
        if isinstance(inputs, tuple):
            sources, ends = inputs
        else:
            sources = ends = inputs
            if g.is_block:
                ends = {n: x[: g.num_dst_nodes(n)] for n, x in inputs.items()}
        found: dict[str, list[Tensor]] = {}
        for kind in g.canonical_etypes:
            start, name, end = kind
            if start not in sources or end not in ends:
                continue
            layer = self._layer(kind)
            more = (mod_args or {}).get(name, ())
            named = (mod_kwargs or {}).get(name, {})
            made = layer(g[kind], (sources[start], ends[end]), *more, **named)
            found.setdefault(end, []).append(made)
        return {n: self._joined(parts, n) for n, parts in found.items()}

    def _layer(self, kind: tuple[str, str, str]) -> nn.Module:
        for name in (str(kind), kind[1]):
            if name in self.mods:
                return self.mods[name]
        raise ValueError(
            f"expected a layer for {kind}, there are {list(self.mods)}; give one, or "
            "g.edge_type_subgraph of the others"
        )

    def _joined(self, parts: list[Tensor], ntype: str) -> Tensor:
        if callable(self.aggregate):
            return self.aggregate(parts, ntype)
        return CROSS[self.aggregate](torch.stack(parts))
