"""What a layout of a training step costs: time, and memory of every tier. Pipelines run
1F1B, interleaved where a rank has several chunks; context parallelism gathers keys and
values, and every rank has an equal share of a sequence's attention."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ssdtrain.tools.foresight.cluster import Cluster
from ssdtrain.tools.foresight.collectives import Collective
from ssdtrain.tools.foresight.spec import DeviceSpec
from ssdtrain.tools.report.fits import CHECKPOINTING, PLAIN
from ssdtrain.tools.search.experts import PASSES
from ssdtrain.tools.search.frameworks import (
    GRADIENT,
    WEIGHT,
    Framework,
    RankWeights,
    StepMoment,
    framework_of,
)
from ssdtrain.tools.search.parallel_layout import Division, Job, ParallelLayout
from ssdtrain.tools.search.stage_costs import ActivationCost, StageCosts
from ssdtrain.tools.search.stores import Resting, Stores

UPDATE = 30
"""Bytes of a parameter that Adam's update reads and writes."""
REDUCES, EXCHANGES = 4, 4
"""All-reduces (tensor) and all-to-alls (experts) of a layer, forward and backward."""
AGAIN = 0.5
"""Of these, those that come again where a layer's forward runs again."""

Key = tuple[int, int, Division]
"""Tensor-parallel degree, sequences of a micro-batch, sequence parallelism."""


@dataclass(frozen=True, kw_only=True)
class PricedLayout:
    """A layout, its step and its memory."""

    layout: ParallelLayout
    parts_ms: Mapping[str, float]
    """Of a step, by what takes the time."""
    memory_parts: Mapping[str, float]
    """Bytes of the fullest GPU, by what takes them."""
    resting: Resting
    years: float
    """That the SSDs last."""
    fits: bool

    @property
    def step_ms(self) -> float:
        """Time of a step."""
        return sum(self.parts_ms.values())

    @property
    def memory_bytes(self) -> float:
        """Of the fullest GPU."""
        return sum(self.memory_parts.values())

    @property
    def bound(self) -> str:
        """What takes the most time besides compute, if it is a twentieth; else that."""
        rest = {k: v for k, v in self.parts_ms.items() if k != "compute"}
        name = max(rest, key=lambda one: rest[one])
        return name if rest[name] > self.step_ms / 20 else "compute"


@dataclass(frozen=True, kw_only=True)
class Pricer:
    """Prices layouts of one job."""

    job: Job
    spec: DeviceSpec
    cluster: Cluster
    capacity_bytes: float
    stores: Stores
    costs: Mapping[Key, StageCosts]
    framework: Framework | None = None
    """Whose memory layouts have; None: `framework_of`."""

    def price(self, layout: ParallelLayout) -> PricedLayout:
        """Return the step and the memory of a layout."""
        one = _Priced(self, layout)
        parts = one.parts_ms()
        held = one.share * one.way.moved_bytes.of(one.layers)
        resting = self.stores.resting(
            layout.flying(self.job.batch) * held, one.count * held
        )
        step_ms = sum(parts.values())
        parts["SSD"] = max(0.0, self.stores.write_ms(resting) - step_ms)
        memory = one.memory_parts()
        step_ms += parts["SSD"]
        fits = sum(memory.values()) <= self.capacity_bytes
        return PricedLayout(
            layout=replace(layout, way=one.name),
            parts_ms=parts,
            memory_parts=memory,
            resting=resting,
            years=self.stores.years(resting, step_ms),
            fits=fits and self.stores.hold(resting, step_ms),
        )


