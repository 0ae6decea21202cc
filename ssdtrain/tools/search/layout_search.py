"""The search for a layout of a public model: every layout that divides, priced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.cluster import DEFAULT, cluster_of
from ssdtrain.tools.foresight.device import DeviceCosts, load_device
from ssdtrain.tools.report.build_public import Loss, Shape, Train, shape_of
from ssdtrain.tools.report.fits import PLAIN
from ssdtrain.tools.search import launch
from ssdtrain.tools.search.experts import experts_of
from ssdtrain.tools.search.frameworks import Framework
from ssdtrain.tools.search.parallel_layout import Job, layouts
from ssdtrain.tools.search.pricing import Key, PricedLayout, Pricer
from ssdtrain.tools.search.stage_costs import (
    GROUPS,
    HEADS,
    HIDDEN,
    WORDS,
    StageCosts,
    stage_costs,
    tensor_degrees,
)
from ssdtrain.tools.search.stores import HOST, LEAST_YEARS, stores_of

SEQUENCES = (1, 2, 4)
"""Of a micro-batch."""
LAUNCHES = {
    Framework.FSDP2: launch.fsdp2,
    Framework.DEEPSPEED: launch.deepspeed,
    Framework.MEGATRON: launch.megatron,
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked."""

    model: str
    gpus: int
    gpu: str = "h100"
    fabric: str = DEFAULT
    tokens: int = 8192
    batch: int = 512
    """Sequences of a step."""
    loss: Loss = Loss.STOCK
    host: str = HOST
    """Of a node, for activations."""
    ssd: str | None = None
    """Drives of a node, as NAME:NUMBER."""
    ssd_years: float = LEAST_YEARS
    framework: Framework | None = None
    """That has to launch it; None: any."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """All layouts: those that fit, the fastest first, then those that do not."""

    job: Job
    priced: tuple[PricedLayout, ...]
    capacity_bytes: float

    @property
    def best(self) -> PricedLayout | None:
        """The fastest layout that fits."""
        return next((one for one in self.priced if one.fits), None)

    @property
    def front(self) -> tuple[PricedLayout, ...]:
        """Layouts that no other one beats in both step and memory, the least first."""
        found: list[PricedLayout] = []
        for one in sorted(self.priced, key=lambda one: (one.memory_bytes, one.step_ms)):
            if not found or one.step_ms < found[-1].step_ms:
                found.append(one)
        return tuple(found)

    def tokens_per_s(self, one: PricedLayout) -> float:
        """Return tokens a second of all GPUs."""
        return self.job.batch * self.job.tokens / one.step_ms * 1e3


def search(asked: Asked, progress: Callable[[str], None]) -> Ranked:
    """Price all layouts; `progress` is told what is captured. Raises ConfigError: the
    model, the device or the links are not known, or no layout divides."""
    shape = shape_of(asked.model, Train.FULL, asked.loss)
    device = load_device(asked.gpu)
    cluster = cluster_of(asked.fabric, device.spec)
    if shape.num_layers is None:
        raise ConfigError(f"a search expects a stack of layers, {asked.model} has none")
    node = min(cluster.node, asked.gpus)
    degrees = tensor_degrees(shape, node)
    job = job_of(shape, asked.tokens, asked.batch, asked.gpus)
    stores = stores_of(asked.host, asked.ssd, asked.ssd_years, node)
    sequences = [number for number in SEQUENCES if number <= asked.batch]
    if not any(layouts(job, degrees, sequences, [PLAIN])):
        raise ConfigError(
            f"no layout divides {shape.num_layers} layers and a batch of {asked.batch} "
            f"sequences over {asked.gpus} GPUs; set --batch to a multiple of the GPUs"
        )
    costs: dict[Key, StageCosts] = {}
    for degree in degrees:
        for number in sequences:
            progress(f"pricing a layer: tensor parallel {degree}, micro-batch {number}")
            costs |= keyed_costs(shape, job, degree, number, device)
    capacity = device.spec.memory_bytes - device.context_bytes
    pricer = Pricer(
        job=job,
        spec=device.spec,
        cluster=cluster,
        capacity_bytes=capacity,
        stores=stores,
        costs=costs,
        framework=asked.framework,
    )
    ways = list(next(iter(costs.values())).ways)
    own = asked.framework
    found = [
        pricer.price(one)
        for one in layouts(job, degrees, sequences, ways)
        if own is None or LAUNCHES[own](one, job) is not None
    ]
    if own is not None and not found:
        raise ConfigError(f"{own.value} launches no layout of {asked.gpus} GPUs")

    def order(one: PricedLayout) -> tuple[float, ...]:
        step_ms = round(one.step_ms, 3) if one.fits else 0.0
        return not one.fits, step_ms, one.memory_bytes

    priced = _distinct(sorted(found, key=order))
    return Ranked(job=job, priced=priced, capacity_bytes=capacity)


def _distinct(found: Sequence[PricedLayout]) -> tuple[PricedLayout, ...]:
    """Leave out a way that is the same plan as one before it."""
    first: dict[object, PricedLayout] = {}
    for one in found:
        same = replace(one.layout, way=""), one.step_ms, one.memory_bytes
        first.setdefault(same, one)
    return tuple(first.values())


def job_of(shape: Shape, tokens: int, batch: int, gpus: int) -> Job:
    """Return what is trained: a decoder on `batch` sequences a step, over all GPUs."""
    values = shape.values
    width = values.get("head_dim") or values[HIDDEN] // values[HEADS]
    return Job(
        layers=shape.num_layers or 0,
        hidden=values[HIDDEN],
        tokens=tokens,
        batch=batch,
        gpus=gpus,
        keys=2 * width * values.get(GROUPS, values[HEADS]),
        heads=values[HEADS],
        words=values[WORDS],
        experts=experts_of(shape),
    )


def keyed_costs(
    shape: Shape,
    job: Job,
    degree: int,
    sequences: int,
    device: DeviceCosts,
    *,
    is_blocking: bool = False,
) -> dict[Key, StageCosts]:
    """Return a stage's costs without and with sequence parallelism."""
    found = stage_costs(
        shape, degree, sequences, job.tokens, device, is_blocking=is_blocking
    )
    return {(degree, sequences, division): one for division, one in found.items()}
