"""A step over several ranks, one of which may be slower; of those that do the same, the
first and the slowest are simulated."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.collectives import Collective, Network
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.foresight.graph import CALLER, Graph, Stream
from ssdtrain.tools.foresight.memory import estimate_peak
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.parallel import (
    data_parallel,
    fully_sharded,
    gradients,
    unit_bytes,
    unit_of,
)
from ssdtrain.tools.foresight.pipeline import ChunkTimes, pipeline_tasks
from ssdtrain.tools.foresight.price import (
    PricedRank,
    estimate_step,
    price,
    slowed,
    steady_us,
)
from ssdtrain.tools.foresight.simulate import Task, simulate_ranks
from ssdtrain.tools.foresight.wires import Wires

GATHERED_UNITS = 2
"""Units whose weights `fully_shard` holds whole at once."""


class Spread(str, Enum):
    """How a step is spread over ranks."""

    DDP = "ddp"
    """Every rank has the whole model and its own samples."""
    FSDP = "fsdp"
    """The same, with weights, gradients and optimizer sharded."""
    PIPELINE = "pipeline"
    """Every rank has some of the layers."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Ranks, and what each of them has."""

    spread: Spread = Spread.DDP
    num_ranks: int
    slower: float = 1.0
    """By which factor one rank's kernels are slower."""
    num_micro_batches: int = 1
    """Of a step; pipelines only."""
    num_chunks: int = 1
    """Of a rank's layers, interleaved; pipelines only."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_micro_batches < 1 or self.num_chunks < 1:
            raise ConfigError(
                "ranks, micro-batches and chunks expect 1 or more, got "
                f"{self.num_ranks}, {self.num_micro_batches}, {self.num_chunks}"
            )
        if not 1.0 <= self.slower < math.inf:
            raise ConfigError(f"a slower rank expects 1 or more, got {self.slower}")


@dataclass(frozen=True, kw_only=True)
class RanksEstimate:
    """A predicted step of all ranks."""

    step_us: float
    alone_us: float
    """The same step of one rank, without the others."""
    communication_us: float
    """Of one rank's collectives or sends, hidden or not."""
    peak_bytes: int | None = None
    """Device memory of one rank; None: not known (a pipeline's, captured ranks')."""


def estimate_ranks(
    graph: Graph, device: DeviceCosts, fabric: Network, layout: RankLayout
) -> RanksEstimate:
    """The steady state of all ranks, at the clock that the power limit allows (a
    pipeline: the highest). `graph`: one rank's step, or a pipeline's whole model for
    one micro-batch."""
    alone = price(graph, device).tasks
    if layout.spread is Spread.PIPELINE:
        return _pipeline(graph, alone, fabric, layout)
    if layout.spread is Spread.DDP:
        spread = data_parallel(graph)
        peak = estimate_peak(spread, device.context_bytes).peak_bytes
    else:
        spread = fully_sharded(graph, layout.num_ranks, unit_of)
        peak = sharded_peak(graph, layout.num_ranks, device.context_bytes)
    wires = Wires(fabric=fabric, num_ranks=layout.num_ranks)
    [tasks] = _at_their_clocks([price(spread, device, wires)], device, wires)
    slow = [
        replace(task, device_us=layout.slower * task.device_us)
        if task.stream is Stream.COMPUTE
        else task
        for task in tasks
    ]
    ranks = (tasks, slow) if layout.slower > 1.0 else (tasks,)
    return RanksEstimate(
        step_us=steady_us(*ranks, wires=wires),
        alone_us=steady_us(alone),
        communication_us=_moved_us(tasks),
        peak_bytes=peak,
    )


