"""Random graphs with all their oddities."""

import numpy as np
import torch

from pydirect.sampling import Graph


def random_graph(seed: int) -> Graph:
    """Disconnected, with self loops, multi-edges, hubs, nodes without edges; ids of 4
    or 8 bytes; weights of every dtype; directed or not."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 60))
    num_edges = int(rng.integers(0, 5 * num_nodes))
    sources = rng.integers(0, num_nodes, num_edges)
    targets = rng.integers(0, num_nodes, num_edges)
    if num_edges and rng.random() < 0.3:  # a hub
        sources[: num_edges // 2] = sources[0]
    if num_nodes > 4 and rng.random() < 0.5:  # two parts
        half = num_nodes // 2
        targets = targets % half + np.where(sources < half, 0, half)
        targets = np.minimum(targets, num_nodes - 1)
    index = torch.from_numpy(np.stack([sources, targets]))
    symmetric = bool(rng.random() < 0.5)
    kind = [torch.int32, torch.int64, torch.float32, torch.float64][seed % 4]
    values = torch.from_numpy(rng.integers(0, 20, num_edges)).to(kind)
    if kind.is_floating_point:
        values = values / 7
    if symmetric:
        index = torch.cat([index, index.flip(0)], dim=1)
        values = values.repeat(2)
    made = Graph.from_edges(index, num_nodes, weights=values, outgoing=True)
    wide = made.neighbors.long() if rng.random() < 0.5 else made.neighbors
    return Graph(
        offsets=made.offsets,
        neighbors=misaligned(wide, int(rng.integers(0, 40))),
        weights=made.weights,
        symmetric=symmetric,
    )


def misaligned(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that starts ``elements`` elements after a multiple of 128 bytes."""
    room = torch.empty(len(tensor) + elements + 64, dtype=tensor.dtype)
    start = -room.data_ptr() % 128 // tensor.element_size() + elements
    return room[start : start + len(tensor)].copy_(tensor)


class Far(torch.Tensor):
    """A tensor whose data seem to start ``first`` elements earlier."""

    first = 0

    def __new__(cls, tensor: torch.Tensor, first: int) -> "Far":
        made = tensor.as_subclass(cls)
        made.first = first
        return made

    def data_ptr(self) -> int:
        return super().data_ptr() - self.first * self.element_size()