class _Priced:
    """One layout, in numbers of one rank."""

    def __init__(self, pricer: Pricer, layout: ParallelLayout) -> None:
        self._job, self._layout, self._cluster = pricer.job, layout, pricer.cluster
        self._framework = pricer.framework or framework_of(layout)
        self._bytes_per_ms = pricer.spec.memory_gb_per_s * 1e6
        # Parts of two sequences are as many tokens, and as much attention, as one.
        sequences = layout.sequences / layout.context
        captured = max(1, int(sequences))
        self.share = sequences / captured
        """Of what was captured, that this rank has."""
        is_fsdp2 = self._framework is Framework.FSDP2
        division = Division.NONE
        if layout.divided:
            division = Division.INPUTS_WHOLE if is_fsdp2 else Division.SHARES
        self._costs = pricer.costs[layout.tensor, captured, division]
        undivided = pricer.costs.get((1, captured, Division.NONE), self._costs)
        # Under FSDP2 every rank has all words' logits, and splits embedding and head
        # only where it divides the sequence.
        self._logits = undivided if is_fsdp2 else self._costs
        splits_ends = layout.divided or not is_fsdp2
        own = self._costs if splits_ends else undivided
        self._root, self._head = own.parameters.ends, own.head
        """Parameters of this rank that are in no layer; the head's."""
        self.layers = -(-self._job.layers // layout.pipeline)
        """Of the fullest stage."""
        self.name = self._costs.way_of(layout.way, self.layers)
        """Of the way whose price it has; see `way_of`."""
        self.way = self._costs.ways[self.name]
        self.count = layout.micro_batches(self._job.batch)
        self._dense = self._costs.parameters.layer * self.layers + self._root
        experts = self._job.experts
        self._layer_experts = 0.0
        """Parameters of a layer's experts that this rank has."""
        if experts is not None:
            whole = experts.parameters(self._job.hidden)
            self._layer_experts = whole / layout.tensor / layout.expert
        self._again = _again(self._costs, self.way)

    # -- time --------------------------------------------------------------------------

    def parts_ms(self) -> dict[str, float]:
        """Return the parts of a step."""
        layout, count = self._layout, self.count
        compute = self.share * self.way.milliseconds.of(self.layers)
        tensor, context = self._tensor_ms(), self._context_ms()
        experts = self._experts_ms()
        stage = compute + tensor + context + experts
        updated = (
            size * UPDATE / (ranks if layout.zero else 1)
            for size, ranks, _ in self._sharded()
        )
        return {
            "compute": count * compute,
            "tensor parallelism": count * tensor,
            "context parallelism": count * context,
            "experts": count * experts,
            "pipeline bubble": (layout.pipeline - 1) * stage / layout.chunks,
            "pipeline sends": self._sends_ms(),
            "data parallelism": self._data_ms(stage),
            "optimizer": sum(updated) / self._bytes_per_ms,
        }

    def _ms(self, kind: Collective, message: float, ranks: int, stride: int) -> float:
        return self._cluster.microseconds(kind, message, ranks, stride) / 1e3

    @property
    def _tokens(self) -> float:
        """Of a micro-batch on this rank."""
        return self._layout.sequences * self._job.tokens / self._layout.context

    def _tensor_ms(self) -> float:
        """All-reduces (or gathers and scatters, which move the same) of one
        micro-batch; nothing hides them."""
        message = self._tokens * self._job.hidden * WEIGHT
        each = self._ms(Collective.ALL_REDUCE, message, self._layout.tensor, 1)
        return REDUCES * (1 + AGAIN * self._again) * self.layers * each

    def _context_ms(self) -> float:
        """Gathered keys and values, their gradients scattered; nothing hides that."""
        layout = self._layout
        keys = self._job.keys / layout.tensor
        message = self._tokens * layout.context * keys * WEIGHT
        gather, scatter = (
            self._ms(kind, message, layout.context, layout.tensor)
            for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        )
        return self.layers * ((2 + self._again) * gather + scatter)

    def _experts_ms(self) -> float:
        """Tokens to experts and back, and weights that no dense layer would read."""
        experts, layout = self._job.experts, self._layout
        if experts is None:
            return 0.0
        again = 1 + AGAIN * self._again
        tokens = self._tokens / layout.tensor
        message = tokens * experts.copied_bytes(self._job.hidden)
        sent = self._ms(Collective.ALL_TO_ALL, message, layout.expert, layout.tensor)
        more = self._tokens * self._job.hidden * WEIGHT * (experts.each - 1)
        reduced = self._ms(Collective.ALL_REDUCE, more, layout.tensor, 1)
        idle = max(0.0, 1 - experts.each * layout.expert / experts.number)
        read = idle * self._layer_experts * WEIGHT * (PASSES + self._again)
        exchanged = EXCHANGES * again * sent + REDUCES / 2 * again * reduced
        return self.layers * (exchanged + read / self._bytes_per_ms)

    def _sends_ms(self) -> float:
        """Sends that somebody waits for: every one under 1F1B, the ends interleaved."""
        layout, stages = self._layout, self._layout.pipeline
        if stages == 1:
            return 0.0
        message = self._tokens * self._job.hidden * WEIGHT
        message /= layout.tensor if layout.divided else 1
        send = self._cluster.send_us(message, layout.tensor * layout.replicas) / 1e3
        if layout.chunks > 1:
            return 2 * (stages * layout.chunks - 1) * send
        return 2 * (stages - 2 + self.count * (1 - 1 / stages)) * send

    def _sharded(self) -> Iterator[tuple[float, int, int]]:
        """Return (parameters of this rank, ranks that hold the same, stride)."""
        layout = self._layout
        yield self._dense, layout.replicas, layout.tensor
        if self._layer_experts:
            ranks = layout.replicas // layout.expert
            stride = layout.tensor * layout.expert
            yield self.layers * self._layer_experts, ranks, stride

    def _data_ms(self, stage_ms: float) -> float:
        """What of the data-parallel collectives no compute hides."""

        def ms(kind: Collective, each: int) -> float:
            return sum(self._ms(kind, size * each, *at) for size, *at in shares)

        layout, shares = self._layout, list(self._sharded())
        if layout.replicas == 1:
            return 0.0
        backward = stage_ms * 2 / 3
        gather = ms(Collective.ALL_GATHER, WEIGHT)
        keeps = layout.zero == 2 and self._framework is Framework.FSDP2
        if layout.zero == 3 or keeps:
            # Layer by layer, the next one's ahead; FSDP2 keeps what ZeRO-2 gathered.
            busy = (layout.zero - 1) * gather + ms(Collective.REDUCE_SCATTER, GRADIENT)
            return self.count * max(0.0, busy - stage_ms) + busy / self.layers
        if layout.zero == 0:
            reduced = ms(Collective.ALL_REDUCE, GRADIENT)
            return max(reduced - backward, reduced / self.layers)
        scatter = ms(Collective.REDUCE_SCATTER, GRADIENT)
        times = self.count if layout.zero == 2 else 1
        return times * max(scatter - backward, scatter / self.layers) + gather

    # -- memory ------------------------------------------------------------------------

    def memory_parts(self) -> dict[str, float]:
        """Return what the first stage, which holds the most micro-batches, has at its
        fullest moment."""
        layout = self._layout
        weights = RankWeights(
            shared=[(size, ranks) for size, ranks, _ in self._sharded()],
            layer=self._costs.parameters.layer + self._layer_experts,
            root=self._root,
            head=self._head,
            zero=layout.zero,
            accumulates=self.count > 1,
        )
        found = [
            {**parts, "activations": self._activations(moment)}
            for moment, parts in weights.held(self._framework)
        ]
        return max(found, key=lambda parts: sum(parts.values()))

    def _activations(self, moment: StepMoment) -> float:
        if moment is StepMoment.AFTER:
            return 0.0
        held = self.way.activation_bytes[moment]
        ends = self._logits.ways[self.name].activation_bytes[moment].ends
        flying = self._layout.flying(self._job.batch)
        stack = flying * self.layers * self.share * held.layer
        copied = 1 if moment is StepMoment.LAST else flying * self.layers
        return stack + self.share * ends + copied * self._copies()

    def _copies(self) -> float:
        """Bytes of a layer's tokens at its experts, and of what they give."""
        experts = self._job.experts
        if experts is None or self.name == CHECKPOINTING:
            return 0.0
        tokens = self._tokens / self._layout.tensor
        return 2 * tokens * experts.copied_bytes(self._job.hidden)


def _again(costs: StageCosts, way: ActivationCost) -> float:
    """Return the share of a layer's forward that runs again."""
    plain = costs.ways[PLAIN].milliseconds.layer
    most = costs.ways.get(CHECKPOINTING, way).milliseconds.layer - plain
    more = way.milliseconds.layer - plain
    return min(1.0, max(0.0, more / most)) if most > 0.0 else 0.0
