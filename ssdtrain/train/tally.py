"""What the steps of a run add up to on one rank, kept next to its checkpoints: a run
that goes on begins with these figures, and with the plan that they ended with."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import ssdtrain
from ssdtrain.api import Session
from ssdtrain.jsonfile import Duration, Format, Natural
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.train.disk import Written
from ssdtrain.train.kept import keep, kept_in
from ssdtrain.train.runner import Workload

BYTES = (
    *("bytes_saved", "bytes_kept", "bytes_offloaded", "bytes_recomputed"),
    *("bytes_forwarded", "bytes_reloaded", "bytes_written"),
)
TIMES = ("stall_ms", "recompute_ms")
REMEDY = "remove it, and the result counts the steps from here on alone"


@dataclass(frozen=True, kw_only=True)
class StepTally:
    """Figures of one step. Times are in ms; see `processors.Spent` for the clocks."""

    loss_hex: str
    """`float.hex()`: exact, and JSON has no NaN."""
    step_ms: Duration
    peak_bytes: Natural
    """Allocated on a GPU, saved tensors on a CPU."""
    worked_ms: Duration = 0.0
    queued_ms: Duration | None = None
    own_ms: Duration = 0.0
    idle_ms: Duration = 0.0
    stall_ms: Duration = 0.0
    """Compute waited for a copy."""
    recompute_ms: Duration = 0.0
    """Tensors were made again."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Figures of consecutive steps."""

    first: Natural = 0
    """The number of the first one, from 0."""
    steps: tuple[StepTally, ...] = ()
    bytes: Mapping[str, Natural] = field(default_factory=dict)
    """Sums of the reports' `BYTES`; empty without one."""
    fallbacks: Mapping[str, Natural] = field(default_factory=dict)
    process_bytes: int | None = 0
    device_bytes: int | None = 0
    """Written, by the operating system's counters, checkpoints excluded."""

    @property
    def loss_bits(self) -> tuple[str, ...]:
        """The loss of each step, exactly: NaN equals itself."""
        return tuple(step.loss_hex for step in self.steps)

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each step."""
        return tuple(map(float.fromhex, self.loss_bits))

    @property
    def step_ms(self) -> tuple[float, ...]:
        """The time of each step."""
        return tuple(step.step_ms for step in self.steps)

    @property
    def written(self) -> Written:
        """By the operating system's counters."""
        return Written(self.process_bytes, self.device_bytes)

    @property
    def peak_bytes(self) -> int:
        """The highest of all steps."""
        return max((step.peak_bytes for step in self.steps), default=0)

    @property
    def totals(self) -> dict[str, Any]:
        """Bytes and times of all reports; empty without one."""
        if not self.bytes:
            return {}
        times = {name: sum(getattr(s, name) for s in self.steps) for name in TIMES}
        return {**self.bytes, **times}

    def until(self, step: int) -> "Tally":
        """Return the steps before this one, of a run without ssdtrain."""
        return replace(self, steps=self.steps[: max(0, step - self.first)])


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of two mappings, key by key."""
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


@dataclass(frozen=True, kw_only=True)
class _Saved:
    legs: Mapping[str, Tally]


_TALLY = Format(
    kind=_Saved,
    schema="ssdtrain-tally",
    version=2,
    what="the figures of the steps before a checkpoint",
    remedy=REMEDY,
)


class Beside:
    """One rank's files next to the checkpoints of its run."""

    def __init__(self, workload: Workload) -> None:
        settings, ranks = workload.settings, workload.ranks
        checkpoints = Path(settings.run_directory) / "checkpoints"
        resume = settings.train.resume
        self._checkpoints = checkpoints
        self._directory = checkpoints / f"rank{ranks.rank}"
        # Otherwise the checkpoint is another run's: its steps are not this one's.
        self._goes_on = resume is not None and (
            Path(resume).expanduser().resolve() == checkpoints.resolve()
        )
        self._conditions = _conditions(workload)
        self._ranks = ranks
        self._so_far: dict[str, Tally] = {}

    def begin(self, first: int, legs: Sequence[str]) -> None:
        """Read the figures of the steps before number `first`, if all legs and ranks
        have them. Raises DamagedFileError: the file holds something else."""
        path, found = self._tally_path(first), {}
        if self._goes_on and path.is_file():
            found = dict(_TALLY.read(path).legs)
        begins = [found[leg].first if leg in found else None for leg in legs]
        agreed = {one for rank in self._ranks.gather(begins) for one in rank}
        self._so_far = found if len(agreed) == 1 and None not in agreed else {}

    def so_far(self, leg: str, first: int) -> Tally:
        """Return the figures of a leg that goes on with step number `first`."""
        return self._so_far.get(leg, Tally(first=first))

    def plan(self) -> tuple[Plan, Profile] | None:
        """Return what the run before followed, if the machine, its software and the
        settings are the same. Raises DamagedFileError: other data."""
        if not self._goes_on:
            return None
        return kept_in(self._checkpoints, self._conditions)

    def note(self, leg: str, own: Tally) -> None:
        """Remember the steps of a leg so far."""
        self._so_far[leg] = own

    def save(self, leg: str, next_step: int, session: Session | None) -> None:
        """Write what was noted up to this step's checkpoint, and the plan of `leg`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        legs = {
            name: tally if name == leg else tally.until(next_step)
            for name, tally in self._so_far.items()
        }
        _TALLY.write(self._tally_path(next_step), _Saved(legs=legs))
        if session is not None and session.is_settled:
            keep(session, self._conditions, self._checkpoints)

    def saved(self, next_step: int) -> None:
        """Remove the figures of older checkpoints: this one is complete."""
        for path in self._directory.glob("tally-*.json"):
            if path != self._tally_path(next_step):
                path.unlink()

    def _tally_path(self, next_step: int) -> Path:
        return self._directory / f"tally-{next_step}.json"


def _conditions(workload: Workload) -> dict[str, object]:
    """Return what a profile depends on."""
    settings, ranks = workload.settings, workload.ranks
    device = ranks.device()
    on_gpu = device.type == "cuda"
    return {
        "machine": platform.node(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
        "ranks": (ranks.rank, ranks.world_size),
        "torch": str(torch.__version__),
        "ssdtrain": ssdtrain.__version__,
        "offload": settings.offload,
        "model": settings.model,
        "engine": settings.engine,
        "parallel": settings.parallel,
        "micro_batch_size": settings.train.micro_batch_size,
        "num_micro_batches": settings.train.num_micro_batches,
        "precision": settings.train.precision,
    }
