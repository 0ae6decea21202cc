"""A node classifier: learned embeddings and a stack of relational layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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
    """The layer of `hector.nn`.

    Raises:
        ValueError: no layer is built for this kind.
    """
    from hector.nn import HGTConv, RGATConv, RGCNConv

    if spec.kind is LayerKind.HGT:
        metadata = (list(graph.node_type_names), list(graph.edge_type_metadata()))
        return HGTConv(spec.in_channels, spec.out_channels, metadata, heads=spec.heads)
    relations = graph.num_edge_types
    if spec.kind is LayerKind.RGCN:
        return RGCNConv(
            spec.in_channels, spec.out_channels, relations, num_bases=spec.num_bases
        )
    if spec.kind is LayerKind.RGAT:
        return RGATConv(
            spec.in_channels,
            spec.out_channels // spec.heads,
            relations,
            num_bases=spec.num_bases,
            heads=spec.heads,
        )
    raise ValueError(
        f"expected a kind that compiled_layer builds, got {spec.kind!r}; add its branch"
    )


class Features(Protocol):
    """Rows of nodes, wherever they lie: a tensor, a table in host memory that the
    device reads (pydirect's), or an object of the user's own."""

    def __getitem__(self, node_ids: Tensor) -> Tensor:
        """[len(node_ids), width] for int64 ids."""
        ...


class NodeClassifier(nn.Module):
    """Logits [num_nodes, num_classes] of every node of one graph or a sample of it."""

    def __init__(
        self,
        config: ModelConfig,
        graph: HeteroGraph,
        num_classes: int,
        make_layer: LayerFactory = compiled_layer,
        features: Features | None = None,
    ) -> None:
        """With `features`, a linear layer of them takes the place of embeddings."""
        super().__init__()
        self.dropout = config.dropout
        # Not a submodule, and not saved with the model.
        self._features = features
        hidden = config.hidden_channels
        self.embedding: nn.Parameter | None = None
        self.inputs: nn.Linear | None = None
        if features is None:
            self.embedding = nn.Parameter(torch.empty(graph.num_nodes, hidden))
            nn.init.xavier_uniform_(self.embedding)
        else:
            self.inputs = nn.Linear(
                _rows(features, torch.zeros(1, device="cpu").long()).shape[1], hidden
            )
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

    def forward(
        self,
        graph: HeteroGraph,
        node_ids: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits of the graph's nodes; `node_ids` [num_nodes] says which of the whole
        graph's they are, None: all of them. `rows`: their `gathered` features."""
        x = self._first(graph, node_ids) if rows is None else self._inputs(rows)
        for index, layer in enumerate(self.layers):
            x = layer(x, graph)
            if index + 1 < len(self.layers):
                x = functional.dropout(x.relu(), self.dropout, self.training)
        return x

    def _first(self, graph: HeteroGraph, node_ids: Tensor | None) -> Tensor:
        """What the first layer reads: [graph.num_nodes, hidden_channels]."""
        if self.embedding is not None:
            return self.embedding if node_ids is None else self.embedding[node_ids]
        if node_ids is None:
            node_ids = torch.arange(graph.num_nodes, device=graph.device)
        return self._inputs(*self.gathered(node_ids))

    def gathered(self, node_ids: Tensor) -> tuple[Tensor, ...]:
        """The features of nodes on the model's device; nothing if it has embeddings."""
        if self.inputs is None or self._features is None:
            return ()
        return (_rows(self._features, node_ids).to(self.inputs.weight),)

    def _inputs(self, *rows: Tensor) -> Tensor:
        if self.inputs is None or not rows:
            raise RuntimeError("expected embeddings or features")
        found: Tensor = self.inputs(*rows)
        return found


def _rows(features: Features, node_ids: Tensor) -> Tensor:
    """A plain tensor is indexed where it lies; tables take ids of any device."""
    if isinstance(features, Tensor):
        node_ids = node_ids.to(features.device)
    return features[node_ids]
