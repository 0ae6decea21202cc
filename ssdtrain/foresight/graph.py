"""An execution graph: the operators of one training step, with tensors and lifetimes.

[Note: execution graphs]
A node is an operator as a dispatch mode sees it: below autograd, above kernels. It names
its tensors by number; a tensor knows its storage, so views cost no memory and a storage
dies behind the node that was the last to hold it in the captured step. The order of
nodes is the order in which the host runs them; `stream` says where their kernels go.
In JSON the names of Chakra's execution traces are used where the concepts meet
(`id`, `name`, `type`, `data_deps`, `inputs` and `outputs` with `values`, `shapes` and
`types`; MLCommons Chakra schema 0.0.4), and everything else lies in `attr`.
(tests/ssdtrain/foresight/test_graph.py)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.foresight.call import ELEMENT_BYTES
from ssdtrain.foresight.overheads import Phase

SCHEMA = "ssdtrain-execution-graph"
SCHEMA_VERSION = 1
CALLER = -1
"""Index of the node behind which a storage dies that outlives the step."""


class Stream(str, Enum):
    """The queue that a node's work goes to."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY_OUT = "copy_out"
    COPY_IN = "copy_in"
    SSD_WRITE = "ssd_write"
    SSD_READ = "ssd_read"


NODE_TYPES: Mapping[Stream, str] = {
    Stream.COMPUTE: "COMP_NODE",
    Stream.COMMUNICATION: "COMM_COLL_NODE",
    Stream.COPY_OUT: "MEM_STORE_NODE",
    Stream.COPY_IN: "MEM_LOAD_NODE",
    Stream.SSD_WRITE: "MEM_STORE_NODE",
    Stream.SSD_READ: "MEM_LOAD_NODE",
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
        spans = [
            size for size, step in zip(self.shape, self.stride, strict=True) if step
        ]
        return prod(spans) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator. Inputs and outputs are numbers of tensors."""

    name: str
    """Such as `aten::mm`."""
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stream: Stream = Stream.COMPUTE
    module: str = ""
    """Path of the module in whose forward it ran."""
    attr: Mapping[str, Any] = field(default_factory=dict)
    """What the operator was told beside tensors: `is_causal`, `dim`, `num_bytes`."""
    is_view: bool = False
    """It launches nothing."""
    waits_for_device: bool = False
    """The host needs its result (`aten::_local_scalar_dense`)."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Device memory and the nodes between which it lives."""

    num_bytes: int
    born: int
    """Index of the node that made it; `CALLER`: it was there before the step."""
    dies: int
    """Index of the last node that needed it; `CALLER`: it outlives the step."""
    is_parameter: bool = False


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One training step of one rank."""

    nodes: tuple[Node, ...]
    tensors: Mapping[int, TensorInfo]
    storages: Mapping[int, Storage]
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            unknown = [t for t in (*node.inputs, *node.outputs) if t not in self.tensors]
            if unknown:
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
    """Births and deaths of storages from first and last mention.

    A storage that outlived the captured step does so still. Right where nodes were
    edited; a captured graph also knows what Python held for longer.
    """
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
    storage) it reads."""
    writers: dict[int, int] = {}
    found = []
    for index, node in enumerate(graph.nodes):
        touched = {graph.tensors[number].storage for number in node.inputs}
        found.append(tuple(sorted({writers[s] for s in touched if s in writers})))
        for number in node.outputs:
            writers[graph.tensors[number].storage] = index
    return found


def to_json(graph: Graph) -> dict[str, Any]:
    """Plain values. See [Note: execution graphs]."""
    nodes = []
    for index, (node, deps) in enumerate(
        zip(graph.nodes, data_dependencies(graph), strict=True)
    ):
        nodes.append(
            {
                "id": index,
                "name": node.name,
                "type": NODE_TYPES[node.stream],
                "data_deps": list(deps),
                "inputs": _values(graph, node.inputs),
                "outputs": _values(graph, node.outputs),
                "attr": {
                    **node.attr,
                    "phase": node.phase.value,
                    "stream": node.stream.value,
                    "module": node.module,
                    "is_view": node.is_view,
                    "waits_for_device": node.waits_for_device,
                },
            }
        )
    tensors = {
        str(number): [tensor.storage, list(tensor.stride)]
        for number, tensor in graph.tensors.items()
    }
    storages = {
        str(number): [s.num_bytes, s.born, s.dies, s.is_parameter]
        for number, s in graph.storages.items()
    }
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "nodes": nodes,
        "tensors": tensors,
        "storages": storages,
        "notes": dict(graph.notes),
    }


def _values(graph: Graph, numbers: Sequence[int]) -> dict[str, Any]:
    tensors = [graph.tensors[number] for number in numbers]
    return {
        "values": list(numbers),
        "shapes": [list(tensor.shape) for tensor in tensors],
        "types": [f"Tensor({tensor.dtype})" for tensor in tensors],
    }


OWN_ATTR = ("phase", "stream", "module", "is_view", "waits_for_device")


def from_json(values: Mapping[str, Any]) -> Graph:
    """Build a `Graph` from what `to_json` made.

    Raises:
        ConfigError: another schema or version, or a field that is missing or wrong.
    """
    found = (values.get("schema"), values.get("schema_version"))
    if found != (SCHEMA, SCHEMA_VERSION):
        raise ConfigError(
            f"an execution graph has schema {SCHEMA!r} version {SCHEMA_VERSION}, got "
            f"{found[0]!r} version {found[1]!r}; capture it again with "
            "`ssdtrain foresight capture`."
        )
    try:
        return _graph(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the execution graph is damaged ({type(error).__name__}: {error}); "
            "capture it again."
        ) from error


def _graph(values: Mapping[str, Any]) -> Graph:
    tensors: dict[int, TensorInfo] = {}
    nodes = []
    for row in values["nodes"]:
        for side in (row["inputs"], row["outputs"]):
            for number, shape, kind in zip(
                side["values"], side["shapes"], side["types"], strict=True
            ):
                storage, stride = values["tensors"][str(number)]
                tensors[number] = TensorInfo(
                    shape=tuple(shape),
                    dtype=kind.removeprefix("Tensor(").removesuffix(")"),
                    stride=tuple(stride),
                    storage=storage,
                )
        attr = row["attr"]
        nodes.append(
            Node(
                name=row["name"],
                phase=Phase(attr["phase"]),
                inputs=tuple(row["inputs"]["values"]),
                outputs=tuple(row["outputs"]["values"]),
                stream=Stream(attr["stream"]),
                module=attr["module"],
                attr={k: v for k, v in attr.items() if k not in OWN_ATTR},
                is_view=attr["is_view"],
                waits_for_device=attr["waits_for_device"],
            )
        )
    storages = {
        int(number): Storage(num_bytes=size, born=born, dies=dies, is_parameter=own)
        for number, (size, born, dies, own) in values["storages"].items()
    }
    return Graph(
        nodes=tuple(nodes),
        tensors=tensors,
        storages=storages,
        notes=dict(values["notes"]),
    )


def read_graph(path: str | Path) -> Graph:
    """Read a graph.

    Raises:
        OSError: the file cannot be read.
        ConfigError: it is no execution graph of this version.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not a graph")
    return from_json(values)
