"""PyG's relational layers behind one interface: called with (x, graph).

What PyG wants of the graph (edge index, dictionaries by type) is made once, at
construction, so that calls cost what they cost a PyG user.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hector.graph import HeteroGraph
from hector.train import LayerKind, LayerSpec

IN_PYG = (LayerKind.RGCN, LayerKind.RGAT, LayerKind.HGT)
"""Layers that PyG has too: tests hold hector's against them."""


def layer_spec(kind: LayerKind | str, ins: int, outs: int) -> LayerSpec:
    """A layer of one head, its weights as they are."""
    return LayerSpec(
        kind=LayerKind(kind),
        in_channels=ins,
        out_channels=outs,
        heads=1,
        num_bases=None,
    )


def relations(graph: HeteroGraph) -> dict[tuple[str, str, str], Tensor]:
    """Ends [2, n] of each relation's edges, nodes numbered within their types."""
    first = dict(zip(graph.node_type_names, graph.node_type_offsets, strict=False))
    bounds, found = graph.etype_offsets, {}
    for i, (a, name, b) in enumerate(graph.edge_type_metadata()):
        part = slice(bounds[i], bounds[i + 1])
        ends = [graph.src[part] - first[a], graph.dst[part] - first[b]]
        found[a, name, b] = torch.stack(ends)
    return found


class PygEdges(nn.Module):
    """RGCNConv, FastRGCNConv or RGATConv on one graph."""

    def __init__(self, conv: nn.Module, graph: HeteroGraph) -> None:
        super().__init__()
        self.conv = conv
        self.edge_index = torch.stack([graph.src, graph.dst])
        self.edge_type = graph.edge_type

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        out: Tensor = self.conv(x, self.edge_index, self.edge_type)
        return out


class PygTypes(nn.Module):
    """HGTConv on one graph; nodes of a type without any message stay 0."""

    def __init__(self, conv: nn.Module, graph: HeteroGraph) -> None:
        super().__init__()
        self.conv = conv
        self.names = graph.node_type_names
        self.sizes = graph.node_type_ptr.diff().tolist()
        self.edges = relations(graph)

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        parts = dict(zip(self.names, x.split(self.sizes), strict=True))
        out = self.conv(parts, self.edges)
        if len(self.names) == 1 and out:
            only: Tensor = out[self.names[0]]
            return only
        width = self.conv.out_channels
        rows = [
            out.get(name, x.new_zeros(size, width))
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(rows)


def pyg_conv(spec: LayerSpec, graph: HeteroGraph, *, fast: bool = False) -> nn.Module:
    """PyG's own layer; `fast` takes FastRGCNConv for RGCN."""
    from torch_geometric.nn import FastRGCNConv, HGTConv, RGATConv, RGCNConv

    if spec.kind is LayerKind.HGT:
        metadata = (list(graph.node_type_names), list(graph.edge_type_metadata()))
        hgt: nn.Module = HGTConv(
            spec.in_channels, spec.out_channels, metadata, heads=spec.heads
        )
        return hgt
    shape = (spec.in_channels, spec.out_channels // spec.heads, graph.num_edge_types)
    options: dict[str, Any] = {"num_bases": spec.num_bases}
    if spec.kind is LayerKind.RGAT:
        rgat: nn.Module = RGATConv(*shape, heads=spec.heads, **options)
        return rgat
    kind = FastRGCNConv if fast else RGCNConv
    width = (spec.in_channels, spec.out_channels, graph.num_edge_types)
    rgcn: nn.Module = kind(*width, is_sorted=True, **options)
    return rgcn


def wrap(conv: nn.Module, graph: HeteroGraph) -> nn.Module:
    """`conv` called with (x, graph) on this one graph."""
    hetero = type(conv).__name__ == "HGTConv"
    return PygTypes(conv, graph) if hetero else PygEdges(conv, graph)


def pyg_layer(spec: LayerSpec, graph: HeteroGraph) -> nn.Module:
    """A layer factory of the trainer."""
    return wrap(pyg_conv(spec, graph), graph)
