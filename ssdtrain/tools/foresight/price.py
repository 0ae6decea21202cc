"""From an execution graph to the tasks of one rank on one device.

[Note: warm inputs]
A tensor that was touched a short while ago still lies in the L2 cache. Between two
touches so many bytes of other traffic pass; where they and the tensor itself are less
than half of the cache, the tensor's reads do not count as memory traffic.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.foresight.graph import Graph, Node, Stream, data_dependencies
from ssdtrain.tools.foresight.lowering import lower
from ssdtrain.tools.foresight.overheads import HostOverheads
from ssdtrain.tools.foresight.power import bound_us
from ssdtrain.tools.foresight.simulate import Task, simulate_ranks
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.foresight.wires import Wires

L2_SHARE = 0.5
# Steps that are run one behind the other; the last one's length is the step's.
NUM_STEPS = 3

MOVED = "num_bytes"
"""In the attributes of nodes that move bytes between ranks, or to and from a device."""
NO_WIRES = Wires()
NO_COST = HostOverheads(t1=0.0, t2=0.0, t3=0.0, t4=0.0, t5=0.0, num_launches=1)


@dataclass
class PricedRank:
    """The tasks of one rank, and where their time is."""

    tasks: list[Task]
    calls: list[tuple[Call, float]]
    by_family_us: dict[KernelFamily, float] = field(default_factory=dict)
    generic: Counter[str] = field(default_factory=Counter)
    """Operators without a model of their own, by name."""
    unknown_host: int = 0
    """Operators whose host time is their phase's mean."""
    bound_us: float = 0.0
    """Device time that goes with the clock."""
    joules: float = 0.0


class _Cache:
    """What the L2 cache may still hold. See [Note: warm inputs]."""

    def __init__(self, l2_bytes: float) -> None:
        self._room = L2_SHARE * l2_bytes
        self._passed = 0.0
        self._touched: dict[int, float] = {}

    def warm_bytes(self, storages: Mapping[int, float]) -> float:
        """Of the storages' bytes, those that were touched recently."""
        return sum(
            size
            for storage, size in storages.items()
            if storage in self._touched
            and self._passed - self._touched[storage] + size <= self._room
        )

    def touch(self, storages: Mapping[int, float]) -> None:
        """They have just been read or written."""
        self._passed += sum(storages.values())
        for storage in storages:
            self._touched[storage] = self._passed


def price(graph: Graph, device: DeviceCosts, wires: Wires = NO_WIRES) -> PricedRank:
    """Tasks of every node, in order, at the highest clock. Raises ConfigError: a node
    moves bytes on a link that `wires` lacks."""
    priced = PricedRank(tasks=[], calls=[])
    cache = _Cache(device.spec.l2_bytes)
    for index, (node, deps) in enumerate(
        zip(graph.nodes, data_dependencies(graph), strict=True)
    ):
        if MOVED in node.attr:  # it moves bytes, and computes nothing
            device_us = wires.microseconds(node)
        else:
            device_us = _compute(graph, node, device, cache, priced)
        other = tuple(d for d in deps if graph.nodes[d].stream is not node.stream)
        priced.tasks.append(_task(node, index, device_us, other, device, priced))
    return priced


def _compute(
    graph: Graph, node: Node, device: DeviceCosts, cache: _Cache, priced: PricedRank
) -> float:
    lowered = lower(graph, node)
    if not lowered.calls:
        return 0.0
    if lowered.is_generic:
        priced.generic[node.name] += 1
    read = _storages(graph, node.inputs)
    warm = cache.warm_bytes(read)
    total = 0.0
    for call in lowered.calls:
        if call.family is not KernelFamily.LOOKUP and call.warm_bytes == 0.0:
            call = replace(call, warm_bytes=min(warm, call.read_bytes))
        us = device.kernel_us(call)
        total += us
        priced.calls.append((call, us))
        family = priced.by_family_us
        family[call.family] = family.get(call.family, 0.0) + us
        priced.bound_us += bound_us(call, us, device.spec.compute_us(call))
        if device.power is not None:
            priced.joules += device.power.joules(call)
    cache.touch({**read, **_storages(graph, node.outputs)})
    return total


