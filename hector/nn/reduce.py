"""Reducers of RGCN that are no sums of products: they see the messages of a destination
in one relation together, and so have them in memory.

What they compute is PyG's, to its constants: `std` is the root of a variance of at
least 1e-5, `mul` is 1 where there is no message.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hector.frontend import compile
from hector.functions import reshape
from hector.graph import HeteroGraph
from hector.kept import kept
from hector.message.eager import Groups, reduce_builtin
from hector.message.functions import ReduceFunction, Reducer
from hector.precision import index_sum

VARIANCE_FLOOR = 1e-5
ONE_BY_ONE = {"median": Reducer.MEDIAN, "mul": Reducer.MUL}


@dataclass(frozen=True, eq=False)
class RelationGroups:
    """The edges of each (relation, destination) pair, and the pairs as a graph."""

    groups: Groups
    pair: Tensor
    """int64 [num_edges]: the pair of each stored edge."""
    graph: HeteroGraph
    """An edge a pair, from its destination to itself, in its relation."""

    @classmethod
    def of(cls, graph: HeteroGraph) -> "RelationGroups":
        """Made once a graph; that waits for the device."""
        graph.check_unchanged()
        return kept(graph.state.prepared, cls, lambda: cls._made(graph))

    @classmethod
    def _made(cls, graph: HeteroGraph) -> "RelationGroups":
        pairs = graph.replace(sampled=False).unique_dst()
        node, sizes = pairs.unique_node, pairs.etype_ptr.diff()
        kinds = torch.arange(graph.num_edge_types, device=graph.device)
        return cls(
            Groups(pairs.edge_to_unique, pairs.num_unique),
            pairs.edge_to_unique,
            HeteroGraph.from_arrays(
                node,
                node,
                kinds.repeat_interleave(sizes),
                num_nodes=graph.num_nodes,
                num_edge_types=graph.num_edge_types,
            ),
        )

    def reduce(self, rows: Tensor, aggr: str) -> Tensor:
        """[pairs, width] of edge rows in the graph's order."""
        if aggr in ONE_BY_ONE:
            how = ReduceFunction(ONE_BY_ONE[aggr], "m", "out")
            return reduce_builtin(how, rows, self.groups)
        return _SUMS[aggr](self, rows)

    def sum(self, rows: Tensor) -> Tensor:
        groups = self.groups
        return index_sum(rows, self.pair, groups.degrees.numel(), groups.longest)

    def mean(self, rows: Tensor) -> Tensor:
        return self.sum(rows) / self.groups.degrees.view(-1, 1)

    def largest(self, rows: Tensor) -> Tensor:
        where = self.pair[:, None].expand_as(rows)
        out = rows.new_zeros(self.groups.degrees.numel(), rows.shape[1])
        return out.scatter_reduce(0, where, rows, "amax", include_self=False)

    def smallest(self, rows: Tensor) -> Tensor:
        return -self.largest(-rows)

    def std(self, rows: Tensor) -> Tensor:
        mean = self.mean(rows)
        root = (self.mean(rows * rows) - mean * mean).clamp(min=VARIANCE_FLOOR).sqrt()
        return root.masked_fill(root <= math.sqrt(VARIANCE_FLOOR), 0.0)

    def softmax(self, rows: Tensor) -> Tensor:
        peak = self.largest(rows.detach())
        e = torch.exp(rows - peak[self.pair])
        return self.sum(e / self.sum(e)[self.pair] * rows)


def aggr_name(aggr: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """The name of an `aggr` of PyG that is compiled or grouped here; else a text for
    users.

    Raises:
        ValueError: a name that is none, without torch_geometric to ask.
    """
    if isinstance(aggr, str):
        return f"{aggr} with aggr_kwargs" if kwargs else aggr
    name = type(aggr).__name__.removesuffix("Aggregation").lower()
    return name if name in _PLAIN else str(aggr)


_PLAIN = ("sum", "mean", "max", "min", "mul")
"""Of PyG's classes, those without options."""


def aggregation_of(aggr: Any, kwargs: Mapping[str, Any] | None) -> nn.Module:
    """PyG's module of an `aggr`; imports torch_geometric.

    Raises:
        ValueError: nothing that PyG knows.
    """
    from torch_geometric.nn.resolver import aggregation_resolver

    made = aggregation_resolver(aggr, **(kwargs or {}))
    if not isinstance(made, nn.Module):
        raise ValueError(f"expected aggr of PyG's, got {aggr!r}")
    return made


_SUMS: dict[str, Callable[[RelationGroups, Tensor], Tensor]] = {
    "std": RelationGroups.std,
    "softmax": RelationGroups.softmax,
    "max": RelationGroups.largest,
    "min": RelationGroups.smallest,
}


@compile()
def pair_products(g, edge_rows, weight, blocks: int):  # type: ignore[no-untyped-def]
    """Sum over a node's relations of rows times the relation's weights."""
    for e in g.edges():
        if blocks:
            e["msg"] = reshape(e.edge_rows, blocks, -1) @ weight[e.etype]
        else:
            e["msg"] = e.edge_rows @ weight[e.etype]
    for n in g.dst_nodes():
        n["out"] = 0.0
        for e in n.incoming_edges():
            n["out"] += e["msg"]
        n["joined"] = reshape(n["out"], -1)
    return g.ndata["joined"]
