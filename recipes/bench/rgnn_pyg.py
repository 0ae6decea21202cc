"""PyG's layers behind the trainer's layer interface: the independent reference."""

import torch
from torch import Tensor, nn

from hector.graph import HeteroGraph
from hector.train import LayerKind, LayerSpec


class PygEdges(nn.Module):
    """PyG's RGCNConv or RGATConv called with a HeteroGraph."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        return self.conv(x, torch.stack([graph.src, graph.dst]), graph.edge_type)


class PygTypes(nn.Module):
    """PyG's HGTConv called with a HeteroGraph; nodes without any message stay 0."""

    def __init__(self, conv: nn.Module, out_channels: int) -> None:
        super().__init__()
        self.conv, self.out_channels = conv, out_channels

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        sizes = graph.node_type_ptr.diff().tolist()
        names = graph.node_type_names
        first = dict(zip(names, graph.node_type_offsets, strict=False))
        edges = {}
        bounds = graph.etype_offsets
        for i, (a, relation, b) in enumerate(graph.edge_type_metadata()):
            part = slice(bounds[i], bounds[i + 1])
            ends = [graph.src[part] - first[a], graph.dst[part] - first[b]]
            edges[a, relation, b] = torch.stack(ends)
        out = self.conv(dict(zip(names, x.split(sizes), strict=True)), edges)
        rows = [
            out.get(n, x.new_zeros(size, self.out_channels))
            for n, size in zip(names, sizes, strict=True)
        ]
        return torch.cat(rows)


def pyg_layer(spec: LayerSpec, graph: HeteroGraph) -> nn.Module:
    from torch_geometric.nn import HGTConv, RGATConv, RGCNConv

    if spec.kind is LayerKind.HGT:
        metadata = (list(graph.node_type_names), list(graph.edge_type_metadata()))
        conv = HGTConv(spec.in_channels, spec.out_channels, metadata, heads=spec.heads)
        return PygTypes(conv, spec.out_channels)
    options = {"num_bases": spec.num_bases}
    shape = (spec.in_channels, spec.out_channels, graph.num_edge_types)
    if spec.kind is LayerKind.RGCN:
        return PygEdges(RGCNConv(*shape, **options))
    heads = spec.heads
    return PygEdges(
        RGATConv(shape[0], shape[1] // heads, shape[2], heads=heads, **options)
    )
