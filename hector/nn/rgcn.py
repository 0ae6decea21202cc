"""RGCN as a drop-in replacement of PyG's `RGCNConv` and `FastRGCNConv`."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hector.graph import HeteroGraph
from hector.initialization import glorot
from hector.nn.common import CompiledConv, combine_bases, empty
from hector.nn.layers import edge_sum, rgcn, rgcn_blocks
from hector.nn.reduce import (
    RelationGroups,
    aggr_name,
    aggregation_of,
    pair_products,
)
from hector.precision import entering, index_sum, wide
from hector.tracing import untraced

_AGGREGATIONS = {"mean": "mean", "add": "sum", "sum": "sum", "max": "max", "min": "min"}
_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_GROUPED = ("median", "mul", "softmax", "std")
"""Reducers with messages in memory: see `hector.nn.reduce`."""


@dataclass(frozen=True)
class _Sides:
    """Source and destination rows of a call, on one graph."""

    source: Tensor
    target: Tensor
    first_target: int
    """Node id of the first destination row."""


class RGCNConv(CompiledConv):
    """Relational graph convolution (equation 3.1; arXiv 1703.06103).

    Parameters, options and outputs are PyG's: its `state_dict` loads. Called as
    `conv(x, edge_index, edge_type)`, `conv(x, adj_t)` or `conv(x, graph)`.

    Sums, means and extremes are compiled. `aggr` may be one of PyG's `Aggregation`s, a
    name with `aggr_kwargs`, or a list: those have messages in memory and are computed
    relation by relation, as PyG does. Not taken of PyG: hooks of `propagate` and
    `message`, `decomposed_layers`, `fuse`, `explain_message` of one's own.
    """

    root: nn.Parameter | None
    bias: nn.Parameter | None
    comp: nn.Parameter | None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: Any = "mean",
        root_weight: bool = True,
        is_sorted: bool = False,
        bias: bool = True,
        *,
        aggr_kwargs: Mapping[str, Any] | None = None,
        flow: str = "source_to_target",
    ) -> None:
        """`is_sorted` changes nothing: edges are always sorted by type inside."""
        super().__init__(flow)
        if num_bases is not None and num_blocks is not None:
            raise ValueError("set num_bases or num_blocks, not both")
        self.aggr_module: Any = None
        self.aggr: Any = aggr_name(aggr, aggr_kwargs)
        if self.aggr not in (*_AGGREGATIONS, *_GROUPED):
            self.aggr_module = aggregation_of(aggr, aggr_kwargs)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_relations = num_relations
        self.num_bases, self.num_blocks = num_bases, num_blocks
        ins = (in_channels,) * 2 if isinstance(in_channels, int) else in_channels
        self.in_channels_l = ins[0]
        self._make_weights(ins[0])
        self.register_parameter(
            "root", empty(ins[1], out_channels) if root_weight else None
        )
        self.register_parameter("bias", empty(out_channels) if bias else None)
        if self.aggr == "median":
            # What PyG's layer saves beside its parameters.
            self.aggr_module = nn.Module()
            self.aggr_module.register_buffer("q", torch.tensor([[0.5]]))
        self.reset_parameters()

    def _make_weights(self, ins: int) -> None:
        outs, blocks = self.out_channels, self.num_blocks
        comp = None
        if self.num_bases is not None:
            self.weight = empty(self.num_bases, ins, outs)
            comp = empty(self.num_relations, self.num_bases)
        elif blocks is not None:
            if ins % blocks or outs % blocks:
                raise ValueError(
                    f"expected in_channels {ins} and out_channels {outs} divisible by "
                    f"num_blocks {blocks}"
                )
            self.weight = empty(
                self.num_relations, blocks, ins // blocks, outs // blocks
            )
        else:
            self.weight = empty(self.num_relations, ins, outs)
        self.register_parameter("comp", comp)

    def reset_parameters(self) -> None:
        for t in (self.weight, self.comp, self.root):
            glorot(t)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        reset = getattr(self.aggr_module, "reset_parameters", None)
        if reset is not None:
            reset()

    @untraced
    def forward(
        self,
        x: Tensor | tuple[Tensor | None, Tensor] | None,
        edge_index: Tensor | HeteroGraph,
        edge_type: Tensor | None = None,
    ) -> Tensor:
        """[destinations, out_channels] for node rows [nodes, in_channels].

        As in PyG, `x` may be node ids (or None for all of them), whose weight rows are
        then the features, or a pair of source and destination rows.
        """
        sides, dtype = self._sides(x)
        num_nodes = sides.first_target + sides.target.shape[0]
        graph = self.graph_of(
            edge_index, edge_type, num_nodes, self.num_relations, sides.first_target
        )
        weight = wide(self.weight)
        if self.comp is not None:
            weight = combine_bases(wide(self.comp), weight)
        return self._called(graph, sides, weight).to(dtype)

    def _called(self, graph: HeteroGraph, sides: _Sides, weight: Tensor) -> Tensor:
        whole = sides.source.is_floating_point()
        if self.num_blocks is not None and not whole:
            raise ValueError("num_blocks needs features, not node ids")
        if self.aggr not in (*_AGGREGATIONS, *_GROUPED):
            out = self._by_relation(graph, sides, weight)
            return self._with_root(out, sides.target)
        if self.aggr in _GROUPED or (not whole and self.aggr in ("max", "min")):
            out = self._grouped(graph, sides, weight)
            return self._with_root(out[sides.first_target :], sides.target)
        masked = self.mask_of_edges() is not None
        if whole and not (sides.first_target or masked or self.num_blocks is not None):
            return self._fused(graph, sides.source, weight)
        out = self._neighbours(graph, sides, weight, _AGGREGATIONS[self.aggr])
        return self._with_root(out[sides.first_target :], sides.target)

    def _fused(self, graph: HeteroGraph, x: Tensor, weight: Tensor) -> Tensor:
        """The whole layer as one compiled call."""
        layer = self.compiled(rgcn)
        values = {"feature": x, "weight": weight}
        if self.root is not None:
            values["root"] = self.root
        if self.bias is not None:
            values["bias"] = self.bias
        aggr = _AGGREGATIONS[self.aggr]
        out: Tensor = self.run(
            layer,
            graph,
            values,
            aggr,
            lambda: layer.prepare(
                graph, x, weight, self.root, self.bias, aggr, None, _first(graph)
            ),
        )
        return out

    def _sides(
        self, x: Tensor | tuple[Tensor | None, Tensor] | None
    ) -> tuple[_Sides, torch.dtype]:
        """Both sides as they are computed with, and the dtype of the result."""
        source = x[0] if isinstance(x, tuple) else x
        if source is None:
            source = torch.arange(self.in_channels_l, device=self.weight.device)
        target = x[1] if isinstance(x, tuple) else source
        alone = target is source
        source, dtype = self._rows(source)
        if alone:
            return _Sides(source, source, 0), dtype
        return _Sides(source, self._rows(target)[0], source.shape[0]), dtype

    def _rows(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        """Features, or node ids [nodes] as they are, and the dtype of results."""
        if x.dim() == 1 and x.dtype in _IDS:
            return x.long(), self.weight.dtype
        return entering(x, self)

    def _neighbours(
        self, graph: HeteroGraph, sides: _Sides, weight: Tensor, aggr: str
    ) -> Tensor:
        mask = self.mask_of_edges()
        if not sides.source.is_floating_point():
            stored = self._weight_rows(graph, sides, weight)
            order = torch.argsort(graph.edge_order)
            layer = self.compiled(edge_sum)
            rows = stored[order] if mask is None else stored[order] * mask[:, None]
            out: Tensor = layer(graph, rows, aggr == "mean")
            return out
        x = sides.source
        if sides.first_target:
            x = torch.cat((x, x.new_zeros(sides.target.shape[0], x.shape[1])))
        if self.num_blocks is not None:
            layer = self.compiled(rgcn_blocks)
            out = layer(graph, x, weight, self.num_blocks, aggr, mask)
        else:
            layer, first = self.compiled(rgcn), _first(graph)
            out = layer(graph, x, weight, None, None, aggr, mask, first)
        return out

    @staticmethod
    def _weight_rows(graph: HeteroGraph, sides: _Sides, weight: Tensor) -> Tensor:
        """Of each edge, the row of its relation's weight that its source names."""
        rows = graph.edge_type * weight.size(1) + sides.source[graph.src]
        return weight.flatten(0, 1).index_select(0, rows)

    def _rows_of_edges(
        self, graph: HeteroGraph, sides: _Sides, weight: Tensor
    ) -> Tensor:
        """What is reduced: a row an edge, in the graph's order."""
        rows = (
            sides.source.index_select(0, graph.src)
            if sides.source.is_floating_point()
            else self._weight_rows(graph, sides, weight)
        )
        mask = self.mask_of_edges()
        return rows if mask is None else rows * mask[graph.edge_order, None]

    def _by_relation(self, graph: HeteroGraph, sides: _Sides, weight: Tensor) -> Tensor:
        """[destinations, out]: each relation's messages, in the caller's order of
        edges, reduced by a module."""
        whole = sides.source.is_floating_point()
        rows = self._rows_of_edges(graph, sides, weight)
        count = sides.target.shape[0]
        out = rows.new_zeros(count, self.out_channels)
        for kind, (begin, end) in enumerate(pairwise(graph.etype_offsets)):
            order = begin + graph.edge_order[begin:end].argsort()
            ends = graph.dst[order] - sides.first_target
            made = self.aggr_module(rows[order], ends, dim_size=count, dim=0)
            if self.num_blocks is not None:
                blocks = made.view(count, self.num_blocks, -1)
                made = torch.einsum("nbk,bkm->nbm", blocks, weight[kind]).flatten(1)
            elif whole:
                made = made @ weight[kind]
            out = out + made
        return out

    def _grouped(self, graph: HeteroGraph, sides: _Sides, weight: Tensor) -> Tensor:
        """[nodes, out]: neighbours of a relation reduced together, relations summed."""
        found, whole = RelationGroups.of(graph), sides.source.is_floating_point()
        rows = self._rows_of_edges(graph, sides, weight)
        reduced = found.reduce(rows, self.aggr)
        if self.aggr == "mul":
            # Nodes without neighbours in a relation have 1 there: all start from it.
            reduced = reduced - 1
        if whole:
            layer = self.compiled(pair_products)
            out: Tensor = layer(found.graph, reduced, weight, self.num_blocks or 0)
        else:
            # A row a relation: few.
            out = index_sum(reduced, found.graph.dst, graph.num_nodes, 0)
        if self.aggr == "mul":
            start = weight.sum(-2).flatten(1).sum(0) if whole else graph.num_edge_types
            out = out + start
        return out

    def _with_root(self, out: Tensor, target: Tensor) -> Tensor:
        if self.root is not None:
            whole = target.is_floating_point()
            root = self.root.to(out.dtype)
            out = out + (target @ root if whole else root[target])
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, "
            f"num_relations={self.num_relations}"
        )


def _first(graph: HeteroGraph) -> bool:
    """Whether neighbours are added up before the product: on a CPU sums are cheap; on a
    GPU they would be a kernel of their own."""
    return graph.device.type == "cpu"


class FastRGCNConv(RGCNConv):
    """PyG's name of its variant for small graphs: one and the same layer here."""
