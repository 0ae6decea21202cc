"""What a user can set: `OffloadConfig`, checked at construction.

Only this file and the Hydra groups in `configs/offload/` know these names; `api`
passes plain values inwards, and the settings whole to what opens a target.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar

from ssdtrain.errors import ConfigError
from ssdtrain.quantities import (
    FIT,
    PARSE,
    Share,
    did_you_mean,
    fraction,
    parse_device_memory,
    parse_fields,
    parse_path,
    places,
    size,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

MIB = 1024 * 1024
MOST_THREADS = 1024
Function = TypeVar("Function", bound=Callable[..., Any])


class TargetRow(NamedTuple):
    """What lies after pinned host memory: what the code must know of a target."""

    opener: str
    """The function that opens it, "module:function": an `Opener` of storage/open.py."""
    name: str = "SSD"
    """As reports call it."""
    is_disk: bool = False
    """Whether the kernel counts what is written to it, and writes cost endurance."""
    needs_directory: bool = False
    """Whether nothing can be offloaded without a `directory`."""
    is_staged: bool = False
    """Whether host memory is its staging pool, from which all goes on at once; else
    what does not fit there goes on."""


_NOTHING = TargetRow("ssdtrain.storage.open:open_nothing")
_DISKS = TargetRow("ssdtrain.storage.open:open_disks", is_disk=True)


class Target(str, Enum):
    """Where offloaded activations rest: the table of targets, a row each. A test
    forbids to name one elsewhere; other code asks its row."""

    HOST = "host", _NOTHING
    """Pinned host memory."""
    SSD = "ssd", _DISKS._replace(needs_directory=True, is_staged=True)
    """Files on the SSD after `directory`, through a pinned staging pool."""
    TIERED = "tiered", _DISKS
    """Host memory first; what does not fit goes to the SSD."""

    _value_: str
    behind: TargetRow

    # The default is for type checkers, which take the look-up `Target("ssd")` for this.
    def __new__(cls, name: str, behind: TargetRow = _NOTHING) -> "Target":
        self = str.__new__(cls, name)
        self._value_, self.behind = name, behind
        return self


TargetName = Literal["host", "ssd", "tiered"]
"""The same names, for type checkers and editors; a test holds them equal."""


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
    """What is computed again instead of stored."""

    AUTO = "auto"
    """Use every cheap recipe that was admitted as bitwise equal on this device; matrix
    products and attention, too, where a plan weighs their time (`plan="auto"`)."""
    FULL = "full"
    """Use every recipe under any plan."""
    REGIONS = "regions"
    """Run the forward of every repeated module again in backward, from its inputs, as
    gradient checkpointing does; the inputs are moved or kept as `plan` says."""
    OFF = "off"
    """Rebuild nothing."""


class GpuDirect(str, Enum):
    """Whether the SSD target looks for a path past host memory (extra `gds`)."""

    AUTO = "auto"
    """Measure it against staging at attach (a few seconds, only where nvidia-fs is
    loaded) and take the faster way."""
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


Bytes = int | float | str
"""1048576, 1e9, "512MB" (10^6) or "8GiB" (2^30)."""
Place = str | os.PathLike[str]


class AdvancedOptions(TypedDict, total=False):
    """What only experiments set, for type checkers and editors: `advanced={...}`; taken
    without it as well."""

    host_bytes: Bytes | Share | None
    window_bytes: Bytes | None
    prefetch_bytes: Bytes | None
    ssd_rated_bytes: Bytes | None
    gpu_direct: GpuDirect | Literal["auto", "off"]
    io_threads: int
    trace: bool
    seed: int


class OffloadOptions(AdvancedOptions, total=False):
    """What `OffloadConfig` and `offload` accept as well.

    The fields and their meaning are those of `OffloadConfig`; a test holds them equal.
    """

    target: Target | TargetName
    directory: Place | Sequence[Place] | None
    device_memory: Bytes | Share | Literal["fit"] | None
    memory_budget: Bytes | Share | None
    max_overhead: float | str | None
    min_bytes: Bytes
    recompute: Recompute | Literal["auto", "full", "regions", "off"]
    regions: str | Sequence[str]
    plan: Place
    verify: Verify | Literal["off", "checksum", "shadow", False]
    write_budget: Bytes | None
    advanced: AdvancedOptions
    memory_budget_bytes: Bytes | Share | None
    """The old name of `memory_budget`."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of one `ssdtrain.offload` session.

    Sizes are bytes as a number or as text ("8GB" is 8e9, "8GiB" is 8 * 2**30),
    fractions a number or a percentage ("1%"), paths text or `Path` with `~` expanded.

    Raises:
        ConfigError: a field holds a value that can never work; the text names the
            field, the value and what to set.
    """

    target: Target = Target.TIERED
    """Where activations go. `tiered` without a `directory` means host memory only."""
    directory: str | tuple[str, ...] | None = places()
    """One directory, or several on different SSDs to spread the slots over."""
    device_memory: int | Share | str | None = field(
        default=None, metadata={PARSE: parse_device_memory}
    )
    """Device memory for everything, weights, gradients and optimizer included: the
    planner takes the fastest plan that fits. `fit`: what this process can get; a
    percentage is of the device's memory. None, and no other goal for `plan="auto"`:
    `fit`. On a CPU, whose memory swaps, everything fits."""
    memory_budget: int | Share | None = size(None, share=True)
    """Activation memory the planner must stay within (least time under it); a
    percentage is of the device's memory. `memory_budget_bytes` is its old name."""
    max_overhead: float | None = fraction(None)
    """Step-time overhead the planner may spend (least peak under it): 0.01 or "1%"."""
    min_bytes: int = size(MIB, least=0)
    """Tensors below this many bytes stay in device memory (not worth a transfer)."""
    recompute: Recompute = Recompute.AUTO
    """`auto`: rebuild cheap operators' outputs where bitwise equal; `regions`: run all
    repeated modules again; `off`: never."""
    regions: str | tuple[str, ...] = ()
    """Which modules run again under `regions`: paths or class names with wildcards
    ("model.layers.*", "LlamaDecoderLayer"); empty: the members of lists of modules."""
    plan: str = PlanChoice.AUTO.value
    """`auto`, `offload-all`, `keep-all`, or the path of a saved plan (JSON)."""
    verify: Verify = Verify.OFF
    """`off`, `checksum` or `shadow`."""
    write_budget: int | None = size(None)
    """Bytes that may be written to each SSD a day (endurance); None: no limit. A plan
    (`auto`) writes no more a step than fits if the run went on all day."""
    host_bytes: int | Share | None = size(None, share=True)
    """Cap of one rank's pinned host memory in bytes; a percentage is of what is
    available now, divided by the ranks of this machine; None: 50%."""
    window_bytes: int | None = size(None)
    """Bytes that may be on their way out before compute waits for the oldest;
    None: twice the largest tensor seen, at least 8 MiB."""
    prefetch_bytes: int | None = size(None)
    """Bytes loaded ahead of backward; None: one and a half of the largest tensor."""
    ssd_rated_bytes: int | None = size(None)
    """Bytes each SSD is rated to take over its life (data sheet: TBW); None: SMART."""
    gpu_direct: GpuDirect = GpuDirect.AUTO
    """`auto`: take GPUDirect Storage where it is measured faster; `off`: never."""
    io_threads: int = 4
    """Threads that write to and read from the SSD, each with one request."""
    trace: bool = False
    """Record a time line of every store and load (read by the trace report)."""
    seed: int = 0
    """Seeds everything ssdtrain itself draws at random (fault injection)."""

    if TYPE_CHECKING:  # wider than the fields, which hold what was parsed

        def __init__(self, **options: Unpack[OffloadOptions]) -> None: ...

    def __post_init__(self) -> None:
        parse_fields(self)
        self._coerce("target", Target)
        self._coerce("recompute", Recompute)
        self._coerce("gpu_direct", GpuDirect)
        self._coerce_verify()
        self._coerce_regions()
        self._check_plan()
        if self.target.behind.needs_directory and not self.directories:
            raise ConfigError(
                f"target={self.target.value!r} needs a directory on the "
                f"{self.target.behind.name}, got directory=None; set "
                "directory='/path/on/nvme', or target='host'."
            )
        if self.device_memory is not None and self.plan != PlanChoice.AUTO.value:
            raise ConfigError(
                "device_memory asks for the fastest plan that fits, so it expects "
                f"plan='auto', got plan={self.plan!r}; leave one of them out."
            )
        threads = self.io_threads
        if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
            raise ConfigError(
                f"io_threads expects an integer from 1 to {MOST_THREADS}, got "
                f"{threads!r}"
            )

    @property
    def wanted_memory(self) -> int | Share | str | None:
        """`device_memory`; `fit` where a plan is asked for without any goal."""
        goals = self.device_memory, self.memory_budget, self.max_overhead
        is_planned = self.plan == PlanChoice.AUTO.value
        if is_planned and all(goal is None for goal in goals):
            return FIT
        return self.device_memory

    @property
    def directories(self) -> tuple[str, ...]:
        """`directory` as a tuple, empty when none was given."""
        if self.directory is None:
            return ()
        return (self.directory,) if isinstance(self.directory, str) else self.directory

    @classmethod
    def merged(
        cls, config: "OffloadConfig | None", overrides: Mapping[str, Any]
    ) -> "OffloadConfig":
        """`config`, or the defaults, with `overrides` on top.

        Raises:
            ConfigError: unknown key or impossible value.
        """
        values = {} if config is None else dict(vars(config))
        return cls.from_mapping({**values, **_flat(overrides)})

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> "OffloadConfig":
        """Build from plain values; an unknown key is an error that lists the fields.

        Raises:
            ConfigError: unknown key or impossible value.
        """
        known = [f.name for f in fields(cls)]
        values = _flat(values)
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"unknown setting {key!r}{did_you_mean(key, known)}; known: "
                    f"{', '.join(known)}"
                )
        return cls(**values)

    def _coerce(self, name: str, enum: type[Enum]) -> None:
        value = getattr(self, name)
        try:
            object.__setattr__(self, name, enum(value))
        except ValueError:
            known = [member.value for member in enum]
            choices = ", ".join(map(repr, known))
            raise ConfigError(
                f"{name} expects {choices}, got {value!r}{did_you_mean(value, known)}"
            ) from None

    def _coerce_verify(self) -> None:
        if self.verify is False:  # type: ignore[comparison-overlap]
            object.__setattr__(self, "verify", Verify.OFF)
        self._coerce("verify", Verify)

    def _coerce_regions(self) -> None:
        value = (self.regions,) if isinstance(self.regions, str) else self.regions
        patterns = tuple(value) if isinstance(value, Sequence) else (None,)
        if not all(isinstance(each, str) and each for each in patterns):
            raise ConfigError(
                "regions expects paths or class names of modules such as "
                f"'model.layers.*' or 'LlamaDecoderLayer', got {self.regions!r}"
            )
        object.__setattr__(self, "regions", patterns)

    def _check_plan(self) -> None:
        """A path may be written later; a name with a slip is no path."""
        value = self.plan.value if isinstance(self.plan, PlanChoice) else self.plan
        plan = parse_path("plan", value)
        known = [choice.value for choice in PlanChoice]
        meant = did_you_mean(plan, known)
        if plan not in known and meant and not os.path.exists(plan):
            raise ConfigError(
                f"plan expects {', '.join(map(repr, known))} or the path of a saved "
                f"plan, got {plan!r}{meant}"
            )
        object.__setattr__(self, "plan", plan)


