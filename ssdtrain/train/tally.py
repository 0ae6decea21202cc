"""What the steps of a run add up to on one rank, kept beside its checkpoints.

A run that goes on from a checkpoint begins with the figures of the steps that led to
it, and with the plan that they ended with: its result is that of the whole run.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import ssdtrain
from ssdtrain.api import Session
from ssdtrain.counters import StepReport
from ssdtrain.jsonfile import Duration, Format, Natural
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.train.disk import Written
from ssdtrain.train.processors import Spent
from ssdtrain.train.runner import Workload

BYTES = (
    "bytes_saved",
    "bytes_kept",
    "bytes_offloaded",
    "bytes_recomputed",
    "bytes_forwarded",
    "bytes_reloaded",
    "bytes_written",
)
TIMES = ("stall_ms", "recompute_ms")
REMEDY = "remove it, and the result counts the steps from here on alone"


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Figures of consecutive steps."""

    first: Natural = 0
    """The number of the first one, from 0."""
    losses_hex: tuple[str, ...] = ()
    """`float.hex()` of each step's loss: exact, and JSON has no NaN."""
    step_ms: tuple[Duration, ...] = ()
    own_ms: tuple[Duration, ...] = ()
    """Processor time of each step, of this rank."""
    idle_ms: tuple[Duration, ...] = ()
    """Of each step: time in which the machine's processors had nothing to do."""
    peaks: tuple[Natural, ...] = ()
    """Peak of each step in bytes: allocated on a GPU, saved tensors on a CPU."""
    bytes: Mapping[str, Natural] = field(default_factory=dict)
    """Sums of the reports; empty without one."""
    times: Mapping[str, Duration] = field(default_factory=dict)
    fallbacks: Mapping[str, Natural] = field(default_factory=dict)
    process_bytes: int | None = 0
    device_bytes: int | None = 0
    """Written, by the operating system's counters."""

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each step."""
        return tuple(map(float.fromhex, self.losses_hex))

    @property
    def written(self) -> Written:
        """By the operating system's counters, checkpoints excluded."""
        return Written(self.process_bytes, self.device_bytes)

    @property
    def peak_bytes(self) -> int:
        """The highest of all steps."""
        return max(self.peaks, default=0)

    @property
    def totals(self) -> dict[str, Any]:
        """Bytes and times of all reports; empty without one."""
        return {**self.bytes, **self.times}

    def and_then(self, later: "Tally") -> "Tally":
        """Return the figures of these steps and those behind them."""
        done = self.written.plus(later.written)
        return Tally(
            first=self.first,
            losses_hex=(*self.losses_hex, *later.losses_hex),
            step_ms=(*self.step_ms, *later.step_ms),
            own_ms=(*self.own_ms, *later.own_ms),
            idle_ms=(*self.idle_ms, *later.idle_ms),
            peaks=(*self.peaks, *later.peaks),
            bytes=added(self.bytes, later.bytes),
            times=added(self.times, later.times),
            fallbacks=added(self.fallbacks, later.fallbacks),
            process_bytes=done.process_bytes,
            device_bytes=done.device_bytes,
        )

    def until(self, step: int) -> "Tally":
        """Return the steps before this one, of a run without ssdtrain: it has no
        reports, and writes nothing."""
        num_steps = max(0, step - self.first)
        return Tally(
            first=self.first,
            losses_hex=self.losses_hex[:num_steps],
            step_ms=self.step_ms[:num_steps],
            own_ms=self.own_ms[:num_steps],
            idle_ms=self.idle_ms[:num_steps],
            peaks=self.peaks[:num_steps],
            process_bytes=self.process_bytes,
            device_bytes=self.device_bytes,
        )


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of two mappings, key by key."""
    return {
        key: one.get(key, 0) + other.get(key, 0)
        for key in dict.fromkeys([*one, *other])
    }


class Tallying:
    """Adds up the steps of one leg on one rank."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._losses: list[float] = []
        self._step_ms: list[float] = []
        self._spent: list[Spent] = []
        self._peaks: list[int] = []
        self._bytes: dict[str, int] = {}
        self._times: dict[str, float] = {}
        self._fallbacks: dict[str, int] = {}

    def step(self, loss: float, step_ms: float, spent: Spent, peak_bytes: int) -> None:
        """Count a step."""
        self._spent.append(spent)
        self._losses.append(loss)
        self._step_ms.append(step_ms)
        self._peaks.append(peak_bytes)

    def report(self, report: StepReport) -> None:
        """Count what ssdtrain says of the step."""
        values = report.as_dict()
        self._bytes = added(self._bytes, {name: values[name] for name in BYTES})
        self._times = added(self._times, {name: values[name] for name in TIMES})
        self._fallbacks = added(self._fallbacks, report.fallbacks)

    def tally(self, done: Written) -> Tally:
        """Return the figures so far; `done` was written meanwhile."""
        return Tally(
            first=self._first,
            losses_hex=tuple(loss.hex() for loss in self._losses),
            step_ms=tuple(self._step_ms),
            own_ms=tuple(spent.own_ms for spent in self._spent),
            idle_ms=tuple(spent.idle_ms for spent in self._spent),
            peaks=tuple(self._peaks),
            bytes=self._bytes,
            times=self._times,
            fallbacks=self._fallbacks,
            process_bytes=done.process_bytes,
            device_bytes=done.device_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class _Saved:
    legs: Mapping[str, Tally]


@dataclass(frozen=True, kw_only=True)
class _Planned:
    conditions: Mapping[str, str]
    """Under which the profile was observed."""
    plan: Plan
    profile: Profile


_TALLY = Format(
    kind=_Saved,
    schema="ssdtrain-tally",
    version=1,
    what="the figures of the steps before a checkpoint",
    remedy=REMEDY,
)
_PLANNED = Format(
    kind=_Planned,
    schema="ssdtrain-checkpoint-plan",
    version=1,
    what="the plan of a checkpoint",
    remedy="remove it, and the run observes its steps again",
)


class Beside:
    """One rank's files beside the checkpoints of its run."""

    def __init__(self, workload: Workload) -> None:
        settings, ranks = workload.settings, workload.ranks
        checkpoints = Path(settings.run_directory) / "checkpoints"
        resume = settings.train.resume
        self._directory = checkpoints / f"rank{ranks.rank}"
        # Otherwise the checkpoint is another run's: its steps are not this one's.
        self._goes_on = resume is not None and (
            Path(resume).expanduser().resolve() == checkpoints.resolve()
        )
        self._conditions = _conditions(workload)
        self._earlier: Mapping[str, Tally] = {}
        self._so_far: dict[str, Tally] = {}

    def begin(self, first: int) -> None:
        """Read the figures of the steps before number `first`, if they are this run's.

        Raises:
            DamagedFileError: the file holds something else.
        """
        path = self._tally_path(first)
        if self._goes_on and path.is_file():
            self._earlier = _TALLY.read(path).legs

    def earlier(self, leg: str) -> Tally | None:
        """Return the figures of the steps before the first one; None: unknown."""
        return self._earlier.get(leg)

    def plan(self) -> tuple[Plan, Profile] | None:
        """Return what the run before followed, if this machine, its software and the
        settings are the same.

        Raises:
            DamagedFileError: the file holds something else.
        """
        path = self._directory / "plan.json"
        if not self._goes_on or not path.is_file():
            return None
        found = _PLANNED.read(path)
        if found.conditions != self._conditions:
            return None
        return found.plan, found.profile

    def note(self, leg: str, own: Tally) -> None:
        """Remember the steps of a leg so far, without those before it."""
        earlier = self._earlier.get(leg)
        self._so_far[leg] = own if earlier is None else earlier.and_then(own)

    def save(self, leg: str, next_step: int, session: Session | None) -> None:
        """Write what was noted, up to the checkpoint of this step, and the plan that
        `leg` follows."""
        self._directory.mkdir(parents=True, exist_ok=True)
        legs = {
            name: tally if name == leg else tally.until(next_step)
            for name, tally in self._so_far.items()
        }
        _TALLY.write(self._tally_path(next_step), _Saved(legs=legs))
        if session is None or not session.is_settled:
            return
        plan, profile = session.plan, session.profile
        if plan is not None and profile is not None:
            saved = _Planned(conditions=self._conditions, plan=plan, profile=profile)
            _PLANNED.write(self._directory / "plan.json", saved)

    def saved(self, next_step: int) -> None:
        """Remove the figures of older checkpoints: this one is complete."""
        for path in self._directory.glob("tally-*.json"):
            if path != self._tally_path(next_step):
                path.unlink()

    def _tally_path(self, next_step: int) -> Path:
        return self._directory / f"tally-{next_step}.json"


def _conditions(workload: Workload) -> dict[str, str]:
    """Return what a profile depends on."""
    settings, ranks = workload.settings, workload.ranks
    device = ranks.device()
    on_gpu = device.type == "cuda"
    values = {
        "machine": platform.node(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
        "ranks": [ranks.rank, ranks.world_size],
        "torch": torch.__version__,
        "ssdtrain": ssdtrain.__version__,
        "offload": settings.offload,
        "model": asdict(settings.model),
        "engine": asdict(settings.engine),
        "parallel": asdict(settings.parallel),
        "micro_batch_size": settings.train.micro_batch_size,
        "num_micro_batches": settings.train.num_micro_batches,
        "precision": settings.train.precision,
    }
    return {name: json.dumps(value, default=str) for name, value in values.items()}
