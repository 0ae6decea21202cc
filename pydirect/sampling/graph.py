"""A graph in compressed sparse form, for sampling and traversal."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

_WEIGHTS = (torch.int32, torch.int64, torch.float32, torch.float64)
# Types that hold more, exactly.
_WIDER = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}


class _Numbered(Protocol):
    @property
    def num_sources(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Neighbours of node i are ``neighbors[offsets[i]:offsets[i + 1]]``.

    For message passing a neighbour is a source: it sends to i. For traversal it is a
    target: an edge leads from i to it. Everything is checked at construction, so that
    kernels need not check again: change the tensors of no graph afterwards.
    """

    offsets: torch.Tensor
    """int64, shape (num_nodes + 1,), CPU."""

    neighbors: torch.Tensor
    """int32 or int64, shape (num_edges,), CPU; contiguous."""

    weights: torch.Tensor | None = None
    """int32, int64, float32 or float64, shape (num_edges,), CPU; contiguous.
    Detached."""

    symmetric: bool = False
    """Whether every edge is stored in both directions. Taken on trust: traversal then
    reads lists backwards too."""

    num_sources: int | None = None
    """Nodes among which neighbours are numbered, where they are of another type;
    None: the graph's own."""

    def __post_init__(self) -> None:
        self._check_offsets()
        self._check_neighbors()
        weights = self.weights
        if weights is None:
            return
        if weights.dtype not in _WEIGHTS or weights.shape != self.neighbors.shape:
            raise ValueError(
                f"weights: expects one int32, int64, float32 or float64 for each of "
                f"{self.num_edges} edges, got {weights.dtype} of shape "
                f"{list(weights.shape)}"
            )
        _check_memory("weights", weights)
        # Draws and paths are no functions of them that have gradients.
        object.__setattr__(self, "weights", weights.detach())

    def _check_offsets(self) -> None:
        offsets = self.offsets
        if offsets.dim() != 1 or offsets.dtype != torch.int64:
            raise ValueError(
                f"offsets: expects 1-D int64, got {offsets.dim()}-D {offsets.dtype}"
            )
        _check_memory("offsets", offsets)
        if len(offsets) == 0:
            raise ValueError(
                "offsets: expects num_nodes + 1 entries, got none: a graph without "
                "nodes has the single offset 0"
            )
        if int(offsets[0]) != 0:
            raise ValueError(f"offsets: expects the first to be 0, got {offsets[0]}")
        if int(offsets[-1]) != self.neighbors.numel():
            raise ValueError(
                "offsets: expects the last to be the number of edges "
                f"({self.neighbors.numel()}), got {offsets[-1:].tolist()}"
            )
        if not bool((offsets[1:] >= offsets[:-1]).all()):
            at = int((offsets[1:] < offsets[:-1]).nonzero()[0])
            raise ValueError(
                "offsets: expects them in ascending order, got "
                f"{int(offsets[at + 1])} after {int(offsets[at])} at node {at}"
            )

    def _check_neighbors(self) -> None:
        neighbors = self.neighbors
        if neighbors.dtype not in (torch.int32, torch.int64) or neighbors.dim() != 1:
            raise ValueError(
                f"neighbors: expects 1-D int32 or int64, got {neighbors.dim()}-D "
                f"{neighbors.dtype}"
            )
        _check_memory("neighbors", neighbors)
        if len(neighbors):
            low, high = (int(v) for v in torch.aminmax(neighbors))
            num = self.num_nodes if self.num_sources is None else self.num_sources
            if low < 0 or high >= num:
                raise ValueError(
                    f"neighbors: expects nodes 0 to {num - 1}, got {low} to {high}"
                )

    @property
    def num_nodes(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_edges(self) -> int:
        return len(self.neighbors)

    def degrees(self) -> torch.Tensor:
        """Count the neighbours of each node: int64, shape (num_nodes,)."""
        return self.offsets.diff()

    @classmethod
    def from_edges(
        cls,
        edge_index: torch.Tensor,
        num_nodes: int,
        *,
        symmetric: bool = False,
        weights: torch.Tensor | None = None,
        outgoing: bool = False,
        num_sources: int | None = None,
    ) -> "Graph":
        """Compress a list of edges. Lists come out sorted.

        Args:
            edge_index: integer, shape (2, num_edges): sources, targets (PyG's order).
                May lie on a GPU, where sorting is faster; the result is on the CPU.
            num_nodes: number of nodes.
            symmetric: add every edge backwards too, and drop duplicates. With weights
                duplicates stay. An edge from a node to itself is stored once.
            weights: one an edge, see `Graph.weights`; bool, shorter integers and half
                precision are widened.
            outgoing: list each node's targets, for traversal; its sources otherwise.
            num_sources: of sources, where they are of another type than targets.

        Raises:
            ValueError: wrong shape, no integers, a node out of range, or more nodes
                than pairs of them can be numbered (about 3 billion).
        """
        edge_index = plain(edge_index)
        _check_edges(edge_index, num_nodes, weights)
        source, target = edge_index.long()
        if edge_index.numel():
            _check_ends(source, num_nodes if num_sources is None else num_sources)
            _check_ends(target, num_nodes)
        if num_sources is not None and (symmetric or outgoing):
            raise ValueError(
                "num_sources: expects a graph of two types to list sources only, got "
                f"symmetric={symmetric}, outgoing={outgoing}"
            )
        num_others = num_nodes if num_sources is None else num_sources
        if num_nodes * num_others > torch.iinfo(torch.int64).max:
            raise ValueError(
                "num_nodes: expects at most 2**63 pairs of nodes, got "
                f"{num_nodes} times {num_others}: make Graph(offsets=..., "
                "neighbors=...) from sorted edges"
            )
        owner, other = (source, target) if outgoing else (target, source)
        key = owner * num_others + other
        if symmetric:
            apart = owner != other
            key = torch.cat([key, (other * num_nodes + owner)[apart]])
        if weights is not None:
            weights = widened(weights).detach().to(key.device)
            if symmetric:
                weights = torch.cat([weights, weights[apart]])
            key, order = key.sort(stable=True)
            weights = weights[order].cpu()
        else:
            key = torch.unique(key) if symmetric else key.sort().values
        counts = torch.bincount(key // max(1, num_others), minlength=num_nodes)
        offsets = torch.zeros(num_nodes + 1, dtype=torch.int64, device=key.device)
        torch.cumsum(counts[:num_nodes], 0, out=offsets[1:])
        neighbors = key % max(1, num_others)
        if num_others < 2**31:
            neighbors = neighbors.int()
        return cls(
            offsets=offsets.cpu(),
            neighbors=neighbors.cpu(),
            weights=weights,
            symmetric=symmetric,
            num_sources=num_sources,
        )

    def to_edge_index(self) -> torch.Tensor:
        """PyG's form: int64, shape (2, num_edges), sources then targets, where lists
        hold sources. Of a graph made with ``outgoing=True`` flip the rows."""
        targets = torch.repeat_interleave(
            torch.arange(self.num_nodes, device="cpu"),
            self.degrees(),
            output_size=self.num_edges,
        )
        return torch.stack([self.neighbors.long(), targets])

    def reverse(self) -> "Graph":
        """List the same edges at their other end; weights go along."""
        if self.symmetric and self.weights is None:
            return self
        check_one_type("reverse", self)
        made = Graph.from_edges(
            self.to_edge_index(), self.num_nodes, weights=self.weights, outgoing=True
        )
        return replace(made, symmetric=self.symmetric)


def lists_of(
    owner: torch.Tensor,
    other: torch.Tensor,
    num_owners: int,
    num_others: int,
    *,
    weights: torch.Tensor | None = None,
    by: torch.Tensor | None = None,
) -> tuple[Graph, torch.Tensor]:
    """List edges at one of their ends.

    Args:
        owner: integers, shape (num_edges,): the end that lists.
        other: as above: the end that is listed.
        num_owners: nodes of the owners' type.
        num_others: of the others'.
        weights: one an edge.
        by: what each list is sorted by; None: as the caller numbers edges.

    Returns:
        The graph, and the caller's number of each of its edges.

    Raises:
        ValueError: ids out of range.
    """
    owner, other = owner.cpu().long(), other.cpu().long()
    if len(owner):
        _check_ends(owner, num_owners)
    order = torch.arange(len(owner), device="cpu")
    if by is not None:
        order = torch.sort(by.cpu(), stable=True).indices
    order = order[torch.sort(owner[order], stable=True).indices]
    counts = torch.bincount(owner, minlength=num_owners)
    listed = other[order]
    graph = Graph(
        offsets=torch.cat((counts.new_zeros(1), counts.cumsum(0))),
        neighbors=listed.int() if num_others < 2**31 else listed,
        weights=None if weights is None else weights.cpu()[order],
        num_sources=num_others,
    )
    return graph, order


def is_integer(dtype: torch.dtype) -> bool:
    """Whether numbers of that type may number nodes; a mask may not."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def widened(weights: torch.Tensor) -> torch.Tensor:
    """Weights in a type that `Graph` takes, where one holds them exactly."""
    return weights.to(_WIDER.get(weights.dtype, weights.dtype))


def plain(edge_index: torch.Tensor) -> torch.Tensor:
    """The tensor that a PyG ``EdgeIndex`` wraps; any other as it is."""
    found: torch.Tensor = getattr(edge_index, "as_tensor", lambda: edge_index)()
    return found


def one_each(weights: torch.Tensor) -> torch.Tensor:
    """PyG's weights of shape (num_edges, 1) as (num_edges,)."""
    return weights.squeeze(1) if weights.shape[1:] == (1,) else weights


def check_nodes(
    name: str, nodes: torch.Tensor, num_nodes: int, what: str = "nodes"
) -> None:
    """
    Raises:
        ValueError: ``nodes`` are not 1-D int64, or not among ``num_nodes``.
    """
    if nodes.dim() != 1 or nodes.dtype != torch.int64:
        hint = ": pass mask.nonzero().flatten()" if nodes.dtype == torch.bool else ""
        raise ValueError(
            f"{name}: expects 1-D int64, got {nodes.dim()}-D {nodes.dtype}{hint}"
        )
    if len(nodes):
        low, high = (int(v) for v in torch.aminmax(nodes))
        if low < 0 or high >= num_nodes:
            raise ValueError(
                f"{name}: expects {what} 0 to {num_nodes - 1}, got {low} to {high}"
            )


def check_one_type(user: str, graph: _Numbered) -> None:
    """
    Raises:
        ValueError: neighbours are numbered among nodes of another type.
    """
    if graph.num_sources is not None:
        raise ValueError(
            f"{user} expects neighbours that are the graph's own nodes, got a graph of "
            "two types (num_sources), which HeteroDeviceSampler draws from"
        )


def _check_edges(
    edge_index: torch.Tensor, num_nodes: int, weights: torch.Tensor | None
) -> None:
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"edge_index: expects shape (2, num_edges), got {list(edge_index.shape)}"
        )
    kind = edge_index.dtype
    if edge_index.numel() and not is_integer(kind):
        raise ValueError(f"edge_index: expects integers, got {edge_index.dtype}")
    if num_nodes < 0:
        raise ValueError(f"num_nodes: expects 0 or more, got {num_nodes}")
    if weights is not None and weights.shape != edge_index.shape[1:]:
        raise ValueError(
            f"weights: expects one for each of {edge_index.shape[1]} edges, got "
            f"shape {list(weights.shape)}"
        )


def _check_ends(nodes: torch.Tensor, num: int) -> None:
    low, high = (int(v) for v in torch.aminmax(nodes))
    if low < 0 or high >= num:
        raise ValueError(
            f"edge_index: expects nodes 0 to {num - 1}, got {low} to {high}"
        )


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expects a contiguous CPU tensor, got {tensor.device} with "
            f"strides {tensor.stride()}: the edges of a graph stay in host memory"
        )
