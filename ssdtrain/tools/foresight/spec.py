"""A device's ceilings, stated or measured, and the roofline that follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
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


# Multiprocessors; MB of L2, GB of memory; TFLOP/s in 16 and 32 bits; GB/s of memory, to
# the host and to another device; W.
_SHEETS = {
    "a100-pcie": (108, 40, 40, 312.0, 19.5, 1555.0, 25.0, 25.0, 250.0),
    "a100-sxm": (108, 40, 80, 312.0, 19.5, 2039.0, 25.0, 300.0, 400.0),
    "h100": (132, 50, 80, 989.0, 67.0, 3350.0, 55.0, 450.0, 700.0),
    "h200": (132, 50, 141, 989.0, 67.0, 4800.0, 55.0, 450.0, 700.0),
    "b200": (148, 126, 180, 2250.0, 80.0, 8000.0, 55.0, 900.0, 1000.0),
}
SPECS: Mapping[str, Spec] = {
    name: Spec(
        name=name,
        num_sms=sms,
        l2_bytes=l2 * 1e6,
        memory_bytes=memory * 1e9,
        memory_gb_per_s=rate,
        tflops={"bf16": half, "fp16": half, "fp32": single},
        power_limit_watts=watts,
        host_gb_per_s=host,
        peer_gb_per_s=peer,
    )
    for name, (
        sms,
        l2,
        memory,
        half,
        single,
        rate,
        host,
        peer,
        watts,
    ) in _SHEETS.items()
}
"""The data sheets that everyone reads: `plan`, `project`, `rok` and `foresight`."""
A100_PCIE, A100_SXM, H100, H200, B200 = SPECS.values()


def links_of(spec: Spec) -> Links:
    """The host link of a data sheet, for machines whose own were not measured. Raises
    ConfigError: the data sheet does not name it."""
    if spec.host_gb_per_s is None:
        raise ConfigError(
            f"nothing is known of the host link of {spec.name}; measure it with "
            "`ssdtrain doctor --save FILE` and give --links FILE."
        )
    curve = Curve.straight(STARTUP_S, spec.host_gb_per_s * 1e9)
    return Links(d2h=curve, h2d=curve, copy_slowdown=COPY_SLOWDOWN)
