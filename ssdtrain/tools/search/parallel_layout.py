"""Layouts of a training step over GPUs, and what one costs.

Ranks are numbered as Megatron does: tensor-parallel ones are neighbours, then come
data-parallel ones, then the stages of the pipeline. Pipelines run 1F1B.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ssdtrain.tools.foresight.collectives import Collective
from ssdtrain.tools.foresight.spec import Spec
from ssdtrain.tools.search.stage_costs import StageCosts
from ssdtrain.tools.search.tiers import Cluster

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes of a parameter: bf16, its gradient in fp32, fp32 weights and Adam's moments."""
UPDATE = 30
"""Bytes of a parameter that Adam's update reads and writes."""
GATHERED_LAYERS = 2
"""Layers whose weights ZeRO-3 holds whole at once."""
REDUCES = 4
"""All-reduces of a layer's forward and backward under tensor parallelism."""
AGAIN = 2
"""More of them where a layer's forward runs again."""
PLAIN, CHECKPOINTING = "plain", "checkpointing"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained."""

    layers: int
    hidden: int
    tokens: int
    """Of a sequence."""
    batch: int
    """Sequences of a step, over all GPUs."""
    gpus: int


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How GPUs share a step."""

    data: int
    tensor: int
    pipeline: int
    zero: int
    """0 to 3: optimizer state, then gradients, then weights are divided, too."""
    sequences: int
    """Of a micro-batch."""
    way: str
    """How activations are kept."""

    def micro_batches(self, batch: int) -> int:
        """Return the micro-batches of one data-parallel rank."""
        return batch // (self.data * self.sequences)


@dataclass(frozen=True, kw_only=True)
class PricedLayout:
    """A layout, its step and its memory."""

    layout: ParallelLayout
    parts_ms: Mapping[str, float]
    """Of a step, by what takes the time."""
    memory_bytes: float
    fits: bool

    @property
    def step_ms(self) -> float:
        """Time of a step."""
        return sum(self.parts_ms.values())

    @property
    def bound(self) -> str:
        """What takes the most time besides compute, if it is a twentieth; else that."""
        rest = {k: v for k, v in self.parts_ms.items() if k != "compute"}
        name = max(rest, key=lambda one: rest[one])
        return name if rest[name] > self.step_ms / 20 else "compute"


def layouts(
    job: Job, degrees: list[int], sequences: list[int], ways: list[str]
) -> Iterator[ParallelLayout]:
    """All layouts whose numbers divide."""
    for tensor in degrees:
        rest, odd = divmod(job.gpus, tensor)
        stages = [p for p in range(1, min(job.layers, rest) + 1) if rest % p == 0]
        for pipeline in () if odd else stages:
            data = rest // pipeline
            levels = (0, 1, 2, 3) if pipeline == 1 else (0, 1)
            for zero in levels if data > 1 else (0,):
                for number in sequences:
                    for way in ways:
                        if job.layers % pipeline or job.batch % (data * number):
                            continue
                        yield ParallelLayout(
                            data=data,
                            tensor=tensor,
                            pipeline=pipeline,
                            zero=zero,
                            sequences=number,
                            way=way,
                        )


@dataclass(frozen=True, kw_only=True)
class Pricer:
    """Prices layouts of one job."""

    job: Job
    spec: Spec
    cluster: Cluster
    capacity_bytes: float
    costs: Mapping[tuple[int, int], StageCosts]
    """By tensor-parallel degree and sequences of a micro-batch."""

    def price(self, layout: ParallelLayout) -> PricedLayout:
        """Return the step and the memory of a layout."""
        costs = self.costs[layout.tensor, layout.sequences]
        count = layout.micro_batches(self.job.batch)
        layers = self.job.layers // layout.pipeline
        compute = costs.milliseconds[layout.way].of(layers)
        tensor = self._tensor_ms(layout, layers)
        parameters = costs.parameters.of(layers)
        parts = {
            "compute": count * compute,
            "tensor parallelism": count * tensor,
            "pipeline bubble": self._bubble_ms(layout, compute + tensor),
            "data parallelism": self._data_ms(
                layout, parameters, count, compute + tensor
            ),
            "optimizer": self._update_ms(layout, parameters),
        }
        memory = self._memory(layout, parameters, layers, count)
        return PricedLayout(
            layout=layout,
            parts_ms=parts,
            memory_bytes=memory,
            fits=memory <= self.capacity_bytes,
        )

    def _message(self, layout: ParallelLayout) -> float:
        """Bytes of one micro-batch's hidden state."""
        return layout.sequences * self.job.tokens * self.job.hidden * WEIGHT

    def _tensor_ms(self, layout: ParallelLayout, layers: int) -> float:
        """All-reduces (or gathers and scatters, which move the same) of one
        micro-batch; nothing hides them."""
        each = self.cluster.microseconds(
            Collective.ALL_REDUCE, self._message(layout), layout.tensor
        )
        again = 0 if layout.way == PLAIN else AGAIN
        return (REDUCES + again) * layers * each / 1e3

    def _bubble_ms(self, layout: ParallelLayout, stage_ms: float) -> float:
        """The first micro-batch's way through the pipeline, and the last one's back."""
        message = self._message(layout) / layout.tensor
        send = self.cluster.send_us(message, layout.tensor * layout.data) / 1e3
        return (layout.pipeline - 1) * (stage_ms + 2 * send)

    def _data_ms(
        self, layout: ParallelLayout, parameters: float, count: int, stage_ms: float
    ) -> float:
        """What of the data-parallel collectives no compute hides."""

        def ms(kind: Collective, each: int) -> float:
            message = parameters * each
            return (
                self.cluster.microseconds(kind, message, layout.data, layout.tensor)
                / 1e3
            )

        if layout.data == 1:
            return 0.0
        backward = stage_ms * 2 / 3
        layers = self.job.layers // layout.pipeline
        gather = ms(Collective.ALL_GATHER, WEIGHT)
        if layout.zero == 3:
            busy = 2 * gather + ms(Collective.REDUCE_SCATTER, GRADIENT)
            return count * max(0.0, busy - stage_ms) + busy / layers
        if layout.zero == 0:
            reduced = ms(Collective.ALL_REDUCE, GRADIENT)
            return max(reduced - backward, reduced / layers)
        scatter = ms(Collective.REDUCE_SCATTER, GRADIENT)
        times = count if layout.zero == 2 else 1
        exposed = max(scatter - backward, scatter / layers)
        return times * exposed + gather

    def _update_ms(self, layout: ParallelLayout, parameters: float) -> float:
        share = layout.data if layout.zero else 1
        return parameters / share * UPDATE / (self.spec.memory_gb_per_s * 1e6)

    def _memory(
        self, layout: ParallelLayout, parameters: float, layers: int, count: int
    ) -> float:
        """The peak of the first stage, which holds the most micro-batches."""
        costs = self.costs[layout.tensor, layout.sequences]
        divided = [layout.data if layout.zero >= at else 1 for at in (3, 2, 1)]
        sizes = (WEIGHT, GRADIENT, OPTIMIZER)
        states = sum(
            parameters * size / share
            for size, share in zip(sizes, divided, strict=True)
        )
        if layout.zero == 3:
            states += GATHERED_LAYERS * costs.parameters.layer * WEIGHT
        held = costs.activation_bytes[layout.way]
        flying = min(layout.pipeline, count)
        return states + flying * layers * held.layer + held.ends