def sharded_peak(graph: Graph, num_ranks: int, context_bytes: int) -> int:
    """Return the peak of one rank under FSDP: its share of weights, gradients and
    optimizer, and the whole weights of the root and some units. Raises ConfigError: the
    graph has no optimizer's update."""
    updated = {
        graph.tensors[number].storage
        for node in graph.nodes
        if node.phase is StepPhase.UPDATE
        for number in (*node.inputs, *node.outputs)
    }
    states = {s for s in updated if graph.storages[s].born == CALLER}
    divided = states | set(gradients(graph))
    storages = {
        number: replace(storage, num_bytes=-(-storage.num_bytes // num_ranks))
        if number in divided
        else storage
        for number, storage in graph.storages.items()
    }
    own = estimate_peak(replace(graph, storages=storages), context_bytes).peak_bytes
    sizes = unit_bytes(graph, unit_of)
    root = sizes.pop("", 0)
    return own + root + GATHERED_UNITS * max(sizes.values(), default=0)


def estimate_graphs(
    graphs: Sequence[Graph], device: DeviceCosts, wires: Wires
) -> RanksEstimate:
    """The steady state of ranks whose steps were captured, at their clocks. Raises
    ConfigError: a collective lacks a rank, or a receive its send."""
    priced = [price(graph, device, wires) for graph in graphs]
    ranks = _at_their_clocks(priced, device, wires)
    alone = [estimate_step(graph, device, wires).step_us for graph in graphs]
    return RanksEstimate(
        step_us=steady_us(*ranks, wires=wires),
        alone_us=max(alone),
        communication_us=max(map(_moved_us, ranks)),
    )


def _moved_us(tasks: Sequence[Task]) -> float:
    return sum(t.device_us for t in tasks if t.stream is Stream.COMMUNICATION)


def _at_their_clocks(
    ranks: Sequence[PricedRank], device: DeviceCosts, wires: Wires
) -> list[Sequence[Task]]:
    """Every rank's tasks at the clock of the step that all of them take together."""
    tasks: list[Sequence[Task]] = [priced.tasks for priced in ranks]
    if device.power is None:
        return tasks
    step_us = steady_us(*tasks, wires=wires)
    clocks = [device.power.clock(step_us, p.bound_us, p.joules) for p in ranks]
    return [
        slowed(priced, 1.0 / clock - 1.0) if clock < 1.0 else priced.tasks
        for priced, clock in zip(ranks, clocks, strict=True)
    ]


def _pipeline(
    graph: Graph, tasks: Sequence[Task], fabric: Network, layout: RankLayout
) -> RanksEstimate:
    """Layers shared evenly; each phase as long as its host or its device needs."""
    length = dict.fromkeys(StepPhase, 0.0)
    for phase in StepPhase:
        own = [t for t, n in zip(tasks, graph.nodes, strict=True) if n.phase is phase]
        host = sum(t.host_us + t.host_after_us for t in own)
        length[phase] = max(host, sum(t.device_us for t in own))
    parts = layout.num_ranks * layout.num_chunks
    even, late = (
        ChunkTimes(
            forward_us=slower * length[StepPhase.FORWARD] / parts,
            backward_us=slower * length[StepPhase.BACKWARD] / parts,
        )
        for slower in (1.0, layout.slower)
    )
    chunks = [[even] * layout.num_chunks for _ in range(layout.num_ranks)]
    chunks[-1] = [late] * layout.num_chunks
    passed = _passed_bytes(graph)
    send_us = fabric.microseconds(Collective.SEND, passed, layout.num_ranks)
    tail_us = length[StepPhase.UPDATE] / layout.num_ranks
    count = layout.num_micro_batches
    ranks = pipeline_tasks(chunks, count, send_us, tail_us)
    whole = count * (length[StepPhase.FORWARD] + length[StepPhase.BACKWARD])
    return RanksEstimate(
        step_us=simulate_ranks(ranks).step_us,
        alone_us=whole + length[StepPhase.UPDATE],
        communication_us=2 * send_us * count * layout.num_chunks,
    )


def _passed_bytes(graph: Graph) -> float:
    """Of what a layer passes on: the commonest size of what forward leaves backward."""
    sizes = Counter(
        storage.num_bytes
        for storage in graph.storages.values()
        if storage.born != CALLER
        and not storage.is_parameter
        and graph.nodes[storage.born].phase is StepPhase.FORWARD
    )
    return float(max(sizes, key=lambda size: (sizes[size], size), default=0))
