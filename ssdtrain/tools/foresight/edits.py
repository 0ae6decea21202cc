"""Edits of execution graphs: other sizes, other nodes, branches, fused kernels. Every
edit gives a new graph, whose storages live by the edited order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.graph import (
    CALLER,
    Allocation,
    Graph,
    Node,
    Stream,
    TensorInfo,
)
from ssdtrain.tools.foresight.lowering import FUSED, is_pointwise


def resized(first: Graph, second: Graph, sizes: tuple[int, int], size: int) -> Graph:
    """The graph at another batch, or length, from two captured at `sizes`: every
    dimension and every storage is linear in the size. Raises ConfigError: the captures
    differ in more than sizes, or a dimension would be no whole number."""
    names = [node.name for node in first.nodes]
    if sizes[0] == sizes[1] or names != [node.name for node in second.nodes]:
        raise ConfigError(
            "a graph is resized from two captures at different sizes with the same "
            f"operators, got sizes {sizes} and {len(names)} and {len(second.nodes)} "
            "operators"
        )

    def at(a: int, b: int) -> int:
        slope, rest = divmod((b - a) * (size - sizes[0]), sizes[1] - sizes[0])
        if rest or a + slope < 0:
            raise ConfigError(
                f"a dimension that is {a} at {sizes[0]} and {b} at {sizes[1]} is no "
                f"whole number at {size}; capture at that size."
            )
        return a + slope

    def rows(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
        return tuple(at(x, y) for x, y in zip(a, b, strict=True))

    tensors: dict[int, TensorInfo] = {}
    storages = dict(first.storages)
    for one, other in zip(first.nodes, second.nodes, strict=True):
        for x, y in zip(
            (*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True
        ):
            a, b = first.tensors[x], second.tensors[y]
            tensors[x] = replace(
                a, shape=rows(a.shape, b.shape), stride=rows(a.stride, b.stride)
            )
            old = first.storages[a.storage]
            new = at(old.num_bytes, second.storages[b.storage].num_bytes)
            storages[a.storage] = replace(old, num_bytes=new)
    notes = {**first.notes, "resized": f"{sizes} to {size}"}
    return replace(first, tensors=tensors, storages=storages, notes=notes)


def replaced(
    graph: Graph,
    start: int,
    end: int,
    nodes: Sequence[Node],
    *,
    tensors: Mapping[int, TensorInfo] | None = None,
    storages: Mapping[int, Allocation] | None = None,
) -> Graph:
    """Other nodes, of tensors and storages of their own, in the place of nodes `start`
    to `end` (exclusive). Raises ConfigError: no such range, a number that the graph
    uses, or a later node reads what nobody makes any more."""
    if not 0 <= start <= end <= len(graph.nodes):
        raise ConfigError(
            f"replacing expects nodes of 0 to {len(graph.nodes)}, got {start} to {end}"
        )
    for what, new, old in (
        ("tensor", tensors or {}, graph.tensors),
        ("storage", storages or {}, graph.storages),
    ):
        if known := sorted(new.keys() & old.keys()):
            told = f"{what} {known[0]} is one of the graph's; number it anew"
            raise ConfigError(told)
    wider = replace(
        graph,
        nodes=(*graph.nodes[:start], *nodes, *graph.nodes[end:]),
        tensors={**graph.tensors, **(tensors or {})},
        storages={**graph.storages, **(storages or {})},
    )
    made = _made(graph, graph.nodes[start:end]) - _made(wider, nodes)
    made -= _made(graph, graph.nodes[:start])
    for index, node in enumerate(graph.nodes[end:], end):
        for number in node.inputs:
            if graph.tensors[number].storage in made:
                raise ConfigError(
                    f"node {index} ({node.name}) reads tensor {number}, which no node "
                    "makes any more; replace it as well, or make it"
                )
    return wider.with_nodes(wider.nodes)


def inserted(
    graph: Graph,
    at: int,
    nodes: Sequence[Node],
    *,
    tensors: Mapping[int, TensorInfo] | None = None,
    storages: Mapping[int, Allocation] | None = None,
) -> Graph:
    """More nodes before node `at`; see `replaced`."""
    return replaced(graph, at, at, nodes, tensors=tensors, storages=storages)


def removed(graph: Graph, start: int, end: int) -> Graph:
    """Without nodes `start` to `end` (exclusive); see `replaced`."""
    return replaced(graph, start, end, ())


def _made(graph: Graph, nodes: Iterable[Node]) -> set[int]:
    """Storages that nodes write, views apart."""
    written = (t for node in nodes if not node.is_view for t in node.outputs)
    return {graph.tensors[t].storage for t in written}


def parallelized(graph: Graph, start: int, end: int) -> Graph:
    """Nodes `start` to `end` (exclusive) on a second queue of kernels, until one reads
    what they make; each keeps its time, as where it leaves most of the device idle.
    Raises ConfigError: no such range of kernels."""
    if not 0 <= start < end <= len(graph.nodes):
        raise ConfigError(
            f"a branch expects nodes of 0 to {len(graph.nodes)}, got {start} to {end}"
        )
    branch = graph.nodes[start:end]
    other = [node for node in branch if node.stream is not Stream.COMPUTE]
    if other:
        raise ConfigError(
            f"a branch expects kernels, got {other[0].name} on {other[0].stream.value}"
        )
    beside = tuple(replace(node, stream=Stream.SIDE) for node in branch)
    return graph.with_nodes((*graph.nodes[:start], *beside, *graph.nodes[end:]))


def fused(graph: Graph, start: int, end: int, name: str = FUSED[0]) -> Graph:
    """Nodes `start` to `end` (exclusive) as one element-wise kernel; what only they
    read and write is not materialized."""
    if not 0 <= start < end <= len(graph.nodes):
        raise ConfigError(
            f"fusion expects nodes of 0 to {len(graph.nodes)}, got {start} to {end}"
        )
    inside = graph.nodes[start:end]
    made = {t for node in inside for t in node.outputs}
    later = {t for node in graph.nodes[end:] for t in node.inputs}
    lasting = {n for n, s in graph.storages.items() if s.dies == CALLER}
    kept = {
        graph.tensors[t].storage
        for t in made
        if t in later or graph.tensors[t].storage in lasting
    }
    # What is changed in place was there before and is read as well.
    own = {
        storage
        for storage in (graph.tensors[t].storage for t in made)
        if start <= graph.storages[storage].born < end
    }
    read = {t for node in inside for t in node.inputs}
    inputs = _largest(graph, (t for t in read if graph.tensors[t].storage not in own))
    outputs = _largest(graph, (t for t in made if graph.tensors[t].storage in kept))
    node = Node(name=name, phase=inside[0].phase, inputs=inputs, outputs=outputs)
    return graph.with_nodes((*graph.nodes[:start], node, *graph.nodes[end:]))


def _largest(graph: Graph, numbers: Iterable[int]) -> tuple[int, ...]:
    """Of every storage one tensor: a kernel reads, and writes, it once."""
    found: dict[int, int] = {}
    for number in sorted(numbers):
        storage, size = graph.tensors[number].storage, graph.tensors[number].num_bytes
        if storage not in found or size > graph.tensors[found[storage]].num_bytes:
            found[storage] = number
    return tuple(found.values())


def fused_pointwise(graph: Graph) -> Graph:
    """Element-wise nodes that follow on one another as one kernel each, as a compiler
    would join them; views between them do not part them."""
    for start, end in reversed(_chains(graph)):
        graph = fused(graph, start, end)
    return graph


def _chains(graph: Graph) -> list[tuple[int, int]]:
    """Ranges of two and more element-wise nodes, each of which reads what one before it
    in the range made."""
    found: list[tuple[int, int]] = []
    start, end, count = 0, 0, 0
    made: set[int] = set()
    for index, node in enumerate(graph.nodes):
        joins = (
            bool(made)
            and (node.is_view or is_pointwise(node))
            and node.phase is graph.nodes[start].phase
            and any(graph.tensors[t].storage in made for t in node.inputs)
        )
        if not joins:
            if count > 1:
                found.append((start, end))
            start, count, made = index, 0, set()
            if not is_pointwise(node):
                continue
        made |= {graph.tensors[t].storage for t in node.outputs}
        if not node.is_view:
            end, count = index + 1, count + 1
    if count > 1:
        found.append((start, end))
    return found
