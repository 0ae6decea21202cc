"""A node classifier: learned embeddings and a stack of relational layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.graph import HeteroGraph
from hector.train.config import LayerKind, ModelConfig


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of the stack."""

    kind: LayerKind
    in_channels: int
    out_channels: int
    heads: int
    num_bases: int | None


LayerFactory = Callable[[LayerSpec, HeteroGraph], nn.Module]
"""Builds a module called as `layer(x [num_nodes, in_channels], graph)`."""


def compiled_layer(spec: LayerSpec, graph: HeteroGraph) -> nn.Module:
    """The layer of `hector.nn`."""
    from hector.nn import HGTConv, RGATConv, RGCNConv

    if spec.kind is LayerKind.HGT:
        metadata = (list(graph.node_type_names), list(graph.edge_type_metadata()))
        return HGTConv(spec.in_channels, spec.out_channels, metadata, heads=spec.heads)
    relations = graph.num_edge_types
    if spec.kind is LayerKind.RGCN:
        return RGCNConv(
            spec.in_channels, spec.out_channels, relations, num_bases=spec.num_bases
        )
    return RGATConv(
        spec.in_channels,
        spec.out_channels // spec.heads,
        relations,
        num_bases=spec.num_bases,
        heads=spec.heads,
    )


class NodeClassifier(nn.Module):
    """Logits [num_nodes, num_classes] of every node of one graph or a sample of it."""

    def __init__(
        self,
        config: ModelConfig,
        graph: HeteroGraph,
        num_classes: int,
        make_layer: LayerFactory = compiled_layer,
    ) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.embedding = nn.Parameter(
            torch.empty(graph.num_nodes, config.hidden_channels)
        )
        nn.init.xavier_uniform_(self.embedding)
        self.layers = nn.ModuleList()
        for index in range(config.num_layers):
            last = index == config.num_layers - 1
            spec = LayerSpec(
                kind=LayerKind(config.layer),
                in_channels=config.hidden_channels,
                out_channels=num_classes if last else config.hidden_channels,
                heads=1 if last else config.heads,
                num_bases=config.num_bases,
            )
            self.layers.append(make_layer(spec, graph))

    def forward(self, graph: HeteroGraph, node_ids: Tensor | None = None) -> Tensor:
        """Logits of the graph's nodes; `node_ids` [num_nodes] says which of the whole
        graph's they are, None: all of them."""
        x: Tensor = self.embedding
        if node_ids is not None:
            x = x[node_ids]
        for index, layer in enumerate(self.layers):
            x = layer(x, graph)
            if index + 1 < len(self.layers):
                x = functional.dropout(x.relu(), self.dropout, self.training)
        return x
