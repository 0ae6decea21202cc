"""A device's ceilings, stated or measured, and the roofline that follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ssdtrain.foresight.call import Call

# No kernel is shorter.
LEAST_US = 1.5


class Kind(str, Enum):
    """Who runs an operator."""

    CUDA = "cuda"
    """A device with queues of its own; the host goes on."""
    CPU = "cpu"
    """The host itself, one operator behind the other."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a device's maker states, or what was measured of it."""

    name: str
    kind: Kind = Kind.CUDA
    num_sms: int
    """Multiprocessors; of a CPU, threads."""
    l2_bytes: float
    memory_bytes: float
    memory_gb_per_s: float
    tflops: Mapping[str, float]
    """Dense matrix products by element type; others run at `fp32`."""
    power_limit_watts: float

    def compute_us(self, call: Call) -> float:
        """FLOPs over peak."""
        rate = self.tflops.get(call.dtype, self.tflops["fp32"])
        return call.flops / (rate * 1e6)

    def roofline_us(self, call: Call) -> float:
        """The longer of FLOPs over peak and bytes over bandwidth."""
        memory = (call.num_bytes - call.warm_bytes) / (self.memory_gb_per_s * 1e3)
        return max(self.compute_us(call), memory, LEAST_US)


H100 = Spec(
    name="h100",
    num_sms=132,
    l2_bytes=50e6,
    memory_bytes=80e9,
    memory_gb_per_s=3350.0,
    tflops={"bf16": 989.0, "fp16": 989.0, "fp32": 67.0},
    power_limit_watts=700.0,
)
H200 = Spec(
    name="h200",
    num_sms=132,
    l2_bytes=50e6,
    memory_bytes=141e9,
    memory_gb_per_s=4800.0,
    tflops={"bf16": 989.0, "fp16": 989.0, "fp32": 67.0},
    power_limit_watts=700.0,
)
SPECS: Mapping[str, Spec] = {spec.name: spec for spec in (H100, H200)}
