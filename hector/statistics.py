"""What decides how well compaction and reordering pay on a graph."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hector.graph import HeteroGraph


@dataclass(frozen=True, kw_only=True)
class GraphStatistics:
    """Sizes, degrees, compaction ratios and relation skew of one graph."""

    num_nodes: int
    num_node_types: int
    num_edges: int
    num_edge_types: int
    num_empty_relations: int
    num_isolated_nodes: int
    average_degree: float
    """Edges a node."""
    max_in_degree: int
    max_out_degree: int
    max_source_pair_degree: int
    """Edges of one type from one source, at most."""
    max_destination_pair_degree: int
    """Edges of one type into one destination, at most."""
    entity_compaction_ratio: float
    """Unique (source, edge type) pairs over edges (Wu, section 3.4.3)."""
    destination_compaction_ratio: float
    """Unique (destination, edge type) pairs over edges."""
    largest_relation_share: float
    """Edges of the largest relation over all edges."""
    relation_gini: float
    """Gini coefficient of the relation sizes: 0 all equal, towards 1 one holds all."""


def statistics(graph: HeteroGraph) -> GraphStatistics:
    """Sizes, degrees, compaction ratios and relation skew, on the host."""
    sizes = graph.etype_ptr.diff()
    ins, outs = graph.csc().ptr.diff(), graph.csr().ptr.diff()
    sources, destinations = graph.unique_src(), graph.unique_dst()
    edges = max(graph.num_edges, 1)
    return GraphStatistics(
        num_nodes=graph.num_nodes,
        num_node_types=graph.num_node_types,
        num_edges=graph.num_edges,
        num_edge_types=graph.num_edge_types,
        num_empty_relations=int((sizes == 0).sum()),
        num_isolated_nodes=int(((ins == 0) & (outs == 0)).sum()),
        average_degree=graph.num_edges / max(graph.num_nodes, 1),
        max_in_degree=_largest(ins),
        max_out_degree=_largest(outs),
        max_source_pair_degree=_largest(sources.edges().ptr.diff()),
        max_destination_pair_degree=_largest(destinations.edges().ptr.diff()),
        entity_compaction_ratio=sources.num_unique / edges,
        destination_compaction_ratio=destinations.num_unique / edges,
        largest_relation_share=(
            int(sizes.max()) / edges if graph.num_edge_types else 0.0
        ),
        relation_gini=_gini(sizes),
    )


def _largest(sizes: Tensor) -> int:
    return int(sizes.max()) if sizes.numel() else 0


def _gini(sizes: Tensor) -> float:
    total, n = int(sizes.sum()), sizes.numel()
    if total == 0 or n == 0:
        return 0.0
    rank = torch.arange(1, n + 1, device=sizes.device)
    weighted = int((torch.sort(sizes).values * rank).sum())
    return 2 * weighted / (n * total) - (n + 1) / n
