"""What a transfer costs: link time as a function of the bytes.

On the ground floor, because `machine` measures curves and `plan` prices with them.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from ssdtrain.jsonfile import Duration, Fraction, Natural, Positive

COPY_SLOWDOWN = 0.004
"""What copies in one direction cost compute meanwhile, as far as is known without a
measurement (H200, recipes/bench/offload/placement.py: 0 to 0.5 % of a step)."""
DUPLEX_SLOWDOWN = 0.1
"""What copies in both directions cost one another between a GPU and its host (0.07 to
0.12 on twelve hosts of H100s and H200s). No measurement of it, or of `COPY_SLOWDOWN`,
has changed which plan is chosen."""
BATCH_SHARE = 0.01
"""Default of `Links.batch_share`."""


@dataclass(frozen=True, kw_only=True)
class Sigmoid:
    """log10 of the bandwidth in bytes/s, as a function of x = log2(bytes)."""

    height: float
    steepness: float
    middle: float
    """log2 of the bytes where the bandwidth is half-way (on a log scale)."""
    base: float

    def log10_bandwidth(self, log2_bytes: float) -> float:
        """height / (1 + exp(-steepness (x - middle))) + base."""
        power = -self.steepness * (log2_bytes - self.middle)
        return self.height / (1.0 + math.exp(min(power, 700.0))) + self.base


@dataclass(frozen=True, kw_only=True)
class Knot:
    """A size that was measured."""

    num_bytes: Natural
    seconds: Duration


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Transfer time in three pieces: flat, sigmoid, linear.

    From Lin, Performance Modeling and Optimization for ML Workloads, Eq. 5.2:
    `t_s` up to m1, a fitted sigmoid of the bandwidth between m1 and m2, and
    `t_s + m / BW_max` from m2 on. Ours never decreases with the size.
    """

    startup_seconds: Duration
    """t_s: what the smallest transfer costs."""
    bytes_per_second: Positive
    """BW_max: the slope of the last piece."""
    small_bytes: Natural
    """m1: up to here the size does not matter."""
    large_bytes: Natural
    """m2: from here on the time is linear in the size."""
    sigmoid: Sigmoid
    fit_error: Fraction
    """Largest |fitted - measured| / measured over the samples."""
    knots: tuple[Knot, ...] = ()
    """By size, in the place of the sigmoid: from one to the next the time is a straight
    line. For collectives, which change their protocol with the size: each takes its own
    latency and rate, so that the time has corners that no sigmoid has."""

    def seconds(self, num_bytes: float) -> float:
        """Link time in seconds of one transfer of `num_bytes`."""
        if num_bytes <= 0:
            return 0.0
        if self.knots:
            return self._by_knots(num_bytes)
        if num_bytes <= self.small_bytes:
            return self.startup_seconds
        linear = self.startup_seconds + num_bytes / self.bytes_per_second
        if num_bytes >= self.large_bytes:
            return linear
        log_rate = self.sigmoid.log10_bandwidth(math.log2(num_bytes))
        # Clamped so that the three pieces join without a step downwards.
        top = self.startup_seconds + self.large_bytes / self.bytes_per_second
        rate = math.pow(10.0, min(max(log_rate, -300.0), 300.0))
        return min(max(num_bytes / rate, self.startup_seconds), top)

    def _by_knots(self, num_bytes: float) -> float:
        at = bisect_right(self.knots, num_bytes, key=lambda knot: knot.num_bytes)
        if at == 0:
            return self.knots[0].seconds
        low = self.knots[at - 1]
        more = num_bytes - low.num_bytes
        if at == len(self.knots):
            return low.seconds + more / self.bytes_per_second
        high = self.knots[at]
        slope = (high.seconds - low.seconds) / (high.num_bytes - low.num_bytes)
        return low.seconds + more * slope

    def slower(self, factor: float) -> "Curve":
        """The link of which every transfer takes `factor` times as long, but for what
        it costs besides its bytes."""
        return replace(
            self,
            bytes_per_second=self.bytes_per_second / factor,
            sigmoid=replace(self.sigmoid, base=self.sigmoid.base - math.log10(factor)),
            knots=tuple(
                replace(knot, seconds=knot.seconds * factor) for knot in self.knots
            ),
        )

    def gb_per_s(self, num_bytes: float) -> float:
        """Effective bandwidth in GB/s (1e9) of transfers of `num_bytes`."""
        return num_bytes / self.seconds(num_bytes) / 1e9

    @classmethod
    def straight(cls, startup_seconds: float, bytes_per_second: float) -> "Curve":
        """A link without the curved middle: `startup + bytes / rate` at every size."""
        return cls(
            startup_seconds=startup_seconds,
            bytes_per_second=bytes_per_second,
            small_bytes=0,
            large_bytes=0,
            sigmoid=Sigmoid(height=0.0, steepness=1.0, middle=0.0, base=0.0),
            fit_error=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Links:
    """Fitted size-to-time curves; None where the way was not measured."""

    d2h: Curve
    h2d: Curve
    ssd_write: Curve | None = None
    ssd_read: Curve | None = None
    copy_slowdown: Fraction = 0.0
    """Fraction by which a copy in one direction slows compute down meanwhile."""
    duplex_slowdown: Fraction = 0.0
    """Fraction by which copies in both directions slow one another down."""
    event_ms: Duration = 0.0
    """What compute loses where it records an event, or waits for one that has been
    reached."""
    batch_share: Fraction = BATCH_SHARE
    """Of the bytes that a step saves: most that are on the device for longer, so that
    fewer events are recorded and waited for."""
    ssd_duplex_slowdown: Fraction = 0.0
    """The same of the SSD's writes and reads: 1 where both share one bandwidth, more
    where mixing them costs."""
    ssd_direct: bool = False
    """The SSD moves device memory itself: nothing is staged in pinned memory."""

    @property
    def ways(self) -> tuple[Curve, Curve]:
        """How bytes leave the device, and how they come back."""
        write, read = self.ssd_write, self.ssd_read
        if self.ssd_direct and write is not None and read is not None:
            return write, read
        return self.d2h, self.h2d
