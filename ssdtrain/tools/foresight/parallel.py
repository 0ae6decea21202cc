"""A graph of one rank as one of several: what DDP and FSDP add to a step.

[Note: what ranks add]
Next to the collectives there are kernels: DistributedDataParallel copies every gradient
into its bucket and, when all are reduced, back; `fully_shard` packs its shards, copies
what was gathered into the parameters, and packs the gradients. Its gathers are asked
for one unit ahead in backward. The host of `fully_shard` is busy with every weight, not
only with kernels: `SHARDED_VIEWS`. A bucket closes when it is full; the first one is
small, so that communication starts early. Compared with what torch does on real ranks.
(tests/ssdtrain/tools/foresight/test_real_ranks.py)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.call import ELEMENT_BYTES
from ssdtrain.tools.foresight.collectives import Collective
from ssdtrain.tools.foresight.graph import (
    CALLER,
    Allocation,
    Graph,
    Node,
    Stream,
    TensorInfo,
    relive,
)
from ssdtrain.tools.foresight.overheads import StepPhase

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""Of gradients that DistributedDataParallel reduces together."""
COMM = Stream.COMMUNICATION


class Views(NamedTuple):
    """Host time that sharding adds, in views' worth."""

    unit: float
    weight: float


# Measured on a CPU: host time of steps with and without `fully_shard`, over a view's.
SHARDED_VIEWS: Mapping[StepPhase, Views] = {
    StepPhase.FORWARD: Views(unit=87.0, weight=5.7),
    StepPhase.BACKWARD: Views(unit=103.0, weight=9.3),
    StepPhase.UPDATE: Views(unit=0.0, weight=5.3),
}
COUNTED: Mapping[str, float] = {"host_views": 0.0}
"""Of what the host does for a gather: it is in `SHARDED_VIEWS` already."""


def data_parallel(
    graph: Graph,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> Graph:
    """All-reduces of the gradients in buckets, in the order backward makes them. See
    [Note: what ranks add]. Raises ConfigError: the graph has no optimizer's update."""
    draft = _Draft(graph)
    last = gradients(graph)
    limit = first_bucket_bytes
    filled: list[int] = []
    reduced: list[Node] = []
    for storage in sorted(last, key=last.__getitem__):
        filled.append(storage)
        sizes = [graph.storages[s].num_bytes for s in filled]
        if sum(sizes) >= limit:
            reduced += draft.bucket(filled, last)
            filled, limit = [], bucket_bytes
    if filled:
        reduced += draft.bucket(filled, last)
    draft.behind.setdefault(max(last.values()), []).extend(reduced)
    return draft.graph()


def gradients(graph: Graph) -> dict[int, int]:
    """Storages that the update reads and backward made, by their last writer. Raises
    ConfigError: the graph has no optimizer's update, which names the gradients."""
    read = {
        graph.tensors[n].storage
        for node in graph.nodes
        if node.phase is StepPhase.UPDATE
        for n in node.inputs
    }
    last: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        if node.phase is StepPhase.BACKWARD:
            for number in node.outputs:
                storage = graph.tensors[number].storage
                if storage in read and not graph.storages[storage].is_parameter:
                    last[storage] = index
    if not last:
        raise ConfigError(
            "data parallelism needs the optimizer's update in the graph; capture it "
            "with an optimizer."
        )
    return last


@dataclass
class _Unit:
    """Weights that are gathered together."""

    name: str
    weights: list[int]
    """Numbers of tensors, one a storage."""
    num_bytes: int
    forward: int
    """Index of the first node that reads one in forward; backward as above."""
    backward: int | None


def fully_sharded(graph: Graph, num_ranks: int, unit_of: Callable[[str], str]) -> Graph:
    """Weights gathered before each unit's forward and backward, gradients
    reduce-scattered, every rank updating its share (FSDP, ZeRO-3). `unit_of` gives a
    module's unit; the empty one is the root, gathered until backward. See [Note: what
    ranks add]. Raises ConfigError: no optimizer's update."""
    draft = _Draft(graph)
    units = _units(graph, unit_of)
    for unit in units:
        draft.gather(unit, unit.forward, unit.forward, num_ranks)
    again = [unit for unit in units if unit.name and unit.backward is not None]
    again.sort(key=lambda unit: unit.backward or 0)
    first = next(i for i, n in enumerate(graph.nodes) if n.phase is StepPhase.BACKWARD)
    # After the gradient of the loss itself.
    starts = [first + 1, *(unit.backward or 0 for unit in again)]
    for unit, (ahead, use) in zip(again, pairwise(starts), strict=True):
        draft.gather(unit, ahead, use, num_ranks)
    owner = {graph.tensors[n].storage: unit for unit in units for n in unit.weights}
    by_unit: dict[str, list[int]] = {}
    last = gradients(graph)
    for weight, gradient in _updated(graph, last):
        if weight in owner:
            by_unit.setdefault(owner[weight].name, []).append(gradient)
    for name, owned in by_unit.items():
        draft.scatter(name, owned, last)
    for index, node in enumerate(graph.nodes):
        if node.phase is StepPhase.UPDATE:
            count = int(node.attr.get("tensors", 0))
            views = float(node.attr.get("host_views", 0.0))
            views += SHARDED_VIEWS[StepPhase.UPDATE].weight * count
            more = {"shards": num_ranks, "host_views": views}
            draft.changed[index] = replace(node, attr={**node.attr, **more})
    return draft.graph()


def unit_of(path: str) -> str:
    """The layer of a list that a module belongs to; everything else is the root."""
    words = path.split(".")
    for at, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: at + 1])
    return ""


