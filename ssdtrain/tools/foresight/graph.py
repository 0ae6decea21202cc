"""An execution graph: the operators of one training step, with tensors and lifetimes.

[Note: execution graphs]
A node is an operator as a dispatch mode sees it: below autograd, above kernels. It
names its tensors by number; a tensor knows its storage, so views cost no memory and a
storage dies after the node that was the last to hold it in the captured step. The
order of nodes is the order in which the host runs them; `stream` says where their
kernels go.
In JSON the names of Chakra's execution traces are used where the concepts meet
(`id`, `name`, `type`, `data_deps`, `inputs` and `outputs` with `values`, `shapes` and
`types`; MLCommons Chakra schema 0.0.4).
(tests/ssdtrain/tools/foresight/test_graph.py)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import Format, Index, Natural, Unfit, load_json, write_json
from ssdtrain.tools.foresight.call import ELEMENT_BYTES
from ssdtrain.tools.foresight.overheads import StepPhase

CALLER = -1
"""Index of the node after which a storage dies that outlives the step."""


class Stream(str, Enum):
    """The queue that a node's work goes to."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY_OUT = "copy_out"
    COPY_IN = "copy_in"
    SSD_WRITE = "ssd_write"
    SSD_READ = "ssd_read"
    SIDE = "side"
    """A second queue of kernels; see `edits.parallelized`."""


NODE_TYPES: Mapping[Stream, str] = {
    **dict.fromkeys((Stream.COMPUTE, Stream.SIDE), "COMP_NODE"),
    Stream.COMMUNICATION: "COMM_COLL_NODE",
    **dict.fromkeys((Stream.COPY_OUT, Stream.SSD_WRITE), "MEM_STORE_NODE"),
    **dict.fromkeys((Stream.COPY_IN, Stream.SSD_READ), "MEM_LOAD_NODE"),
}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor: a view of a storage."""

    shape: tuple[int, ...]
    dtype: str
    """A key of `ELEMENT_BYTES`."""
    stride: tuple[int, ...]
    storage: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements; a broadcast one counts once a storage element."""
        sides = zip(self.shape, self.stride, strict=True)
        return prod(size for size, step in sides if step) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator. Inputs and outputs are numbers of tensors."""

    name: str
    """Such as `aten::mm`."""
    phase: StepPhase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stream: Stream = Stream.COMPUTE
    module: str = ""
    """Path of the module in whose forward it ran."""
    attr: Mapping[str, Any] = field(default_factory=dict)
    """What the operator was told next to tensors: `is_causal`, `dim`, `num_bytes`."""
    is_view: bool = False
    """It launches nothing."""
    waits_for_device: bool = False
    """The host needs its result (`aten::_local_scalar_dense`)."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Device memory and the nodes between which it lives."""

    num_bytes: Natural
    born: Index
    """Index of the node that made it; `CALLER`: it was there before the step."""
    dies: Index
    """Index of the last node that needed it; `CALLER`: it outlives the step."""
    is_parameter: bool = False


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One training step of one rank."""

    nodes: tuple[Node, ...]
    tensors: Mapping[int, TensorInfo]
    storages: Mapping[int, Allocation]
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            named = (*node.inputs, *node.outputs)
            if unknown := [t for t in named if t not in self.tensors]:
                raise ConfigError(
                    f"execution graph: node {index} ({node.name}) names tensors "
                    f"{unknown} that the graph does not hold"
                )
        for number, tensor in self.tensors.items():
            if tensor.storage not in self.storages:
                raise ConfigError(
                    f"execution graph: tensor {number} lies in storage "
                    f"{tensor.storage}, which the graph does not hold"
                )

    def with_nodes(self, nodes: Sequence[Node]) -> "Graph":
        """The same tensors under other nodes; lifetimes follow the new order."""
        return relive(replace(self, nodes=tuple(nodes)))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(s.num_bytes for s in self.storages.values() if s.is_parameter)


def relive(graph: Graph) -> Graph:
    """Births and deaths of storages from first and last mention, but for what outlived
    the captured step. Right where nodes were edited."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for number in (*node.inputs, *node.outputs):
            storage = graph.tensors[number].storage
            first.setdefault(storage, index)
            last[storage] = index
    storages = {
        number: replace(
            old,
            born=old.born if old.born == CALLER else first[number],
            dies=old.dies if old.dies == CALLER else last[number],
        )
        for number, old in graph.storages.items()
        if number in first or old.born == CALLER
    }
    used = {n for node in graph.nodes for n in (*node.inputs, *node.outputs)}
    tensors = {n: t for n, t in graph.tensors.items() if n in used}
    return replace(graph, tensors=tensors, storages=storages)


def data_dependencies(graph: Graph) -> list[tuple[int, ...]]:
    """For every node the indices of those whose results (or whose changes to a
    storage) it reads. A view writes nothing: who reads it waits for its storage."""
    writers: dict[int, int] = {}
    found = []
    for index, node in enumerate(graph.nodes):
        touched = {graph.tensors[number].storage for number in node.inputs}
        found.append(tuple(sorted({writers[s] for s in touched if s in writers})))
        for number in () if node.is_view else node.outputs:
            writers[graph.tensors[number].storage] = index
    return found


