"""What the power limit does to the clock, and so to the step.

[Note: clocks]
A device draws `idle` watts, and more by the rate at which it multiplies and moves
bytes. What that comes to over some tens of milliseconds may not pass the limit: then
the clock falls until it does not; the energy of the same work falls with it (voltage
falls with frequency). Kernels bound by multiplication slow down with the clock, those
bound by memory hardly do. So a step that waits for copies draws less on average and
runs its products faster: part of a wait is won back.
(tests/ssdtrain/tools/foresight/test_models.py)
"""

from dataclasses import dataclass

from ssdtrain.tools.foresight.call import Call, KernelFamily

LOWEST_CLOCK = 0.4
BISECTIONS = 40
# Families whose kernels follow the clock as far as they are bound by FLOPs.
MULTIPLYING = (KernelFamily.PRODUCT, KernelFamily.ATTENTION, KernelFamily.CONVOLUTION)


@dataclass(frozen=True, kw_only=True)
class Power:
    """A device's power at its highest clock. See [Note: clocks]."""

    limit_watts: float
    idle_watts: float
    joules_per_tflop: float
    """Above idle, for 1e12 FLOPs of matrix products in 16 bits."""
    joules_per_gb: float
    """Above idle, for 1e9 bytes of device memory."""
    exponent: float = 2.0
    """Energy above idle of the same work goes with clock ** exponent."""

    def joules(self, call: Call) -> float:
        """Energy above idle of one call at the highest clock."""
        flops = call.flops if call.family in MULTIPLYING else 0.0
        moved = call.num_bytes - call.warm_bytes
        return flops * self.joules_per_tflop * 1e-12 + moved * self.joules_per_gb * 1e-9

    def clock(self, busy_us: float, bound_us: float, joules: float) -> float:
        """Clock (1: the highest) that a repeated step settles at. `busy_us`: at the
        highest clock, waits included; `bound_us`: the part that goes with one over the
        clock."""
        if busy_us <= 0.0 or self._watts(1.0, busy_us, bound_us, joules) <= 0.0:
            return 1.0
        if self._watts(1.0, busy_us, bound_us, joules) <= self.limit_watts:
            return 1.0
        low, high = LOWEST_CLOCK, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if self._watts(middle, busy_us, bound_us, joules) <= self.limit_watts:
                low = middle
            else:
                high = middle
        return low

    def _watts(
        self, clock: float, busy_us: float, bound_us: float, joules: float
    ) -> float:
        seconds = (busy_us - bound_us + bound_us / clock) * 1e-6
        above: float = joules * clock**self.exponent / seconds
        return self.idle_watts + above


def bound_us(call: Call, us: float, compute_us: float) -> float:
    """The part of a kernel's time at the highest clock that follows the clock."""
    if call.family not in MULTIPLYING or us <= 0.0:
        return 0.0
    # Kernels reach some 70 to 85 % of the peak: near it all of the time is arithmetic.
    return us * min(1.0, 1.3 * compute_us / us)
