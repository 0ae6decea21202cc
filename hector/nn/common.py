"""What the layers share: graphs from PyG's arguments, initialization, settings."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hector.frontend import CompiledLayer, Prepared
from hector.graph import HeteroGraph
from hector.graph_cache import GraphCache
from hector.indexing import adjacency, is_adjacency
from hector.passes.pipeline import Optimizations
from hector.runtime.ahead import arch, target_now

FLOWS = ("source_to_target", "target_to_source")
MAX_PREPARED = 64
"""Prepared calls of one graph."""
SETTINGS: dict[str, Optimizations | None] = {
    "auto": None,
    "none": Optimizations(),
    "compaction": Optimizations(compact=True),
    "reordering": Optimizations(reorder=True),
    "both": Optimizations(compact=True, reorder=True),
}


class CompiledConv(nn.Module):
    """A layer whose forward is a compiled function."""

    def __init__(self, flow: str = "source_to_target") -> None:
        super().__init__()
        if flow not in FLOWS:
            raise ValueError(f"expected flow in {FLOWS}, got {flow!r}")
        self.flow = flow
        self.edge_mask: Any = None
        """Set by `hector.nn.masked`."""
        self._graphs = GraphCache()
        self.compiled_layers: dict[CompiledLayer, CompiledLayer] = {}
        """What was compiled; layers of equal options may share it."""
        self._options: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what was compiled: a copy or a loaded layer compiles anew."""
        return {**self.__dict__, "_graphs": GraphCache(), "compiled_layers": {}}

    def __repr__(self) -> str:
        # One line, as PyG's layers print.
        return f"{type(self).__name__}({self.extra_repr()})"

    def set_optimization(self, name: str) -> "CompiledConv":
        """Fix {none, compaction, reordering, both}; "auto" lets the cost model
        choose."""
        if name not in SETTINGS:
            raise ValueError(f"expected one of {sorted(SETTINGS)}, got {name!r}")
        return self.set_options(optimizations=SETTINGS[name])

    def set_options(self, **options: Any) -> "CompiledConv":
        """Change fields of `hector.Options` for this layer."""
        self._options.update(options)
        self.compiled_layers.clear()
        return self

    def mask_of_edges(self) -> Any:
        """What messages are multiplied by, in the caller's order of edges; None:
        nothing. Of `hector.nn.masked`, or of PyG's explainers."""
        mask: Any = self.edge_mask
        pyg: Any = self._modules.get("pyg_mask")
        if mask is None and pyg is not None and pyg.explain:
            mask = pyg._edge_mask
            if mask is not None and pyg._apply_sigmoid:
                mask = mask.sigmoid()
        if isinstance(mask, Tensor) and mask.dim() != 1:
            raise ValueError(f"expected a mask [edges], got {list(mask.shape)}")
        return mask

    def compiled(self, layer: CompiledLayer) -> CompiledLayer:
        """The layer's function under this module's options."""
        if not self._options:
            return layer
        if layer not in self.compiled_layers:
            self.compiled_layers[layer] = layer.with_options(**self._options)
        return self.compiled_layers[layer]

    def run(
        self,
        layer: CompiledLayer,
        graph: HeteroGraph,
        values: Mapping[str, Tensor],
        numbers: Hashable,
        prepare: Callable[[], Prepared],
    ) -> Any:
        """The result for these tensors, prepared on the first call with such ones.

        `numbers` is everything else that the program depends on.
        """
        kinds = [(t.dtype, t.shape, t.requires_grad) for t in values.values()]
        ahead = None if target_now() is None else arch()
        modes = (torch.is_grad_enabled(), ahead)
        key = (layer, modes, numbers, tuple(values), *kinds)
        known = graph.state.prepared
        call: Prepared | None = known.get(key)
        if call is None:
            if len(known) >= MAX_PREPARED:
                known.clear()
            call = known[key] = prepare()
        return call(values)

    def graph_of(
        self,
        edge_index: Tensor | HeteroGraph,
        edge_type: Tensor | None,
        num_nodes: int,
        num_relations: int,
        first_target: int = 0,
    ) -> HeteroGraph:
        """PyG's arguments as a graph, made once for each pair of tensors; see
        [Note: unchanged tensors]. Destinations are numbered from `first_target`."""
        backwards = self.flow == "target_to_source"
        if isinstance(edge_index, HeteroGraph):
            if backwards:
                raise ValueError(
                    "expected edge_index for flow target_to_source, got a HeteroGraph; "
                    "build it with the ends exchanged"
                )
            return edge_index
        if is_adjacency(edge_index):
            if backwards:
                raise ValueError("expected edge_index for flow target_to_source")
            return self._of_adjacency(edge_index, edge_type, num_nodes, num_relations)
        if edge_type is None:
            raise ValueError("expected edge_type [edges] beside edge_index")
        ends, kinds = edge_index, edge_type

        def make(sampled: bool) -> HeteroGraph:
            moved = ends.flip(0) if backwards else ends
            if first_target:
                moved = torch.stack((moved[0], moved[1] + first_target))
            return HeteroGraph.from_pyg(
                moved,
                kinds,
                num_nodes=num_nodes,
                num_relations=num_relations,
                sampled=sampled,
            )

        facts = (num_nodes, num_relations, first_target, backwards)
        return self._graphs.get((ends, kinds), facts, make)

    def _of_adjacency(
        self, adj: Any, kinds: Tensor | None, num_nodes: int, num_relations: int
    ) -> HeteroGraph:
        """`adj_t`, whose values are the edge types, unless those are given next to it.
        Made in every call: of a sparse tensor PyTorch tells no version."""
        ends, values = adjacency(adj)
        if values is None or (kinds is not None and values.is_floating_point()):
            values = kinds
        if values is None or values.is_floating_point():
            raise ValueError("expected adj_t with edge types as its integer values")
        return HeteroGraph.from_pyg(
            ends, values, num_nodes=num_nodes, num_relations=num_relations
        )


def combine_bases(coefficients: Tensor, bases: Tensor) -> Tensor:
    """Weights [relations, in, out] of the basis decomposition."""
    flat = coefficients @ bases.flatten(1)
    return flat.view(coefficients.size(0), *bases.shape[1:])


def empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))