@dataclass(frozen=True, kw_only=True)
class _Values:
    """Tensors of a node in a file."""

    values: tuple[Natural, ...]
    shapes: tuple[tuple[Natural, ...], ...]
    types: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _NodeRow:
    """A node in a file, by Chakra's names."""

    id: Natural
    name: str
    type: str
    data_deps: tuple[Natural, ...]
    inputs: _Values
    outputs: _Values
    phase: StepPhase
    stream: Stream
    module: str
    is_view: bool
    waits_for_device: bool
    attr: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _TensorRow:
    """What every mention of a tensor shares."""

    storage: Natural
    stride: tuple[Natural, ...]


@dataclass(frozen=True, kw_only=True)
class _File:
    """A graph as its file holds it; numbers are keys, as JSON wants them."""

    nodes: tuple[_NodeRow, ...]
    tensors: Mapping[str, _TensorRow]
    storages: Mapping[str, Allocation]
    notes: Mapping[str, str]


SHARED = ("name", "phase", "stream", "module", "is_view", "waits_for_device")
"""Fields that a node and its row have alike."""
_FORMAT = Format(
    kind=_File,
    schema="ssdtrain-execution-graph",
    version=1,
    what="an execution graph",
    remedy="capture it again with `ssdtrain foresight capture`",
)


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Plain values. See [Note: execution graphs]."""
    nodes = tuple(
        _NodeRow(
            id=index,
            type=NODE_TYPES[node.stream],
            data_deps=deps,
            inputs=_values(graph, node.inputs),
            outputs=_values(graph, node.outputs),
            attr=node.attr,
            **{name: getattr(node, name) for name in SHARED},
        )
        for index, (node, deps) in enumerate(
            zip(graph.nodes, data_dependencies(graph), strict=True)
        )
    )
    tensors = {
        str(number): _TensorRow(storage=tensor.storage, stride=tensor.stride)
        for number, tensor in graph.tensors.items()
    }
    storages = {str(number): storage for number, storage in graph.storages.items()}
    file = _File(nodes=nodes, tensors=tensors, storages=storages, notes=graph.notes)
    return _FORMAT.to_json(file)


def _values(graph: Graph, numbers: Sequence[int]) -> _Values:
    tensors = [graph.tensors[number] for number in numbers]
    return _Values(
        values=tuple(numbers),
        shapes=tuple(tensor.shape for tensor in tensors),
        types=tuple(f"Tensor({tensor.dtype})" for tensor in tensors),
    )


def graph_from_json(values: object, source: str = "") -> Graph:
    """Build a `Graph` from what `graph_to_json` made. Raises DamagedFileError: another
    schema or version, or a wrong field."""
    file = _FORMAT.from_json(values, source)
    try:
        return _graph(file)
    except Unfit as error:
        what = _FORMAT.what
        raise error.of_file(source or what, what, _FORMAT.remedy) from None


def _graph(file: _File) -> Graph:
    tensors: dict[int, TensorInfo] = {}
    storages = {int(number): storage for number, storage in file.storages.items()}
    nodes = []
    for index, row in enumerate(file.nodes):
        for side in (row.inputs, row.outputs):
            if not len(side.values) == len(side.shapes) == len(side.types):
                raise Unfit(f"nodes[{index}]", "as many shapes as values", side)
            rows = zip(side.values, side.shapes, side.types, strict=True)
            for number, shape, kind in rows:
                tensors[number] = _tensor(file, number, shape, kind)
        shared: dict[str, Any] = {name: getattr(row, name) for name in SHARED}
        shared |= {"inputs": row.inputs.values, "outputs": row.outputs.values}
        nodes.append(Node(**shared, attr=dict(row.attr)))
    last = len(nodes)
    for number, storage in storages.items():
        if not (CALLER <= storage.born < last and CALLER <= storage.dies < last):
            raise Unfit(f"storages.{number}", "births and deaths at nodes", storage)
    try:
        return Graph(
            nodes=tuple(nodes), tensors=tensors, storages=storages, notes=file.notes
        )
    except ConfigError as error:
        raise Unfit("tensors", "every tensor in a storage", str(error)) from error


def _tensor(file: _File, number: int, shape: tuple[int, ...], kind: str) -> TensorInfo:
    row = file.tensors.get(str(number))
    if row is None:
        raise Unfit("tensors", f"tensor {number}, which a node names", None)
    dtype = kind.removeprefix("Tensor(").removesuffix(")")
    if dtype not in ELEMENT_BYTES:
        raise Unfit("types", " or ".join(ELEMENT_BYTES), dtype)
    if len(row.stride) != len(shape):
        raise Unfit(f"tensors.{number}.stride", f"{len(shape)} strides", row.stride)
    return TensorInfo(shape=shape, dtype=dtype, stride=row.stride, storage=row.storage)


def read_graph(path: str | Path) -> Graph:
    """Read a graph. Raises OSError: the file cannot be read; DamagedFileError: it is no
    execution graph of this version."""
    return graph_from_json(load_json(path, _FORMAT.what, _FORMAT.remedy), str(path))


def write_graph(path: str | Path, graph: Graph) -> None:
    """Write a graph, whole or not at all. Raises OSError: it cannot be written."""
    write_json(path, graph_to_json(graph))
