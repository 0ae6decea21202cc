"""A device's ceilings, stated or measured, and the roofline that follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ssdtrain.curves import COPY_SLOWDOWN, Curve, Links
from ssdtrain.errors import ConfigError
from ssdtrain.rates import STARTUP_S
from ssdtrain.tools.foresight.call import Call

# No kernel is shorter.
LEAST_US = 1.5


class Kind(str, Enum):
    """Who runs an operator."""

    CUDA = "cuda"
    """A device with queues of its own; the host goes on."""
    CPU = "cpu"
    """The host itself, one operator after the other."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """What a device's maker states, or what was measured of it."""

    name: str
    kind: Kind = Kind.CUDA
    num_sms: int
    """Multiprocessors; of a CPU, threads."""
    l2_bytes: float
    memory_bytes: float
    """As torch tells it, where one was met (79.2 GiB, 139.7 GiB)."""
    memory_gb_per_s: float
    tflops: Mapping[str, float]
    """Dense matrix products by element type; others run at `fp32`."""
    power_limit_watts: float
    host_gb_per_s: float | None = None
    """One direction of the link to the host, as it can be reached; None: not known."""
    peer_gb_per_s: float | None = None
    """One direction to another device of the node, by the data sheet; None: not
    known."""

    def compute_us(self, call: Call) -> float:
        """FLOPs over peak."""
        rate = self.tflops.get(call.dtype, self.tflops["fp32"])
        return call.flops / (rate * 1e6)

    def roofline_us(self, call: Call) -> float:
        """The longer of FLOPs over peak and bytes over bandwidth."""
        memory = (call.num_bytes - call.warm_bytes) / (self.memory_gb_per_s * 1e3)
        return max(self.compute_us(call), memory, LEAST_US)


A100_PCIE = DeviceSpec(
    name="a100-pcie",
    num_sms=108,
    l2_bytes=40e6,
    memory_bytes=40e9,
    memory_gb_per_s=1555.0,
    tflops={"bf16": 312.0, "fp16": 312.0, "fp32": 19.5},
    power_limit_watts=250.0,
    host_gb_per_s=25.0,
    peer_gb_per_s=25.0,
)
A100_SXM = replace(
    A100_PCIE,
    name="a100-sxm",
    memory_bytes=80e9,
    memory_gb_per_s=2039.0,
    power_limit_watts=400.0,
    peer_gb_per_s=300.0,
)
H100 = DeviceSpec(
    name="h100",
    num_sms=132,
    l2_bytes=50e6,
    memory_bytes=85.0e9,
    memory_gb_per_s=3350.0,
    tflops={"bf16": 989.0, "fp16": 989.0, "fp32": 67.0},
    power_limit_watts=700.0,
    host_gb_per_s=55.0,
    peer_gb_per_s=450.0,
)
H200 = replace(H100, name="h200", memory_bytes=150.0e9, memory_gb_per_s=4800.0)
B200 = DeviceSpec(
    name="b200",
    num_sms=148,
    l2_bytes=126e6,
    memory_bytes=180e9,
    memory_gb_per_s=8000.0,
    tflops={"bf16": 2250.0, "fp16": 2250.0, "fp32": 80.0},
    power_limit_watts=1000.0,
    host_gb_per_s=55.0,
    peer_gb_per_s=900.0,
)
SPECS: Mapping[str, DeviceSpec] = {
    spec.name: spec for spec in (A100_PCIE, A100_SXM, H100, H200, B200)
}
"""The data sheets that everyone reads: `plan`, `project`, `rok` and `foresight`."""


def links_of(spec: DeviceSpec) -> Links:
    """The host link of a data sheet, for machines whose own were not measured. Raises
    ConfigError: the data sheet does not name it."""
    if spec.host_gb_per_s is None:
        raise ConfigError(
            f"nothing is known of the host link of {spec.name}; measure it with "
            "`ssdtrain doctor --save FILE` and give --links FILE."
        )
    curve = Curve.straight(STARTUP_S, spec.host_gb_per_s * 1e9)
    return Links(d2h=curve, h2d=curve, copy_slowdown=COPY_SLOWDOWN)
