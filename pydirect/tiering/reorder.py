"""Number the nodes by score, so that a tier is a range of numbers."""

from dataclasses import dataclass

import torch

from pydirect.sampling import Graph


@dataclass(frozen=True, kw_only=True)
class Reordering:
    """A renumbering and its inverse."""

    old_of_new: torch.Tensor
    """int64, shape (num_nodes,): node ``i`` was node ``old_of_new[i]``."""

    new_of_old: torch.Tensor

    def graph(self, graph: Graph) -> Graph:
        """The same graph under the new numbers; weights go along.

        Raises:
            ValueError: neighbours of another type, or another number of nodes.
        """
        if graph.num_sources is not None or graph.num_nodes != len(self.old_of_new):
            raise ValueError(
                f"graph: expects one of {len(self.old_of_new)} nodes of one type, got "
                f"{graph.num_nodes} nodes, num_sources {graph.num_sources}"
            )
        degrees = graph.degrees()[self.old_of_new]
        offsets = torch.zeros_like(graph.offsets)
        torch.cumsum(degrees, 0, out=offsets[1:])
        lists = torch.repeat_interleave(
            torch.arange(graph.num_nodes, device="cpu"),
            degrees,
            output_size=graph.num_edges,
        )
        rank = torch.arange(graph.num_edges, device="cpu") - offsets[lists]
        source = graph.offsets[self.old_of_new[lists]] + rank
        neighbors = self.new_of_old[graph.neighbors[source].long()]
        weights = graph.weights
        return Graph(
            offsets=offsets,
            neighbors=neighbors.to(graph.neighbors.dtype),
            weights=None if weights is None else weights[source],
            symmetric=graph.symmetric,
        )

    def rows(self, table: torch.Tensor) -> torch.Tensor:
        """Features or labels under the new numbers, in new memory."""
        return table[self.old_of_new]

    def nodes(self, nodes: torch.Tensor) -> torch.Tensor:
        """The new numbers of ``nodes``."""
        return self.new_of_old[nodes]


def reorder_by(score: torch.Tensor) -> Reordering:
    """Highest score first; ties keep their order."""
    old_of_new = score.argsort(descending=True, stable=True)
    new_of_old = torch.empty_like(old_of_new)
    new_of_old[old_of_new] = torch.arange(len(score), device="cpu")
    return Reordering(old_of_new=old_of_new, new_of_old=new_of_old)
