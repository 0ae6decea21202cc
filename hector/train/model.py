"""A node classifier: learned embeddings and a stack of relational layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.graph import HeteroGraph
from hector.message import GATConv, GINConv, Graph, SAGEConv, TreeLSTM
from hector.train.config import MESSAGE_KINDS, LayerKind, ModelConfig


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

    if spec.kind in MESSAGE_KINDS:
        return MessageLayer(spec)
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


class MessageLayer(nn.Module):
    """A layer of `hector.message` on all relations as one."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        ins, outs = spec.in_channels, spec.out_channels
        self.kind = spec.kind
        self.last: nn.Linear | None = None
        if spec.kind is LayerKind.SAGE:
            self.conv: nn.Module = SAGEConv(ins, outs)
        elif spec.kind is LayerKind.GIN:
            net = nn.Sequential(nn.Linear(ins, outs), nn.ReLU(), nn.Linear(outs, outs))
            self.conv = GINConv(net)
        elif spec.kind is LayerKind.GAT:
            self.conv = GATConv(ins, outs // spec.heads, spec.heads)
        else:
            self.conv = TreeLSTM(ins, ins)
            self.last = nn.Linear(ins, outs)
        self._graph: tuple[HeteroGraph, Graph] | None = None

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        """[num_nodes, out_channels] for x [num_nodes, in_channels]."""
        if self._graph is None or self._graph[0] is not graph:
            made = Graph(graph.src, graph.dst, num_nodes=graph.num_nodes)
            self._graph = (graph, made)
        found = self.conv(self._graph[1], x)
        out: Tensor = found if self.last is None else self.last(found[0])
        return out


class Features(Protocol):
    """Rows of nodes, wherever they lie: a tensor, a table in host memory that the
    device reads (pydirect's), or an object of the user's own."""

    def __getitem__(self, node_ids: Tensor) -> Tensor:
        """[len(node_ids), width] for int64 ids."""
        ...


@runtime_checkable
class Settling(Protocol):
    """Features that are put where they are to lie before rows are asked for."""

    def settle(self, device: torch.device, heat: Tensor) -> None:
        """`heat` [num_nodes]: how often each row is read, at least in proportion."""
        ...


@runtime_checkable
class HostedEmbedding(Protocol):
    """Makes learned embeddings that do not lie in the model's memory."""

    def embedding(
        self, weight: Tensor, heat: Tensor, device: torch.device
    ) -> nn.Module:
        """A module that gives rows of `weight` [num_nodes, width] for ids, with sparse
        gradients, and whose `sparse_optimizer` makes an optimizer of them."""
        ...


class NodeClassifier(nn.Module):
    """Logits [num_nodes, num_classes] of every node of one graph or a sample of it."""

    def __init__(
        self,
        config: ModelConfig,
        graph: HeteroGraph,
        num_classes: int,
        make_layer: LayerFactory = compiled_layer,
        features: "Features | HostedEmbedding | None" = None,
    ) -> None:
        """With `features`, a linear layer of them takes the place of embeddings, or
        embeddings lie where they say."""
        super().__init__()
        self.dropout = config.dropout
        # Not a submodule, and not saved with the model.
        self._features: Features | None = None
        hidden = config.hidden_channels
        self.embedding: nn.Parameter | None = None
        self.hosted: nn.Module | None = None
        self.inputs: nn.Linear | None = None
        if features is None:
            self.embedding = nn.Parameter(torch.empty(graph.num_nodes, hidden))
            nn.init.xavier_uniform_(self.embedding)
        elif isinstance(features, HostedEmbedding):
            weight = torch.empty(graph.num_nodes, hidden, device="cpu")
            nn.init.xavier_uniform_(weight)
            self.hosted = features.embedding(weight, heat_of(graph), graph.device)
        else:
            if isinstance(features, Settling):
                features.settle(graph.device, heat_of(graph))
            self._features = features
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
        if self.hosted is not None:
            rows: Tensor = self.hosted(node_ids)
            return rows
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


def heat_of(graph: HeteroGraph) -> Tensor:
    """How many edges read each node's row, [num_nodes] on the CPU."""
    return torch.bincount(graph.src, minlength=graph.num_nodes).cpu()


def _rows(features: Features, node_ids: Tensor) -> Tensor:
    """A plain tensor is indexed where it lies; tables take ids of any device."""
    if isinstance(features, Tensor):
        node_ids = node_ids.to(features.device)
    return features[node_ids]