def unit_bytes(graph: Graph, unit_of: Callable[[str], str]) -> dict[str, int]:
    """Return the bytes of each unit's weights."""
    return {unit.name: unit.num_bytes for unit in _units(graph, unit_of)}


def _units(graph: Graph, unit_of: Callable[[str], str]) -> list[_Unit]:
    """In the order of their forward."""
    units: dict[str, _Unit] = {}
    unit_of_storage: dict[int, str] = {}
    for index, node in enumerate(graph.nodes):
        for number in node.inputs:
            storage = graph.tensors[number].storage
            if not graph.storages[storage].is_parameter:
                continue
            if node.phase is StepPhase.FORWARD and storage not in unit_of_storage:
                name = unit_of_storage[storage] = unit_of(node.module)
                unit = units.setdefault(name, _Unit(name, [], 0, index, None))
                unit.weights.append(number)
                unit.num_bytes += graph.storages[storage].num_bytes
            elif node.phase is StepPhase.BACKWARD and storage in unit_of_storage:
                unit = units[unit_of_storage[storage]]
                if unit.backward is None:
                    unit.backward = index
    return list(units.values())


def _updated(graph: Graph, last: dict[int, int]) -> list[tuple[int, int]]:
    """(storage of the weight, storage of its gradient) of every update."""
    found: list[tuple[int, int]] = []
    for node in graph.nodes:
        if node.phase is not StepPhase.UPDATE:
            continue
        weight = CALLER
        for number in node.inputs:
            storage = graph.tensors[number].storage
            if graph.storages[storage].is_parameter:
                weight = storage
            elif storage in last:
                found.append((weight, storage))
    return found


