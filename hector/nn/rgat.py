"""RGAT as a drop-in replacement of PyG's `RGATConv`."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.graph import HeteroGraph
from hector.indexing import adjacency, is_adjacency
from hector.initialization import glorot
from hector.nn.common import CompiledConv, combine_bases, empty
from hector.nn.layers import rgat, rgat_outputs
from hector.precision import entering, wide
from hector.tracing import untraced

_MODS = (None, "additive", "scaled", "f-additive", "f-scaled")


@dataclass(frozen=True, kw_only=True)
class RGATOptions:
    """PyG's choices, as the compiled layer reads them."""

    heads: int = 1
    dim: int = 1
    width: int
    """out_channels: columns of one head."""
    groups: int = 1
    """Sums that are taken apart: heads when `dim` > 1, else 1."""
    additive: bool = True
    within: bool = False
    mod: str | None = None
    num_blocks: int = 0
    edge_dim: int = 0
    negative_slope: float = 0.2
    bias: bool = False
    """A bias is added to the sums as they are: no heads to be averaged first."""


class RGATConv(CompiledConv):
    """Relational graph attention (arXiv 1904.05811).

    Parameters, options and outputs are PyG's: its `state_dict` loads. Called as
    `conv(x, edge_index, edge_type, edge_attr)` or `conv(x, graph)`. Not taken of PyG:
    an `aggr` other than its sum, hooks, `decomposed_layers`, `explain_message`.
    """

    bias: nn.Parameter | None
    e: nn.Parameter | None

    def __init__(  # noqa: PLR0913 - PyG's arguments
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        mod: str | None = None,
        attention_mechanism: str = "across-relation",
        attention_mode: str = "additive-self-attention",
        heads: int = 1,
        dim: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        *,
        flow: str = "source_to_target",
    ) -> None:
        super().__init__(flow)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_relations = num_relations
        self.num_bases, self.num_blocks, self.mod = num_bases, num_blocks, mod
        self.heads, self.dim, self.concat = heads, dim, concat
        self.dropout, self.edge_dim = dropout, edge_dim
        self._check(attention_mechanism, attention_mode)
        self.attention_mechanism = attention_mechanism
        self.attention_mode = attention_mode
        self.negative_slope = negative_slope
        self._make_parameters(bias)
        self.reset_parameters()

    @property
    def _options_read(self) -> RGATOptions:
        """From the attributes as they are: they may be changed between calls."""
        return RGATOptions(
            heads=self.heads,
            dim=self.dim,
            width=self.out_channels,
            groups=self.heads if self.dim > 1 else 1,
            additive=self.attention_mode == "additive-self-attention",
            within=self.attention_mechanism == "within-relation",
            mod=self.mod,
            num_blocks=self.num_blocks or 0,
            edge_dim=0,
            negative_slope=self.negative_slope,
            bias=self.bias is not None
            and self.dim == 1
            and (self.concat or self.heads == 1),
        )

    def _check(self, mechanism: str, mode: str) -> None:
        if mechanism not in ("within-relation", "across-relation"):
            raise ValueError(
                f'expected attention_mechanism "within-relation" or "across-relation", '
                f"got {mechanism!r}"
            )
        if mode not in ("additive-self-attention", "multiplicative-self-attention"):
            raise ValueError(
                f'expected attention_mode "additive-self-attention" or '
                f'"multiplicative-self-attention", got {mode!r}'
            )
        if mode == "additive-self-attention" and self.dim > 1:
            raise ValueError("additive self-attention needs dim=1")
        if self.mod not in _MODS:
            raise ValueError(f"expected mod in {_MODS}, got {self.mod!r}")
        if self.dropout > 0 and self.mod is not None:
            raise ValueError("dropout needs mod=None")
        if self.num_bases is not None and self.num_blocks is not None:
            raise ValueError("set num_bases or num_blocks, not both")

    def _make_parameters(self, bias: bool) -> None:
        h, d, f, r = self.heads, self.dim, self.out_channels, self.num_relations
        k = self.in_channels
        self.q, self.k = empty(h * f, h * d), empty(h * f, h * d)
        count = (h if self.concat else 1) * d * f
        self.register_parameter("bias", empty(count) if bias else None)
        self.lin_edge = None
        edge = None
        if self.edge_dim is not None:
            self.lin_edge = nn.Linear(self.edge_dim, h * f, bias=False)
            edge = empty(h * f, h * d)
        self.register_parameter("e", edge)
        if self.num_bases is not None:
            self.att = empty(r, self.num_bases)
            self.basis = empty(self.num_bases, k, h * f)
        elif self.num_blocks is not None:
            b = self.num_blocks
            if k % b or (h * f) % b:
                raise ValueError(
                    f"expected in_channels {k} and heads * out_channels {h * f} "
                    f"divisible by num_blocks {b}"
                )
            self.weight = empty(r, b, k // b, h * f // b)
        else:
            self.weight = empty(r, k, h * f)
        self.w = nn.Parameter(torch.ones(f))
        self.l1, self.b1 = (
            nn.Parameter(torch.ones(1, f)),
            nn.Parameter(torch.zeros(1, f)),
        )
        self.l2 = nn.Parameter(torch.full((f, f), 1.0 / f))
        self.b2 = nn.Parameter(torch.zeros(1, f))

    def reset_parameters(self) -> None:
        if self.num_bases is not None:
            glorot(self.basis)
            glorot(self.att)
        else:
            glorot(self.weight)
        for t in (self.q, self.k, self.e):
            glorot(t)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.lin_edge is not None:
            glorot(self.lin_edge.weight)
        nn.init.ones_(self.l1)
        nn.init.constant_(self.l2, 1.0 / self.out_channels)
        nn.init.zeros_(self.b1)
        nn.init.zeros_(self.b2)

    @untraced
    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | HeteroGraph,
        edge_type: Tensor | None = None,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Any, Tensor]]:
        """[nodes, heads * dim * out_channels] (dim * out_channels without concat).

        With `return_attention_weights`, also (edge_index, [edges, heads * dim]).
        """
        x, dtype = entering(x, self.q)
        rows = size[1] if size is not None else x.shape[0]
        if rows != x.shape[0]:
            raise ValueError(f"expected size to match x with {x.shape[0]} rows")
        graph = self.graph_of(edge_index, edge_type, rows, self.num_relations)
        if edge_attr is None and is_adjacency(edge_index):
            # As in PyG, the values of adj_t beside edge_type are the edges' features.
            values = adjacency(edge_index)[1]
            if values is not None and values.is_floating_point():
                edge_attr = values
        edge_attr, options = self._edge_options(edge_attr)
        keep = self._kept(graph, x)
        mask = self.mask_of_edges()
        extras = (edge_attr, keep, mask, return_attention_weights)
        if all(extra is None for extra in extras):
            parts = list(self._fused(graph, x, options))
        else:
            *parts, att = self.compiled(rgat)(
                graph, x, edge_attr, keep, mask, self._parameters_read(options), options
            )
        out = self._joined(parts)
        if self.bias is not None and not options.bias:
            out = out + wide(self.bias)
        out = out.to(dtype)
        if return_attention_weights is None:
            return out
        return out, (edge_index, att.view(att.shape[0], -1).to(dtype))

    def _fused(
        self, graph: HeteroGraph, x: Tensor, options: RGATOptions
    ) -> tuple[Tensor, ...]:
        """The common call: no edge features, dropout or returned attention."""
        layer = self.compiled(rgat_outputs)
        p = self._parameters_read(options)
        values = {"feature": x, **{f"p.{k}": v for k, v in vars(p).items()}}
        outs: tuple[Tensor, ...] = self.run(
            layer,
            graph,
            values,
            options,
            lambda: layer.prepare(graph, x, p, options),
        )
        return outs

    def _edge_options(
        self, edge_attr: Tensor | None
    ) -> tuple[Tensor | None, RGATOptions]:
        o = self._options_read
        if edge_attr is None:
            return None, o
        if self.edge_dim is None:
            raise ValueError("set edge_dim = edge_attr.size(-1) to use edge_attr")
        if edge_attr.dim() == 1:
            edge_attr = edge_attr.view(-1, 1)
        return edge_attr, RGATOptions(**{**vars(o), "edge_dim": self.edge_dim})

    def _kept(self, graph: HeteroGraph, x: Tensor) -> Tensor | None:
        """Dropout of attention as a factor an edge and head."""
        if not self.training or self.dropout == 0.0:
            return None
        ones = x.new_ones(graph.num_edges, self.heads * self.dim)
        return functional.dropout(ones, self.dropout)

    def _parameters_read(self, options: RGATOptions) -> SimpleNamespace:
        p = SimpleNamespace(q=self.q, k=self.k)
        p.weight = (
            combine_bases(wide(self.att), wide(self.basis))
            if self.num_bases is not None
            else self.weight
        )
        if self.bias is not None and options.bias:
            p.bias = self.bias
        if self.lin_edge is not None:
            p.lin_edge, p.e = self.lin_edge.weight.t(), self.e
        if self.mod == "additive":
            p.w = self.w
        if self.mod == "scaled":
            p.l1, p.b1 = self.l1.view(-1), self.b1.view(-1)
            p.l2, p.b2 = self.l2, self.b2.view(-1)
        return p

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Heads side by side, or their mean."""
        if len(parts) > 1:
            if self.concat:
                return torch.cat(parts, dim=1)
            return torch.stack(parts).mean(0)
        (out,) = parts
        if self.concat or self.heads == 1:
            return out
        return out.view(out.shape[0], self.heads, -1).mean(1)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"
