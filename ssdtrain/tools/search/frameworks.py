"""What a rank holds besides activations, by the framework that runs the layout, at the
moments of a step at which it may be fullest."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ssdtrain.tools.foresight.ranks import GATHERED_UNITS
from ssdtrain.tools.search.parallel_layout import ParallelLayout

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes of a parameter: bf16, its gradient in fp32, fp32 weights and Adam's moments."""
BUCKET, LIVE = 500_000_000, 1_000_000_000
"""Elements: DeepSpeed's `reduce_bucket_size` and `stage3_max_live_parameters`."""
UNDIVIDED = 4
"""The level of ZeRO from which on whole tensors were divided."""


class Framework(str, Enum):
    """Whose code runs a step."""

    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"
    MEGATRON = "megatron"


def framework_of(layout: ParallelLayout) -> Framework:
    """Return whose memory a layout has if none is named: FSDP2's from ZeRO-2 on."""
    return Framework.FSDP2 if layout.zero > 1 else Framework.MEGATRON


Parts = dict[str, float]
"""Bytes, by what takes them."""


class StepMoment(Enum):
    """When a rank may be fullest."""

    PEAK = "peak"
    """Activations are: as a rule when the loss is there, before any gradient is."""
    REDUCING = "reducing"
    """The second of the layers runs backward, while the first one's gradients are
    reduced."""
    LAST = "last"
    """The last of the layers runs backward: all gradients are there."""
    AFTER = "after"
    """Backward is over, or the update runs: no activations are left."""


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """Parameters of one rank."""

    shared: Sequence[tuple[float, int]]
    """(parameters, ranks that have the same ones)."""
    layer: float
    root: float
    """In no layer: embedding, last norm, head."""
    head: float
    """Of these, a head's that is not tied to the embedding."""
    zero: int
    accumulates: bool
    """Over several micro-batches."""

    def held(self, framework: Framework) -> list[tuple[StepMoment, Parts]]:
        """Return what is held at the moments that may be fullest."""
        hold = {
            Framework.FSDP2: self._fsdp2,
            Framework.DEEPSPEED: self._deepspeed,
            Framework.MEGATRON: self._megatron,
        }
        return hold[framework]()

    def _bytes(self, each: int, level: int) -> float:
        """Of all parameters; from a level of ZeRO on, of this rank's share."""
        divides = self.zero >= level
        return sum(size * each / (n if divides else 1) for size, n in self.shared)

    def _fsdp2(self) -> list[tuple[StepMoment, Parts]]:
        units = self.root + GATHERED_UNITS * self.layer
        # The fp32 shard is the only lasting copy: bf16 is what was gathered of it, all
        # layers after a forward that reshards none (ZeRO-2).
        gathered = units * WEIGHT if self.zero > 2 else self._bytes(WEIGHT, 3)
        # `zero_grad()` drops gradients, so the first micro-batch's come in backward.
        gradients = self._bytes(GRADIENT, 2)
        before = gradients if self.accumulates else 0.0
        # A layer's gradients are whole in bf16, then copied to fp32 for the reduction,
        # whose input stays until the next layer's. A head's stay whole, as the root is
        # reduced last.
        reduced = self.layer * (WEIGHT + GRADIENT) + self.head * WEIGHT
        share = gradients / self._bytes(GRADIENT, UNDIVIDED)
        layer, root = (each * GRADIENT * share for each in (self.layer, self.root))
        # Backward reshards unit by unit. Of the last one there are weights, gradients
        # and, at most, a tied embedding's second gradient and the sum of both; or,
        # later, gradients in fp32 for the reduction.
        end = max(self.root, self.layer) * 4 * WEIGHT
        lasting = {"optimizer": self._bytes(OPTIMIZER, 1)}
        whole = {**lasting, "gathered": gathered, "gradients": before}
        kept = gathered if self.zero > 2 else gathered - self.layer * WEIGHT
        first = {
            "gathered": kept,
            "gradients": max(before, layer),
            "reduced": reduced,
        }
        last = {
            "gathered": (self.root + self.layer) * WEIGHT,
            "gradients": max(before, gradients - layer - root),
            "reduced": reduced,
        }
        return [
            (StepMoment.PEAK, whole),
            (StepMoment.REDUCING, {**whole, **first}),
            (StepMoment.LAST, {**lasting, **last}),
            (StepMoment.AFTER, {**lasting, "gradients": gradients, "reduced": end}),
        ]

    def _deepspeed(self) -> list[tuple[StepMoment, Parts]]:
        # bf16 weights are a copy of their own beside the fp32 partition.
        weights = self._bytes(WEIGHT, 3)
        # ZeRO-3 keeps whole what comes again soon, beside its share: at most.
        whole = (
            min(LIVE * WEIGHT, self._bytes(WEIGHT, UNDIVIDED)) if self.zero > 2 else 0.0
        )
        # Gradients accumulate in bf16; ZeRO-3 has its partition from the start.
        gradients = self._bytes(WEIGHT, 2)
        before = gradients if self.accumulates or self.zero > 2 else 0.0
        # Made at the first gradient, two of them for `overlap_comm`, and dropped before
        # the update; ZeRO-3 has one for good.
        buckets = (0, 2, 2, 1)[self.zero] * BUCKET * WEIGHT
        lasting = {"optimizer": self._bytes(OPTIMIZER, 1), "weights": weights}
        # The update has the partition's gradients, a flat copy (ZeRO-3's are flat) and
        # that in fp32.
        update = self._bytes(2 * WEIGHT + GRADIENT, 1)
        if self.zero > 2:
            update += buckets - self._bytes(WEIGHT, 1)
        backward = {**lasting, "gradients": gradients, "buckets": buckets}
        return [
            (StepMoment.PEAK, {**backward, "gathered": whole, "gradients": before}),
            (StepMoment.LAST, {**backward, "gathered": whole}),
            (StepMoment.AFTER, backward),
            (StepMoment.AFTER, {**lasting, "update": update}),
        ]

    def _megatron(self) -> list[tuple[StepMoment, Parts]]:
        # Its buffers of bf16 weights and fp32 gradients are made once, for all steps.
        lasting = {
            "optimizer": self._bytes(OPTIMIZER, 1),
            "gradients": self._bytes(GRADIENT, 2),
            "weights": self._bytes(WEIGHT, 3),
        }
        if self.zero > 2:
            lasting["gathered"] = GATHERED_UNITS * self.layer * WEIGHT
        return [(StepMoment.PEAK, lasting)]
