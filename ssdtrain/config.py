"""What a user can set: `OffloadConfig`, checked at construction.

Only this file and the Hydra groups in `configs/offload/` know these names; `api`
passes plain values inwards.
"""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from ssdtrain.errors import ConfigError

MIB = 1024 * 1024


class Target(str, Enum):
    """Where offloaded activations rest."""

    HOST = "host"
    """Pinned host memory."""
    SSD = "ssd"
    """Files on the SSD behind `directory`, through a pinned staging pool."""
    TIERED = "tiered"
    """Host memory first; what does not fit goes to the SSD."""


class PlanChoice(str, Enum):
    """The plans that have a name; any other value is the path of a saved plan."""

    AUTO = "auto"
    """Observe a step, then place each tensor by the goal below; observe again when the
    measured step drifts from the predicted one."""
    OFFLOAD_ALL = "offload-all"
    """Move every eligible tensor, and wait where the link is too slow."""
    KEEP_ALL = "keep-all"
    """Move nothing: the baseline, and the cost of the hooks alone."""


class Recompute(str, Enum):
    """Whether cheap deterministic operators are rebuilt instead of stored."""

    AUTO = "auto"
    """Use every recipe that was admitted as bitwise equal on this device."""
    OFF = "off"
    """Rebuild nothing."""


class GpuDirect(str, Enum):
    """Whether the SSD target looks for a path past host memory (extra `gds`)."""

    AUTO = "auto"
    """Measure kvikio's modes against staging at attach (a few seconds, only where
    kvikio can run) and take the fastest."""
    OFF = "off"
    """Always staging."""


class Verify(str, Enum):
    """Whether reloaded bytes are compared with the bytes that left."""

    OFF = "off"
    """Trust the storage."""
    CHECKSUM = "checksum"
    """Compare a digest computed on the device at pack and at unpack."""
    SHADOW = "shadow"
    """Keep every tensor as well and compare byte by byte (for debugging)."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of one `ssdtrain.offload` session.

    Raises:
        ConfigError: a field holds a value that can never work; the text names the
            field, the value and what to set.
    """

    target: Target = Target.TIERED
    """Where activations go. `tiered` without a `directory` means host memory only."""
    directory: str | tuple[str, ...] | None = None
    """One directory, or several on different SSDs to spread the slots over."""
    min_bytes: int = MIB
    """Tensors below this many bytes stay in device memory (not worth a transfer)."""
    host_bytes: int | None = None
    """Cap of one rank's pinned host memory in bytes; None: half of what is available
    now, divided by the ranks of this machine."""
    window_bytes: int | None = None
    """Bytes that may be on their way out before compute waits for the oldest;
    None: twice the largest tensor seen, at least 8 MiB."""
    prefetch_bytes: int | None = None
    """Bytes loaded ahead of backward; None: one and a half of the largest tensor."""
    memory_budget_bytes: int | None = None
    """Activation memory the planner must stay within (least time under it)."""
    max_overhead: float = 0.01
    """Step-time overhead the planner may spend (least peak under it); a fraction."""
    recompute: Recompute = Recompute.AUTO
    """`auto`: rebuild cheap operators' outputs where bitwise equal; `off`: never."""
    plan: str = PlanChoice.AUTO.value
    """`auto`, `offload-all`, `keep-all`, or the path of a saved plan (JSON)."""
    verify: Verify = Verify.OFF
    """`off`, `checksum` or `shadow`."""
    write_budget: int | None = None
    """Bytes that may be written to each SSD a day (endurance); None: no limit. A plan
    (`auto`) writes no more a step than fits if the run went on all day."""
    ssd_rated_bytes: int | None = None
    """Bytes each SSD is rated to take over its life (data sheet: TBW); None: SMART."""
    gpu_direct: GpuDirect = GpuDirect.AUTO
    """`auto`: take GPUDirect Storage where it is measured faster; `off`: never."""
    write_gb_per_s: float | None = None
    """Limit the storage to this write and read bandwidth in GB/s (experiments)."""
    io_threads: int = 4
    """Threads that write to and read from the SSD, each with one request."""
    trace: bool = False
    """Record a time line of every store and load (read by the trace report)."""
    seed: int = 0
    """Seeds everything ssdtrain itself draws at random (fault injection)."""

    def __post_init__(self) -> None:
        self._coerce("target", Target)
        self._coerce("recompute", Recompute)
        self._coerce("gpu_direct", GpuDirect)
        self._coerce_verify()
        if self.directory is not None and not isinstance(self.directory, str):
            object.__setattr__(self, "directory", tuple(map(str, self.directory)))
        if self.target is Target.SSD and not self.directories:
            raise ConfigError(
                "target='ssd' needs a directory on the SSD, got directory=None; set "
                "directory='/path/on/nvme', or target='host'."
            )
        for name in ("min_bytes",):
            self._at_least(name, 0)
        for name in ("host_bytes", "window_bytes", "prefetch_bytes", "io_threads"):
            self._at_least(name, 1)
        for name in ("memory_budget_bytes", "write_budget", "ssd_rated_bytes"):
            self._at_least(name, 1)
        if self.max_overhead < 0:
            raise ConfigError(
                f"max_overhead is a fraction of the step time (0.01 is one per cent), "
                f"got {self.max_overhead}; set it to 0 or more."
            )
        if self.write_gb_per_s is not None and self.write_gb_per_s <= 0:
            raise ConfigError(
                f"write_gb_per_s expects GB/s above 0, got {self.write_gb_per_s}; "
                "leave it None for no limit."
            )

    @property
    def directories(self) -> tuple[str, ...]:
        """`directory` as a tuple, empty when none was given."""
        if self.directory is None:
            return ()
        return (self.directory,) if isinstance(self.directory, str) else self.directory

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> "OffloadConfig":
        """Build from plain values; an unknown key is an error that lists the fields.

        Raises:
            ConfigError: unknown key or impossible value.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown setting {key!r}; known: {', '.join(known)}")
        return cls(**values)

    def _coerce(self, name: str, enum: type[Enum]) -> None:
        value = getattr(self, name)
        try:
            object.__setattr__(self, name, enum(value))
        except ValueError:
            choices = ", ".join(repr(member.value) for member in enum)
            raise ConfigError(f"{name} expects {choices}, got {value!r}") from None

    def _coerce_verify(self) -> None:
        if self.verify is False:  # type: ignore[comparison-overlap]
            object.__setattr__(self, "verify", Verify.OFF)
        self._coerce("verify", Verify)

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigError(f"{name} expects an integer >= {least}, got {value!r}")