_ADVANCED = tuple(AdvancedOptions.__annotations__)
OLD_NAMES = {"memory_budget_bytes": "memory_budget"}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names of the fields: old names are taken, and what is in
    `advanced` stands next to the others.

    Raises:
        ConfigError: two names of one setting, or something else in `advanced`.
    """
    found = dict(values)
    advanced = found.pop("advanced", None) or {}
    if not isinstance(advanced, Mapping):
        raise ConfigError(
            "advanced expects a mapping such as {'io_threads': 8}, got "
            f"{type(advanced).__name__}"
        )
    for name in advanced:
        if name not in _ADVANCED:
            raise ConfigError(
                f"unknown advanced setting {name!r}{did_you_mean(name, _ADVANCED)}; "
                f"known: {', '.join(_ADVANCED)}"
            )
        if name in found:
            raise ConfigError(f"{name} is set twice, in advanced and beside it")
    found |= advanced
    for old, name in OLD_NAMES.items():
        value = found.pop(old, None)
        if value is None:
            continue
        if found.get(name) is not None:
            raise ConfigError(f"{name} is set twice: {old} is its old name")
        found[name] = value
    return found


# A dataclass writes its own `__init__`. Wrapped, it is still the one way in, also for
# `replace` and subclasses, and takes old names and `advanced` as `from_mapping` does.
_init = OffloadConfig.__init__


@functools.wraps(_init)
def _by_any_name(self: OffloadConfig, **options: Any) -> None:
    _init(self, **_flat(options))


OffloadConfig.__init__ = _by_any_name  # type: ignore[method-assign]


def with_options(function: Function) -> Function:
    """Show the fields of `OffloadConfig` in the signature of a function that takes them
    as `**overrides`: for `help()` and for completion in notebooks."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    fields_of = inspect.signature(OffloadConfig).parameters
    options = [each for name, each in fields_of.items() if name not in _ADVANCED]
    advanced = inspect.Parameter(
        "advanced",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=AdvancedOptions | None,
    )
    shown = signature.replace(parameters=[*own, *options, advanced])
    function.__signature__ = shown  # type: ignore[attr-defined]
    return function
