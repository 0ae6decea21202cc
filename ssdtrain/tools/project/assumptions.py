"""Every assumption of the model, named, with the source's value as default."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from ssdtrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Chapter 5's assumptions (5.2.2, 5.3.6, 5.4.4), each one to vary."""

    rated_write_amplification: float = 2.5
    """Media writes per host write in the JESD219 rating workload (random writes)."""
    write_amplification: float = 1.0
    """The same for large sequential writes into slots that are reused whole."""
    sequential_factor: float = 1.0
    """Further host writes a drive allows for sequential data, where its vendor rates
    that apart (D7-P5810: 65 / 50 writes a day). Not on top of the amplification."""
    retention_factor: float = 1.0
    """More program/erase cycles when data need not be kept for three years; 86 for
    one day (5.3.6), where the drive's firmware allows it."""
    step_per_forward: float = 3.0
    """Step time over forward time: backward takes twice as long as forward."""
    write_window: float = 0.5
    """Part of the step in which activations are written."""
    matmul_efficiency: float = 0.5
    """Reached over peak throughput of matrix products, where a case brings no
    measured throughput (Megatron-LM reaches 0.44 to 0.52 end to end on A100)."""
    memory_efficiency: float = 0.9
    """Reached over peak bandwidth of the GPU's memory."""
    resident_layers: float = 2.0
    """Layers whose activations are in GPU memory at once while all others are away."""
    state_bytes: float = 16.0
    """Bytes of training state a parameter: fp16 weight, gradient; fp32 weight, Adam."""
    gathered_layers: float = 0.0
    """Layers whose whole fp16 weights ZeRO-3 has gathered on each GPU. The source
    counts none; 1 or 2 is what really happens (docs/project.md)."""
    dropout_mask_bytes: float = 1.0
    """Bytes an element of a saved dropout mask; 0 without dropout."""
    network_gb_per_s: float = 25.0
    """One direction a GPU between nodes (one HDR InfiniBand port: 25)."""
    electricity_usd_per_kwh: float = 0.12
    """Price of energy."""
    power_overhead: float = 1.3
    """Watts drawn by the building for a watt of the device (PUE)."""

    def __post_init__(self) -> None:
        zero_allowed = ("gathered_layers", "dropout_mask_bytes")
        for field in fields(self):
            value = getattr(self, field.name)
            low_enough = value >= 0 if field.name in zero_allowed else value > 0
            if not low_enough:
                bound = "0 or more" if field.name in zero_allowed else "more than 0"
                raise ConfigError(f"{field.name} expects {bound}, got {value}")

    @property
    def endurance_factor(self) -> float:
        """Bytes we may write over bytes the rating allows."""
        relief = self.rated_write_amplification / self.write_amplification
        return relief * self.sequential_factor * self.retention_factor

    def changed(self, settings: Iterable[str]) -> "Assumptions":
        """Return a copy with `NAME=VALUE` settings applied. Raises ConfigError: unknown
        name, no number, or an impossible value."""
        known = [field.name for field in fields(self)]
        values: dict[str, float] = {}
        for setting in settings:
            name, equals, text = setting.partition("=")
            if name not in known or not equals:
                raise ConfigError(
                    f"an assumption is NAME=VALUE, got {setting!r}; names: "
                    f"{', '.join(known)}"
                )
            try:
                values[name] = float(text)
            except ValueError:
                raise ConfigError(f"{name} expects a number, got {text!r}") from None
        return replace(self, **values)