def _storages(graph: Graph, numbers: Sequence[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for number in numbers:
        tensor = graph.tensors[number]
        before = found.get(tensor.storage, 0.0)
        found[tensor.storage] = max(before, float(tensor.num_bytes))
    return found


def _task(
    node: Node,
    index: int,
    device_us: float,
    after: tuple[int, ...],
    device: DeviceCosts,
    priced: PricedRank,
) -> Task:
    # What computes may have an argument of such a name (a group of channels).
    linked = node.attr if MOVED in node.attr else {}
    scale = device.host_scale
    beside = float(node.attr.get("host_views", 0.0)) * device.host.view_us * scale
    cost = device.host.cost(node.phase, node.name)
    if not device.host.knows(node.name):
        if "host_views" in node.attr:  # all that it takes
            cost = NO_COST
        else:
            priced.unknown_host += 1
    if device_us <= 0.0 or cost.num_launches == 0:
        own = cost.t1 + (cost.t2 + cost.t3 if cost.num_launches else cost.t5)
        before, behind = own * scale, 0.0
    else:
        before = (cost.t1 + cost.t2 + cost.t4 / 2) * scale
        more = (cost.num_launches - 1) * (cost.t4 + cost.t5)
        behind = (cost.t4 / 2 + more + cost.t3) * scale
    return Task(
        name=node.name,
        host_us=before + beside,
        host_after_us=behind,
        device_us=device_us,
        stream=node.stream,
        after=after,
        group=linked.get("group"),
        signal=linked.get("signal"),
        waits_for=tuple(filter(None, [linked.get("waits_for")])),
        # A CPU's host runs the kernel itself.
        host_waits=node.waits_for_device
        or (device.spec.kind is Kind.CPU and node.stream is Stream.COMPUTE),
    )


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """A predicted step of one rank."""

    step_us: float
    device_us: float
    """Kernels one after the other, at the clock below."""
    host_us: float
    clock: float
    """Share of the highest clock that the power limit allows."""
    error: float
    """Expected relative error: of the families, weighed by time, as independent."""
    by_family_us: Mapping[KernelFamily, float]
    generic: Mapping[str, int]
    """Operators that are priced as copies of their bytes, by name."""
    unknown_host: int

    @property
    def num_generic(self) -> int:
        """How many they are."""
        return sum(self.generic.values())

    @property
    def is_host_bound(self) -> bool:
        """The device waits for the host."""
        return self.host_us > self.device_us


def estimate_step(
    graph: Graph, device: DeviceCosts, wires: Wires = NO_WIRES
) -> StepEstimate:
    """The steady state of steps one after the other, on one rank. Raises ConfigError:
    a node moves bytes on a link that `wires` lacks."""
    priced = price(graph, device, wires)
    found = steady(priced, device, wires)
    device_us = sum(priced.by_family_us.values())
    device_us += priced.bound_us * (1.0 / found.clock - 1.0)
    host_us = sum(task.host_us + task.host_after_us for task in priced.tasks)
    variance = sum(
        (us * device.error(family)) ** 2 for family, us in priced.by_family_us.items()
    )
    return StepEstimate(
        step_us=found.step_us,
        device_us=device_us,
        host_us=host_us,
        clock=found.clock,
        error=variance**0.5 / max(1.0, sum(priced.by_family_us.values())),
        by_family_us=priced.by_family_us,
        generic=dict(priced.generic),
        unknown_host=priced.unknown_host,
    )


@dataclass(frozen=True, kw_only=True)
class Steady:
    """A step among others like it, at the clock that the power limit allows."""

    tasks: Sequence[Task]
    step_us: float
    clock: float
    host_lead_us: float
    """By how much the host is ahead of the device when a step starts."""


def steady(priced: PricedRank, device: DeviceCosts, wires: Wires = NO_WIRES) -> Steady:
    """Settle a step's clock, and run it among others; what ranks send is there."""
    tasks = priced.tasks = [replace(task, waits_for=()) for task in priced.tasks]
    step_us, clock = steady_us(tasks, wires=wires), 1.0
    if device.power is not None:
        clock = device.power.clock(step_us, priced.bound_us, priced.joules)
    if clock < 1.0:
        tasks = slowed(priced, 1.0 / clock - 1.0)
        step_us = steady_us(tasks, wires=wires)
    return Steady(
        tasks=tasks,
        step_us=step_us,
        clock=clock,
        host_lead_us=_host_lead_us(tasks, wires),
    )


def _host_lead_us(tasks: Sequence[Task], wires: Wires) -> float:
    before = repeated(tasks, NUM_STEPS - 1)
    if not before:
        return 0.0
    [rank] = simulate_ranks([before], wires.links, wires.collective_slowdown).ranks
    return max(0.0, max(rank.ends_us) - rank.host_us)


def slowed(priced: PricedRank, slower: float) -> list[Task]:
    """The tasks at a clock that lengthens what it binds by the fraction `slower`."""
    total = sum(task.device_us for task in priced.tasks if _multiplies(task))
    share = min(1.0, priced.bound_us / total) if total else 0.0
    factor = 1.0 + slower * share
    return [
        replace(task, device_us=task.device_us * factor) if _multiplies(task) else task
        for task in priced.tasks
    ]


def _multiplies(task: Task) -> bool:
    name = task.name.removeprefix("aten::")
    return name.endswith("mm") or "attention" in name or "convolution" in name


def repeated(tasks: Sequence[Task], num_steps: int) -> list[Task]:
    """Steps one after the other; each has groups of its own."""
    many: list[Task] = []
    for step in range(num_steps):
        shift = len(many)
        many += [
            replace(
                task,
                after=tuple(earlier + shift for earlier in task.after),
                group=None if task.group is None else (step, task.group),
                signal=None if task.signal is None else (step, task.signal),
                waits_for=tuple((step, signal) for signal in task.waits_for),
            )
            for task in tasks
        ]
    return many


def steady_us(*ranks: Sequence[Task], wires: Wires = NO_WIRES) -> float:
    """Length of a step among others like it: hosts may run ahead into the next one."""
    if not any(ranks):
        return 0.0
    many = [repeated(tasks, NUM_STEPS) for tasks in ranks]
    times = simulate_ranks(many, wires.links, wires.collective_slowdown).ranks
    ends = [
        max(
            max(rank.ends_us[: step * len(tasks)], default=0.0)
            for rank, tasks in zip(times, ranks, strict=True)
        )
        for step in (NUM_STEPS - 1, NUM_STEPS)
    ]
    return ends[1] - ends[0]
