"""Integer-tensor helpers of the graph: checks, sorting, grouping."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    IntArray = Tensor | np.ndarray[Any, Any] | Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouping:
    """Items grouped by an integer key, in CSR form; ties keep their order."""

    ptr: Tensor
    """int64 [num_groups + 1]: group g holds `items[ptr[g]:ptr[g + 1]]`."""
    items: Tensor
    """int64 [num_items]: item ids."""


def tensor_of(values: "IntArray") -> Tensor:
    """A tensor as it is; another array or a sequence as a tensor, where
    `torch.as_tensor` makes it."""
    if isinstance(values, Tensor):
        return values
    empty = isinstance(values, Sequence) and not values
    return torch.as_tensor(values, dtype=torch.int64 if empty else None)


def integers(name: str, values: "IntArray") -> Tensor:
    """`values` as a one-dimensional int64 tensor; ValueError for anything else."""
    tensor = tensor_of(values)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        raise ValueError(f"expected {name} of an integer dtype, got {tensor.dtype}")
    if tensor.dtype == torch.bool:
        raise ValueError(f"expected {name} of an integer dtype, got a boolean mask")
    if tensor.dim() != 1:
        raise ValueError(
            f"expected {name} with one dimension, got shape {list(tensor.shape)}"
        )
    return tensor.to(torch.int64)


def check_range(name: str, ids: Tensor, limit: int, limit_name: str) -> None:
    """ValueError with the first id of `ids` outside [0, limit) and its position."""
    if not ids.numel():
        return
    low, high = (int(v) for v in torch.stack(torch.aminmax(ids)).tolist())
    if low >= 0 and high < limit:
        return
    value = low if low < 0 else high
    where = int((ids == value).nonzero()[0])
    raise ValueError(
        f"expected {name} in [0, {limit}), got {value} at position {where}"
        + ("" if value < 0 else f"; set {limit_name} to at least {high + 1}")
    )


def segment_ptr(ascending: Tensor, num_segments: int) -> Tensor:
    """int64 [num_segments + 1] offsets of the values 0..num_segments - 1."""
    bounds = torch.arange(num_segments + 1, device=ascending.device)
    return torch.searchsorted(ascending, bounds)


def offsets(sizes: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(sizes) + 1]: exclusive prefix sum of host integers, on the device
    without waiting for it."""
    made = torch.tensor([0, *sizes], dtype=torch.int64, device="cpu").cumsum(0)
    if device.type == "cuda":
        return made.pin_memory().to(device, non_blocking=True)
    return made.to(device)


def group_by(keys: Tensor, num_groups: int) -> Grouping:
    """Items 0..len(keys) - 1 grouped by key; inside a group in ascending order."""
    ordered, items = torch.sort(keys, stable=True)
    return Grouping(ptr=segment_ptr(ordered, num_groups), items=items)


def edge_sort(
    edge_type: Tensor, dst: Tensor, src: Tensor, num_nodes: int, num_types: int
) -> Tensor:
    """The stable order of edges by (edge type, destination, source)."""
    if num_types * num_nodes * num_nodes < 2**63:
        key = (edge_type * num_nodes + dst) * num_nodes + src
        return torch.sort(key, stable=True).indices
    order = torch.sort(src, stable=True).indices
    order = order[torch.sort(dst[order], stable=True).indices]
    return order[torch.sort(edge_type[order], stable=True).indices]


def type_order(node_type: "IntArray") -> Tensor:
    """The order that lists nodes type by type, ties in their order.

    `order[new_id]` is the old id. For graphs whose ids mix types:
    `rank = torch.empty_like(order); rank[order] = torch.arange(len(order))`
    maps old ids to new ones.
    """
    return torch.sort(integers("node_type", node_type), stable=True).indices


def check_parallel(src: Tensor, dst: Tensor, kind: Tensor) -> None:
    """ValueError unless the three arrays have one length and lie on one device."""
    if not src.numel() == dst.numel() == kind.numel():
        raise ValueError(
            "expected src, dst and edge_type of one length, got "
            f"{src.numel()}, {dst.numel()} and {kind.numel()}"
        )
    if len({src.device, dst.device, kind.device}) > 1:
        raise ValueError(
            f"expected one device, got src on {src.device}, dst on {dst.device}, "
            f"edge_type on {kind.device}"
        )


def count(*ids: Tensor) -> int:
    """The largest id plus one, 0 without ids."""
    return max((int(i.max()) + 1 for i in ids if i.numel()), default=0)


def type_ptr(node_type: Tensor, num_nodes: int | None) -> Tensor:
    """int64 [num_node_types + 1] offsets of an ascending node type array."""
    if num_nodes not in (None, node_type.numel()):
        raise ValueError(
            f"expected node_type of length num_nodes = {num_nodes}, got "
            f"{node_type.numel()}"
        )
    num_types = count(node_type)
    check_range("node_type", node_type, num_types, "num_node_types")
    falls = (node_type.diff() < 0).nonzero().flatten()
    if falls.numel():
        at = int(falls[0]) + 1
        raise ValueError(
            f"expected node_type to ascend (nodes numbered type by type), got type "
            f"{int(node_type[at])} after {int(node_type[at - 1])} at node {at}; "
            "renumber the nodes with hector.indexing.type_order"
        )
    return segment_ptr(node_type, num_types)


def adjacency(adj: Any) -> tuple[Tensor, Tensor | None]:
    """`edge_index` [2, num_edges] and values of PyG's `adj_t`: a sparse tensor of
    PyTorch or of torch_sparse with a row a destination and a column a source."""
    if not isinstance(adj, Tensor):
        row, col, value = adj.coo()
        return torch.stack((col, row)), value
    coo = adj.to_sparse_coo().coalesce()
    return coo.indices().flip(0), coo.values()


def is_adjacency(edges: object) -> bool:
    """Whether edges are given as `adj_t`."""
    if isinstance(edges, Tensor):
        return edges.layout is not torch.strided
    return hasattr(edges, "coo") and hasattr(edges, "storage")


def endpoints(label: str, edge_index: Any) -> tuple[Tensor, Tensor]:
    """Sources and destinations of PyG's `edge_index` [2, num_edges] or `adj_t`."""
    if is_adjacency(edge_index):
        edge_index = adjacency(edge_index)[0]
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"expected {label} of shape [2, num_edges], got {list(edge_index.shape)}"
        )
    return integers(f"{label}[0]", edge_index[0]), integers(
        f"{label}[1]", edge_index[1]
    )
