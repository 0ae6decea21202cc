"""Does fusing two convolutions pay? The roofline rule of Lin 2023, chapter 3.

Two convolutions one behind the other move the tensor between them to memory and back;
fused, they need not. The pair's arithmetic intensity tells how far that can help: where
the separate pair is bound by memory and the fused one less so, fusion may pay; where
both are bound by arithmetic, it does not.

[Note: no decision] The rule speaks of two kernels and of one that all reach the
device's ceilings. Of 33 pairs in strips on a CPU (recipes.bench.foresight.fusion) it
named 8, of which one was faster, and missed two of three that were: following it costs
10 % more than knowing. So it decides nothing, and no command asks it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ssdtrain.errors import ConfigError

ELEMENT = 4
# Predicted gain from which fusing may pay: see [Note: no decision].
LEAST_GAIN = 1.05


class Kind(str, Enum):
    """Which two convolutions."""

    DEPTHWISE_POINTWISE = "depthwise 3x3, 1x1"
    DEPTHWISE5_POINTWISE = "depthwise 5x5, 1x1"
    FULL_POINTWISE = "3x3, 1x1"
    FULL_FULL = "3x3, 3x3"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two convolutions of one image, fp32: (C, H, H) to (C, H', H') to (C2, H', H')."""

    name: str
    kind: Kind
    side: int
    channels: int
    filters: int
    stride: int = 1

    @property
    def out(self) -> int:
        """Side of both results."""
        return self.side // self.stride

    @property
    def flops(self) -> float:
        """Of both convolutions."""
        taps = 25 if self.kind is Kind.DEPTHWISE5_POINTWISE else 9
        area, c = self.out * self.out, self.channels
        depthwise = self.kind in (Kind.DEPTHWISE_POINTWISE, Kind.DEPTHWISE5_POINTWISE)
        first = 2.0 * area * c * taps * (1 if depthwise else c)
        second = 2.0 * area * c * self.filters
        return first + second * (9 if self.kind is Kind.FULL_FULL else 1)

    @property
    def between_bytes(self) -> float:
        """Of the tensor between them."""
        return float(ELEMENT * self.channels * self.out**2)

    @property
    def fused_bytes(self) -> float:
        """Traffic of the fused pair: image, weights, result."""
        taps = 25 if self.kind is Kind.DEPTHWISE5_POINTWISE else 9
        depthwise = self.kind in (Kind.DEPTHWISE_POINTWISE, Kind.DEPTHWISE5_POINTWISE)
        weights = self.channels * taps * (1 if depthwise else self.channels)
        last = 9 if self.kind is Kind.FULL_FULL else 1
        weights += self.channels * self.filters * last
        image = self.channels * self.side**2 + self.filters * self.out**2
        return float(ELEMENT * (image + weights))

    @property
    def separate_bytes(self) -> float:
        """The same, with the tensor between written and read."""
        return self.fused_bytes + 2 * self.between_bytes


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What the rule says of a pair."""

    pair: Pair
    separate_intensity: float
    fused_intensity: float
    gain: float
    """Predicted time apart over predicted time fused."""

    @property
    def may_pay(self) -> bool:
        """Whether the ceilings leave a gain; see [Note: no decision]."""
        return self.gain >= LEAST_GAIN


def advise(pair: Pair, gflops: float, gb_per_s: float) -> Advice:
    """The roofline rule with a machine's measured ceilings.

    Args:
        pair: two convolutions.
        gflops: 1e9 FLOPs a second that convolutions reach.
        gb_per_s: 1e9 bytes a second of the level of memory that holds the tensor
            between them (a cache, where it fits).
    """
    if gflops <= 0 or gb_per_s <= 0:
        raise ConfigError(f"ceilings expect more than 0, got {gflops}, {gb_per_s}")
    compute = pair.flops / gflops
    apart = max(compute, pair.separate_bytes / gb_per_s)
    fused = max(compute, pair.fused_bytes / gb_per_s)
    return Advice(
        pair=pair,
        separate_intensity=pair.flops / pair.separate_bytes,
        fused_intensity=pair.flops / pair.fused_bytes,
        gain=apart / fused,
    )


def _pairs() -> tuple[Pair, ...]:
    """Table 3.2's layers: name, side, channels, filters, stride."""
    dw, dw5 = Kind.DEPTHWISE_POINTWISE, Kind.DEPTHWISE5_POINTWISE
    full, both = Kind.FULL_POINTWISE, Kind.FULL_FULL
    rows: Sequence[tuple[str, Kind, int, int, int, int]] = (
        ("mv1_1", dw, 112, 32, 64, 1),
        ("mv1_2", dw, 112, 64, 128, 2),
        ("mv1_3", dw, 56, 128, 128, 1),
        ("mv1_4", dw, 56, 128, 256, 2),
        ("mv1_5", dw, 28, 256, 256, 1),
        ("mv1_6", dw, 28, 256, 512, 2),
        ("mv1_7", dw, 14, 512, 512, 1),
        ("mv1_12", dw, 14, 512, 1024, 2),
        ("mv1_13", dw, 7, 1024, 1024, 1),
        ("mv2_1", dw, 112, 32, 16, 1),
        ("mv2_2_1", dw, 112, 96, 24, 2),
        ("mv2_2_2", dw, 56, 144, 24, 1),
        ("mv2_3_1", dw, 56, 144, 32, 2),
        ("mv2_3_2", dw, 28, 192, 32, 1),
        ("mv2_4_1", dw, 28, 192, 64, 2),
        ("mv2_4_2", dw, 14, 384, 64, 1),
        ("mv2_5_1", dw, 14, 384, 96, 1),
        ("mv2_5_2", dw, 14, 576, 96, 1),
        ("mv2_6_1", dw, 14, 576, 160, 2),
        ("mv2_6_2", dw, 7, 960, 160, 1),
        ("mv2_7", dw, 7, 960, 320, 1),
        ("mnb1_3_1", dw5, 56, 72, 40, 2),
        ("mnb1_3_2", dw5, 28, 240, 40, 1),
        ("mnb1_5_1", dw, 14, 480, 112, 1),
        ("mnb1_5_2", dw, 14, 672, 112, 1),
        ("mnb1_6_1", dw5, 14, 672, 160, 2),
        ("mnb1_6_2", dw5, 7, 960, 160, 1),
        ("res_2x", both, 56, 64, 64, 1),
        ("res_3x", both, 28, 128, 128, 1),
        ("res_4x", both, 14, 256, 256, 1),
        ("res_5x", both, 7, 512, 512, 1),
        ("res_2x_b2", full, 56, 64, 256, 1),
        ("res_3x_b2", full, 28, 128, 512, 1),
    )
    return tuple(
        Pair(name=n, kind=k, side=s, channels=c, filters=f, stride=d)
        for n, k, s, c, f, d in rows
    )


PAIRS = _pairs()
"""33 pairs of the five networks."""
