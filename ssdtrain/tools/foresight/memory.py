"""The most device memory a step needs: storages in the caching allocator's units, what
operators take while they run, and what libraries keep (`context_bytes`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from ssdtrain.tools.foresight.graph import CALLER, Graph, Node

UNIT = 512
# torch sorts the indices of an embedding's gradient: keys and values, in and out.
SORT_BYTES = 4 * 8


@dataclass(frozen=True, kw_only=True)
class PeakEstimate:
    """A predicted peak of allocated bytes."""

    peak_bytes: int
    resident_bytes: int
    """Of it, what is there before the step: weights, optimizer state, inputs."""


def estimate_peak(graph: Graph, context_bytes: int = 0) -> PeakEstimate:
    """The highest point of the memory curve."""
    resident = context_bytes + sum(
        _rounded(storage.num_bytes)
        for storage in graph.storages.values()
        if storage.born == CALLER
    )
    curve = memory_curve(graph, context_bytes)
    peak = max(curve, default=resident)
    return PeakEstimate(peak_bytes=max(peak, resident), resident_bytes=resident)


def _rounded(num_bytes: int) -> int:
    return (num_bytes + UNIT - 1) // UNIT * UNIT


def _attention_backward(graph: Graph, node: Node) -> int:
    """Gradients of queries in fp32; of keys and values, for every query head."""
    query, key = graph.tensors[node.inputs[1]], graph.tensors[node.inputs[2]]
    rows = prod(query.shape[:3])
    extra = 4 * rows * query.shape[3] + 2 * 4 * rows
    if key.shape[1] != query.shape[1]:
        extra += 2 * 2 * query.shape[0] * query.shape[1] * prod(key.shape[2:])
    return extra


def _layer_norm_backward(graph: Graph, node: Node) -> int:
    """Partial sums of the weight's and the bias's gradient."""
    grad = graph.tensors[node.inputs[0]]
    columns = grad.shape[-1] if grad.shape else 1
    rows = grad.elements // max(1, columns)
    return 2 * 4 * columns * min(rows, 64)


_WORKSPACES: Mapping[str, Callable[[Graph, Node], int]] = {
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "embedding_dense_backward": lambda graph, node: (
        SORT_BYTES * graph.tensors[node.inputs[1]].elements
    ),
    "native_layer_norm_backward": _layer_norm_backward,
}


def memory_curve(graph: Graph, context_bytes: int = 0) -> list[int]:
    """Bytes allocated while each node runs, the operator's own memory included."""
    change: dict[int, int] = {}
    level = context_bytes
    for storage in graph.storages.values():
        size = _rounded(storage.num_bytes)
        born = max(0, storage.born)
        change[born] = change.get(born, 0) + size
        if storage.dies != CALLER:
            change[storage.dies + 1] = change.get(storage.dies + 1, 0) - size
    curve = []
    for index, node in enumerate(graph.nodes):
        level += change.get(index, 0)
        own = _WORKSPACES.get(node.name.removeprefix("aten::"))
        curve.append(level + (0 if own is None else own(graph, node)))
    return curve
