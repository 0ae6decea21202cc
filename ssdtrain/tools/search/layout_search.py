"""The search for a layout of a public model: every layout that divides, priced."""

from collections.abc import Callable
from dataclasses import dataclass

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.report.build_public import Loss, Train, shape_of
from ssdtrain.tools.search.parallel_layout import (
    PLAIN,
    Job,
    PricedLayout,
    Pricer,
    layouts,
)
from ssdtrain.tools.search.stage_costs import HIDDEN, stage_costs, tensor_degrees
from ssdtrain.tools.search.tiers import DEFAULT, cluster_of

SEQUENCES = (1, 2, 4)
"""Of a micro-batch."""


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

    def tokens_per_s(self, one: PricedLayout) -> float:
        """Return tokens a second of all GPUs."""
        return self.job.batch * self.job.tokens / one.step_ms * 1e3


def search(asked: Asked, progress: Callable[[str], None]) -> Ranked:
    """Price all layouts.

    Args:
        asked: model, GPUs and batch.
        progress: is told what is captured.

    Raises:
        ConfigError: the model, the device or the links are not known, or no layout
            divides.
    """
    shape = shape_of(asked.model, Train.FULL, asked.loss)
    device = load_device(asked.gpu)
    cluster = cluster_of(asked.fabric, device.spec)
    if shape.num_layers is None:
        raise ConfigError(f"a search expects a stack of layers, {asked.model} has none")
    job = Job(
        layers=shape.num_layers,
        hidden=shape.values[HIDDEN],
        tokens=asked.tokens,
        batch=asked.batch,
        gpus=asked.gpus,
    )
    degrees = tensor_degrees(shape, min(cluster.node, asked.gpus))
    sequences = [number for number in SEQUENCES if number <= asked.batch]
    if not any(layouts(job, degrees, sequences, [PLAIN])):
        raise ConfigError(
            f"no layout divides {shape.num_layers} layers and a batch of {asked.batch} "
            f"sequences over {asked.gpus} GPUs; set --batch to a multiple of the GPUs"
        )
    costs = {}
    for degree in degrees:
        for number in sequences:
            progress(f"pricing a layer: tensor parallel {degree}, micro-batch {number}")
            costs[degree, number] = stage_costs(
                shape, degree, number, asked.tokens, device
            )
    capacity = device.spec.memory_bytes - device.context_bytes
    pricer = Pricer(
        job=job,
        spec=device.spec,
        cluster=cluster,
        capacity_bytes=capacity,
        costs=costs,
    )
    ways = list(next(iter(costs.values())).milliseconds)
    found = [pricer.price(one) for one in layouts(job, degrees, sequences, ways)]
    found.sort(key=lambda one: (not one.fits, one.step_ms if one.fits else 0.0))
    return Ranked(job=job, priced=tuple(found), capacity_bytes=capacity)
