"""Edits of execution graphs: other sizes or types, other nodes, copies, recomputation.

What several ranks add is in `parallel.py`. Every edit gives a new graph; none needs the
model again. Lifetimes of storages follow the edited order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.call import ELEMENT_BYTES
from ssdtrain.tools.foresight.graph import (
    CALLER,
    Graph,
    Node,
    Storage,
    Stream,
    TensorInfo,
)
from ssdtrain.tools.foresight.lowering import FUSED, is_pointwise
from ssdtrain.tools.foresight.overheads import Phase


def resized(first: Graph, second: Graph, sizes: tuple[int, int], size: int) -> Graph:
    """The graph at another batch, or length, from two that were captured.

    Every dimension and every storage is linear in the size, as two captures show.

    Args:
        first: captured at `sizes[0]`.
        second: captured at `sizes[1]`; the same operators.
        sizes: of what changes (samples, tokens).
        size: the size that is asked for.

    Raises:
        ConfigError: the captures differ in more than sizes, or a dimension would be no
            whole number.
    """
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


def with_dtype(graph: Graph, before: str, after: str) -> Graph:
    """Every tensor of one element type in another."""
    if before not in ELEMENT_BYTES or after not in ELEMENT_BYTES:
        raise ConfigError(f"element types: expects {', '.join(ELEMENT_BYTES)}")
    changed = {t.storage for t in graph.tensors.values() if t.dtype == before}
    factor = ELEMENT_BYTES[after] / ELEMENT_BYTES[before]
    tensors = {
        number: replace(t, dtype=after) if t.dtype == before else t
        for number, t in graph.tensors.items()
    }
    storages = {
        number: replace(s, num_bytes=round(s.num_bytes * factor))
        if number in changed
        else s
        for number, s in graph.storages.items()
    }
    return replace(graph, tensors=tensors, storages=storages)


def replaced(
    graph: Graph,
    start: int,
    end: int,
    nodes: Sequence[Node],
    *,
    tensors: Mapping[int, TensorInfo] | None = None,
    storages: Mapping[int, Storage] | None = None,
) -> Graph:
    """Other nodes in the place of nodes `start` to `end` (exclusive).

    Args:
        graph: any.
        start: the first node that goes; with `end == start` none does.
        end: the node behind the last one that goes.
        nodes: what comes there instead.
        tensors: that they name and the graph does not hold.
        storages: likewise; births and deaths follow the new order.

    Raises:
        ConfigError: no such range, a tensor or storage under a number that the graph
            uses, or a later node reads what nobody makes any more.
    """
    if not 0 <= start <= end <= len(graph.nodes):
        raise ConfigError(
            f"replacing expects nodes of 0 to {len(graph.nodes)}, got {start} to {end}"
        )
    for what, new, old in (
        ("tensor", tensors or {}, graph.tensors),
        ("storage", storages or {}, graph.storages),
    ):
        known = sorted(new.keys() & old.keys())
        if known:
            raise ConfigError(
                f"{what} {known[0]} is one of the graph's; number it anew"
            )
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
    storages: Mapping[int, Storage] | None = None,
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
    """Nodes `start` to `end` (exclusive) on a second queue of kernels.

    They run beside the nodes behind them until one of those reads what they make, as
    branches of a network on streams of their own do. Every kernel keeps its time, which
    is right where each leaves most of the device idle.

    Raises:
        ConfigError: no such range, or one that holds other work than kernels.
    """
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
    """Nodes `start` to `end` (exclusive) as one element-wise kernel.

    What only they read and write between them is not materialized.
    """
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


def split_product(graph: Graph, index: int, parts: int) -> Graph:
    """One matrix product as `parts` products of its rows."""
    if not 0 <= index < len(graph.nodes) or parts < 1:
        raise ConfigError(
            f"splitting expects one of {len(graph.nodes)} nodes and 1 part or more, "
            f"got node {index} and {parts} parts"
        )
    node = graph.nodes[index]
    shape = graph.tensors[node.outputs[0]].shape if node.outputs else ()
    if not node.name.endswith("mm") or shape[-2] % parts:
        raise ConfigError(
            f"splitting expects a matrix product with rows in multiples of {parts}, "
            f"got {node.name} of {shape}"
        )
    out = graph.tensors[node.outputs[0]]
    a = node.inputs[-2]
    tensors = dict(graph.tensors)
    pieces = []
    for _ in range(parts):
        first, result = len(tensors), len(tensors) + 1
        while first in tensors or result in tensors:
            first, result = first + 1, result + 1
        tensors[first] = _rows_part(graph.tensors[a], parts)
        tensors[result] = _rows_part(out, parts)
        inputs = (*node.inputs[:-2], first, node.inputs[-1])
        pieces.append(replace(node, inputs=inputs, outputs=(result,)))
    nodes = (*graph.nodes[:index], *pieces, *graph.nodes[index + 1 :])
    return replace(graph, tensors=tensors).with_nodes(nodes)


def _rows_part(tensor: TensorInfo, parts: int) -> TensorInfo:
    shape = list(tensor.shape)
    shape[-2] //= parts
    return replace(tensor, shape=tuple(shape))


def _first_backward(graph: Graph, storage: int) -> int:
    for index, node in enumerate(graph.nodes):
        if node.phase is Phase.BACKWARD and _mentions(graph, node, storage):
            return index
    raise ConfigError(f"backward never reads storage {storage}")


def _last_forward(graph: Graph, storage: int) -> int:
    found = [
        index
        for index, node in enumerate(graph.nodes)
        if node.phase is Phase.FORWARD and _mentions(graph, node, storage)
    ]
    if not found:
        raise ConfigError(f"forward never mentions storage {storage}")
    return found[-1]


def _mentions(graph: Graph, node: Node, storage: int) -> bool:
    return any(
        graph.tensors[n].storage == storage for n in (*node.inputs, *node.outputs)
    )


def _with_storage(graph: Graph, storage: int) -> tuple[Graph, int, dict[int, int]]:
    """A second storage like one that is there; its tensors by those of the first."""
    new = max(graph.storages) + 1
    storages = {**graph.storages, new: replace(graph.storages[storage], born=0, dies=0)}
    tensors = dict(graph.tensors)
    twins: dict[int, int] = {}
    for number, tensor in graph.tensors.items():
        if tensor.storage == storage:
            twins[number] = max(tensors) + 1
            tensors[twins[number]] = replace(tensor, storage=new)
    return replace(graph, tensors=tensors, storages=storages), new, twins


def _with_host_copy(graph: Graph) -> tuple[Graph, int]:
    """A tensor that takes no device memory: what a copy out leaves on the host."""
    storage, number = max(graph.storages) + 1, max(graph.tensors) + 1
    info = TensorInfo(shape=(0,), dtype="int8", stride=(1,), storage=storage)
    storages = {**graph.storages, storage: Storage(num_bytes=0, born=0, dies=0)}
    tensors = {**graph.tensors, number: info}
    return replace(graph, tensors=tensors, storages=storages), number


def _swapped(node: Node, twins: dict[int, int]) -> Node:
    return replace(
        node,
        inputs=tuple(twins.get(n, n) for n in node.inputs),
        outputs=tuple(twins.get(n, n) for n in node.outputs),
    )


def moved(graph: Graph, storage: int, *, lead: int = 0) -> Graph:
    """A saved tensor copied out behind its last use in forward, and back before its
    first in backward.

    Args:
        graph: of a whole step.
        storage: what is moved.
        lead: how many nodes ahead of that use the copy back is launched.

    Raises:
        ConfigError: forward or backward does not touch the storage, it outlives the
            step (moving it frees nothing), or `lead` is below 0.
    """
    if lead < 0:
        raise ConfigError(f"lead: expects 0 or more nodes, got {lead}")
    if storage in graph.storages and graph.storages[storage].dies == CALLER:
        raise ConfigError(f"storage {storage} outlives the step: moving frees nothing")
    out_at = _last_forward(graph, storage) + 1
    back_at = _first_backward(graph, storage)
    size = graph.storages[storage].num_bytes
    graph, _new, twins = _with_storage(graph, storage)
    some = next(iter(twins))
    graph, outside = _with_host_copy(graph)
    out = Node(
        name="copy_out",
        phase=Phase.FORWARD,
        inputs=(some,),
        outputs=(outside,),
        stream=Stream.COPY_OUT,
        attr={"num_bytes": size},
    )
    back = Node(
        name="copy_in",
        phase=Phase.BACKWARD,
        inputs=(outside,),
        outputs=(twins[some],),
        stream=Stream.COPY_IN,
        attr={"num_bytes": size},
    )
    at = max(out_at, back_at - lead)
    nodes = (
        *graph.nodes[:out_at],
        out,
        *graph.nodes[out_at:at],
        back,
        *(_swapped(node, twins) for node in graph.nodes[at:]),
    )
    return graph.with_nodes(nodes)


def recomputed(graph: Graph, storage: int) -> Graph:
    """A saved tensor rebuilt before its first use in backward by the node that made
    it, whose inputs then live until there.

    Raises:
        ConfigError: backward does not read the storage, no operator made it, or another
            one has changed it since.
    """
    back_at = _first_backward(graph, storage)
    maker = graph.storages[storage].born
    if maker == CALLER:
        raise ConfigError(f"storage {storage} was there before the step")
    for node in graph.nodes[maker + 1 : back_at]:
        if not node.is_view and storage in {
            graph.tensors[t].storage for t in node.outputs
        }:
            raise ConfigError(
                f"storage {storage} is changed by {node.name} behind "
                f"{graph.nodes[maker].name}, which made it: one of them alone does not "
                "rebuild it"
            )
    graph, _new, twins = _with_storage(graph, storage)
    again = replace(_swapped(graph.nodes[maker], twins), phase=Phase.BACKWARD)
    nodes = (
        *graph.nodes[:back_at],
        again,
        *(_swapped(node, twins) for node in graph.nodes[back_at:]),
    )
    return graph.with_nodes(nodes)


def saved_storages(graph: Graph) -> list[int]:
    """Storages that forward makes and backward reads, largest first."""
    made = {
        number
        for number, s in graph.storages.items()
        if s.born != CALLER and graph.nodes[s.born].phase is Phase.FORWARD
    }
    read = {
        graph.tensors[n].storage
        for node in graph.nodes
        if node.phase is Phase.BACKWARD
        for n in node.inputs
    }
    found = made & read
    return sorted(found, key=lambda s: -graph.storages[s].num_bytes)