class _Draft:
    """A graph to which nodes are added before and after others."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._tensors = dict(graph.tensors)
        self._storages = dict(graph.storages)
        self._any_of: dict[int, int] = {}
        for number, tensor in graph.tensors.items():
            known = self._any_of.setdefault(tensor.storage, number)
            if tensor.elements > graph.tensors[known].elements:
                self._any_of[tensor.storage] = number
        self._num_groups = 0
        self.before: dict[int, list[Node]] = {}
        self.behind: dict[int, list[Node]] = {}
        self.changed: dict[int, Node] = {}

    def graph(self) -> Graph:
        """With everything that was added."""
        nodes: list[Node] = []
        for index, node in enumerate(self._graph.nodes):
            nodes += self.before.get(index, [])
            nodes.append(self.changed.get(index, node))
            nodes += self.behind.get(index, [])
        draft = replace(self._graph, tensors=self._tensors, storages=self._storages)
        return relive(replace(draft, nodes=tuple(nodes)))

    def _buffer(self, num_bytes: int, dtype: str, *, lasts: bool = False) -> int:
        """A tensor of its own; `lasts`: it is there before the step and after it."""
        storage, number = max(self._storages) + 1, max(self._tensors) + 1
        at = CALLER if lasts else 0
        self._storages[storage] = Allocation(num_bytes=num_bytes, born=at, dies=at)
        shape = (num_bytes // ELEMENT_BYTES[dtype],)
        self._tensors[number] = TensorInfo(
            shape=shape, dtype=dtype, stride=(1,), storage=storage
        )
        return number

    def _collective(
        self,
        kind: Collective,
        phase: StepPhase,
        read: int,
        written: int,
        num_bytes: int,
    ) -> Node:
        self._num_groups += 1
        attr = {"num_bytes": num_bytes, "collective": kind.value}
        return Node(
            name=f"c10d::{kind.value}",
            phase=phase,
            inputs=(read,),
            outputs=(written,),
            stream=COMM,
            attr={**attr, "group": f"{kind.value}/{self._num_groups}"},
        )

    def bucket(self, storages: Sequence[int], last: dict[int, int]) -> list[Node]:
        """Gradients into a bucket, reduced after the last; gives the copies back."""
        size = sum(self._storages[s].num_bytes for s in storages)
        tensors = [self._any_of[s] for s in storages]
        bucket = self._buffer(size, self._tensors[tensors[0]].dtype, lasts=True)
        back: list[Node] = []
        for number in tensors:
            part = max(self._tensors) + 1
            own = self._tensors[bucket].storage
            self._tensors[part] = replace(self._tensors[number], storage=own)
            into = Node(
                name="aten::copy_",
                phase=StepPhase.BACKWARD,
                inputs=(number,),
                outputs=(part,),
            )
            storage = self._tensors[number].storage
            self.behind.setdefault(last[storage], []).append(into)
            back.append(replace(into, inputs=(part,), outputs=(number,)))
        kind = Collective.ALL_REDUCE
        reduced = self._collective(kind, StepPhase.BACKWARD, bucket, bucket, size)
        self.behind[last[storages[-1]]].append(reduced)
        return back

    def gather(self, unit: _Unit, ahead: int, use: int, num_ranks: int) -> None:
        """A unit's weights: asked for before node `ahead`, copied before node `use`."""
        phase = self._graph.nodes[use].phase
        views = SHARDED_VIEWS[phase]
        host = {"host_views": views.unit + views.weight * len(unit.weights)}
        dtype = self._tensors[unit.weights[0]].dtype
        shard = self._buffer(unit.num_bytes // num_ranks, dtype)
        whole = self._buffer(unit.num_bytes, dtype)
        pack = Node(
            name="fsdp::all_gather_copy_in",
            phase=phase,
            inputs=(),
            outputs=(shard,),
            stream=COMM,
            attr=host,
        )
        kind = Collective.ALL_GATHER
        gathered = self._collective(kind, phase, shard, whole, unit.num_bytes)
        gathered = replace(gathered, attr={**gathered.attr, **COUNTED})
        unpack = Node(
            name="fsdp::split_with_sizes_copy",
            phase=phase,
            inputs=(whole,),
            outputs=tuple(unit.weights),
            attr=COUNTED,
        )
        self.before.setdefault(ahead, []).extend((pack, gathered))
        self.before.setdefault(use, []).append(unpack)

    def scatter(self, name: str, storages: list[int], last: dict[int, int]) -> None:
        """A unit's gradients: packed and reduce-scattered after the last."""
        size = sum(self._storages[s].num_bytes for s in storages)
        tensors = tuple(self._any_of[s] for s in storages)
        packed = self._buffer(size, self._tensors[tensors[0]].dtype)
        pack = Node(
            name="fsdp::chunk_cat",
            phase=StepPhase.BACKWARD,
            inputs=tensors,
            outputs=(packed,),
            stream=COMM,
            attr=COUNTED,
        )
        kind = Collective.REDUCE_SCATTER
        reduced = self._collective(kind, StepPhase.BACKWARD, packed, tensors[0], size)
        reduced = replace(reduced, attr={**reduced.attr, **COUNTED})
        # The root's are reduced when all of backward has run.
        at = max(last.values()) if not name else max(last[s] for s in storages)
        self.behind.setdefault(at, []).extend((pack, reduced))
