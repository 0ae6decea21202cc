"""What the layers share: graphs from PyG's arguments, initialization, settings."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hector.frontend import CompiledLayer, Prepared
from hector.graph import HeteroGraph
from hector.passes.pipeline import Optimizations

SETTINGS: dict[str, Optimizations | None] = {
    "auto": None,
    "none": Optimizations(),
    "compaction": Optimizations(compact=True),
    "reordering": Optimizations(reorder=True),
    "both": Optimizations(compact=True, reorder=True),
}


class CompiledConv(nn.Module):
    """A layer whose forward is a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self._graphs: dict[object, tuple[Tensor, Tensor, HeteroGraph]] = {}
        self._layers: dict[CompiledLayer, CompiledLayer] = {}
        self._options: dict[str, Any] = {}
        self._prepared: dict[object, tuple[HeteroGraph, Prepared]] = {}

    def set_optimization(self, name: str) -> "CompiledConv":
        """Fix {none, compaction, reordering, both}; "auto" lets the cost model
        choose."""
        if name not in SETTINGS:
            raise ValueError(f"expected one of {sorted(SETTINGS)}, got {name!r}")
        return self.set_options(optimizations=SETTINGS[name])

    def set_options(self, **options: Any) -> "CompiledConv":
        """Change fields of `hector.Options` for this layer."""
        self._options.update(options)
        self._layers.clear()
        self._prepared.clear()
        return self

    def compiled(self, layer: CompiledLayer) -> CompiledLayer:
        """The layer's function under this module's options."""
        if not self._options:
            return layer
        if layer not in self._layers:
            self._layers[layer] = layer.with_options(**self._options)
        return self._layers[layer]

    def run(
        self, layer: CompiledLayer, graph: HeteroGraph, values: Mapping[str, Tensor]
    ) -> Callable[..., Any] | None:
        """The prepared call for these tensors, or None on the first one."""
        key = (layer, id(graph), torch.is_grad_enabled(), _kinds(values))
        found = self._prepared.get(key)
        return None if found is None else found[1]

    def keep(
        self,
        layer: CompiledLayer,
        graph: HeteroGraph,
        values: Mapping[str, Tensor],
        prepared: Prepared,
    ) -> Prepared:
        """Remember a prepared call; see `run`."""
        key = (layer, id(graph), torch.is_grad_enabled(), _kinds(values))
        if len(self._prepared) >= 16:
            self._prepared.clear()
        self._prepared[key] = (graph, prepared)
        return prepared

    def graph_of(
        self,
        edge_index: Tensor | HeteroGraph,
        edge_type: Tensor | None,
        num_nodes: int,
        num_relations: int,
    ) -> HeteroGraph:
        """PyG's arguments as a graph, made once for each pair of tensors."""
        if isinstance(edge_index, HeteroGraph):
            return edge_index
        if edge_type is None:
            raise ValueError("expected edge_type [edges] beside edge_index")
        key = (id(edge_index), edge_index._version, id(edge_type), num_nodes)
        if key not in self._graphs:
            if len(self._graphs) >= 8:
                self._graphs.clear()
            graph = HeteroGraph.from_pyg(
                edge_index,
                edge_type,
                num_nodes=num_nodes,
                num_relations=num_relations,
            )
            # The tensors are kept, so that their ids stay theirs.
            self._graphs[key] = (edge_index, edge_type, graph)
        return self._graphs[key][2]


def _kinds(values: Mapping[str, Tensor]) -> tuple[object, ...]:
    return tuple((t.dtype, t.shape[1:], t.requires_grad) for t in values.values())


def glorot(t: Tensor | None) -> None:
    """PyG's initialization: uniform within sqrt(6 / (fan in + fan out))."""
    if t is not None:
        bound = math.sqrt(6.0 / (t.size(-2) + t.size(-1)))
        nn.init.uniform_(t, -bound, bound)


def kaiming_uniform(t: Tensor, fan: int) -> None:
    """PyG's default for typed linear layers: within 1 / sqrt(fan)."""
    bound = 1.0 / math.sqrt(fan) if fan > 0 else 0.0
    nn.init.uniform_(t, -bound, bound)


def combine_bases(coefficients: Tensor, bases: Tensor) -> Tensor:
    """Weights [relations, in, out] of the basis decomposition."""
    flat = coefficients @ bases.flatten(1)
    return flat.view(coefficients.size(0), *bases.shape[1:])


def empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))
