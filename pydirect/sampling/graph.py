"""A graph in compressed sparse form, for sampling and traversal."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Neighbours of node i are ``neighbors[offsets[i]:offsets[i + 1]]``.

    For message passing a neighbour is a source: it sends to i.
    """

    offsets: torch.Tensor
    """int64, shape (num_nodes + 1,), CPU."""

    neighbors: torch.Tensor
    """int32 or int64, shape (num_edges,), CPU."""

    def __post_init__(self) -> None:
        if self.offsets.dim() != 1 or self.offsets.dtype != torch.int64:
            raise ValueError(
                f"offsets: expects 1-D int64, got {self.offsets.dim()}-D "
                f"{self.offsets.dtype}"
            )
        if self.neighbors.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"neighbors: expects int32 or int64, got {self.neighbors.dtype}"
            )
        if len(self.offsets) == 0 or int(self.offsets[-1]) != len(self.neighbors):
            raise ValueError(
                "offsets: expects the last to be the number of edges "
                f"({len(self.neighbors)}), got {self.offsets[-1:].tolist()}"
            )

    @property
    def num_nodes(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_edges(self) -> int:
        return len(self.neighbors)

    def degrees(self) -> torch.Tensor:
        """Number of neighbours a node, int64, shape (num_nodes,)."""
        return self.offsets.diff()

    @classmethod
    def from_edges(
        cls, edge_index: torch.Tensor, num_nodes: int, *, symmetric: bool = False
    ) -> "Graph":
        """Compress a list of edges.

        Args:
            edge_index: integer, shape (2, num_edges): sources, targets (PyG's order).
                May lie on a GPU, where sorting is faster; the result is on the CPU.
            num_nodes: number of nodes.
            symmetric: add every edge backwards too, and drop duplicates.

        Raises:
            ValueError: wrong shape or a node out of range.
        """
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ValueError(
                "edge_index: expects shape (2, num_edges), got "
                f"{list(edge_index.shape)}"
            )
        source, target = edge_index.long()
        if edge_index.numel():
            low, high = (int(v) for v in torch.aminmax(edge_index))
            if low < 0 or high >= num_nodes:
                raise ValueError(
                    f"edge_index: expects nodes 0 to {num_nodes - 1}, got {low} to "
                    f"{high}"
                )
        key = target * num_nodes + source
        if symmetric:
            key = torch.unique(torch.cat([key, source * num_nodes + target]))
        else:
            key = key.sort().values
        counts = torch.bincount(key // num_nodes, minlength=num_nodes)
        offsets = torch.zeros(num_nodes + 1, dtype=torch.int64, device=key.device)
        torch.cumsum(counts, 0, out=offsets[1:])
        neighbors = key % num_nodes
        if num_nodes < 2**31:
            neighbors = neighbors.int()
        return cls(offsets=offsets.cpu(), neighbors=neighbors.cpu())

    def to_edge_index(self) -> torch.Tensor:
        """PyG's form: int64, shape (2, num_edges), sources then targets."""
        targets = torch.repeat_interleave(
            torch.arange(self.num_nodes), self.degrees(), output_size=self.num_edges
        )
        return torch.stack([self.neighbors.long(), targets])
