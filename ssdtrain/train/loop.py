"""One run from its first step to its last: with ssdtrain attached, or without."""

import os
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain.api import Session, offload
from ssdtrain.config import OffloadConfig
from ssdtrain.counters import StepReport
from ssdtrain.errors import ConfigError
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.storage.directory import check_directory
from ssdtrain.storage.open import RankId, fill, names_a_rank
from ssdtrain.train import memory
from ssdtrain.train.disk import Written, file_systems, written
from ssdtrain.train.memory import MemoryMeter, MemorySample
from ssdtrain.train.metrics import Sinks
from ssdtrain.train.processors import Processors
from ssdtrain.train.runner import Runner, Workload
from ssdtrain.train.settings import RunSettings
from ssdtrain.train.stop import Stop, StoppedError
from ssdtrain.train.tally import BYTES, Beside, StepTally, Tally, added

_CHECKSUM_CHUNK = 2**24
"""Bytes of weights widened to int64 at once."""


class Leg(str, Enum):
    """The two runs of a comparison."""

    WITHOUT = "without ssdtrain"
    WITH = "with ssdtrain"


@dataclass(frozen=True, kw_only=True)
class LegResult:
    """One run on one rank; picklable."""

    leg: str
    own: Tally
    """Figures of its steps, with those before the checkpoint that it goes on from."""
    weights_checksum: int
    """Sum of the final weights' bits (see `weights_checksum`)."""
    course: tuple[MemorySample, ...]
    """Memory over the last step; sampled with ssdtrain, exact without."""
    explained: str
    """`Session.explain()` after the last step; empty without ssdtrain."""
    profile: Profile | None
    """What the planner observed; None without one."""
    plan: Plan | None
    """In force at the end."""
    spans: tuple[tuple[Any, ...], ...]
    """The session's time line, empty unless `offload.trace` is set."""
    file_systems: tuple[str, ...] = ()
    """Types of those that this rank's directories are on."""


def weights_checksum(module: nn.Module) -> int:
    """Return the sum of all weights read as integers: equal weights give equal sums,
    and one flipped bit gives another. Under ZeRO-3 the rank's own shards are summed."""
    total = 0
    for parameter in module.parameters():
        own: Tensor = getattr(parameter, "ds_tensor", parameter).detach()
        bits = own.contiguous().view(-1).view(torch.uint8)
        for start in range(0, bits.numel(), _CHECKSUM_CHUNK):
            chunk = bits[start : start + _CHECKSUM_CHUNK].to(torch.int64)
            places = torch.arange(chunk.numel(), dtype=torch.int64, device=chunk.device)
            places = places % 251 + 1
            total += int((chunk * places).sum())
    return total


def offload_directories(workload: Workload) -> tuple[str, ...]:
    """Return the directories for `ssdtrain.offload`: below each configured one a
    directory of this rank; names with placeholders (`{rank}`) unchanged."""
    values = workload.settings.offload
    names = OffloadConfig.from_mapping(values).directories if values else ()
    below = f"rank{workload.ranks.rank}"
    return tuple(
        name if names_a_rank(name) else os.path.join(name, below) for name in names
    )


def storage_directories(workload: Workload) -> tuple[str, ...]:
    """Return the directories of this rank, placeholders filled in."""
    ranks = workload.ranks
    place = RankId(ranks.rank, ranks.local_rank, ranks.local_size)
    return tuple(fill(name, place) for name in offload_directories(workload))


def _attach(runner: Runner, workload: Workload) -> Session:
    """Attach `ssdtrain.offload` to the runner's module or engine."""
    values = dict(workload.settings.offload)
    values["directory"] = offload_directories(workload) or None
    return offload(runner.attachable, OffloadConfig.from_mapping(values))


def make_directories(workload: Workload) -> None:
    """Make this rank's directory in each that is configured. That one has to exist, as
    for `ssdtrain.offload`, unless it lies in the run's own directory. Raises
    ConfigError: it does not exist, or is no place for activations."""
    run = Path(workload.settings.run_directory).absolute()
    given = offload_directories(workload)
    for name, place in zip(given, storage_directories(workload), strict=True):
        parent = Path(place).absolute().parent
        if parent.is_relative_to(run):
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A placeholder names a drive that may be missing on this rank: not made up.
        if names_a_rank(name) and not parent.is_dir():
            continue
        with warnings.catch_warnings():  # the session warns of it, once
            warnings.simplefilter("ignore")
            check_directory(parent)
        try:
            Path(place).mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"offload.directory={parent} cannot be written to ({error.strerror}); "
                "set it to a directory where you may make files."
            ) from error


def first_step(workload: Workload, runner: Runner) -> int:
    """Load the checkpoint of `train.resume`, if any; return the step that comes next.
    Raises ConfigError: there is none, it is not of this model, or no step is left."""
    settings = workload.settings.train
    first = runner.load(settings.resume) if settings.resume else 0
    if first >= settings.steps:
        raise ConfigError(
            f"the checkpoint has all {settings.steps} steps behind it; set "
            f"train.steps above {first} to go on."
        )
    return first


class Loop:
    """Steps of one leg and what is recorded about them."""

    def __init__(
        self,
        workload: Workload,
        runner: Runner,
        leg: Leg,
        *,
        sinks: Sinks,
        stop: Stop,
        first: int,
        beside: Beside,
    ) -> None:
        """first: the step to begin with, of `first_step`."""
        self._workload = workload
        self._settings = workload.settings.train
        self._runner = runner
        self._leg = leg
        self._sinks = sinks
        self._stop = stop
        self._first = first
        self._beside = beside
        self._saved_step = first
        """The step that the newest checkpoint goes on with; 0: there is none."""
        self._own = beside.so_far(leg.value, first)
        self._steps = list(self._own.steps)
        self._num_reported = 0
        """Steps that the session has reported."""
        self._course: list[MemorySample] = []
        self._directories = storage_directories(workload)
        self._session = _attach(runner, workload) if leg is Leg.WITH else None
        self._before = self._saved = Written(0, 0)
        """Written before the first step, and by checkpoints since."""

    def run(self) -> LegResult:
        """Train all steps; the session, if any, is closed before returning."""
        with self._session or nullcontext() as session:
            if session is not None:
                self._follow_earlier(session)
            watch = _watch(session, least_bytes(self._workload.settings))
            self._before = written(self._directories)
            for step in range(self._first, self._settings.steps):
                self._step(step, watch)
                self._checkpoint(step)
                self._stop_if_asked(step)
            own = self._tally()
            spans = () if session is None else tuple(session.trace.spans())
            explained = "" if session is None else session.explain()
            profile = None if session is None else session.profile
            plan = None if session is None else session.plan
        self._beside.note(self._leg.value, own)
        return LegResult(
            leg=self._leg.value,
            own=own,
            weights_checksum=weights_checksum(_module(self._runner)),
            course=tuple(self._course),
            explained=explained,
            profile=profile,
            plan=plan,
            spans=tuple(tuple(span) for span in spans),
            file_systems=file_systems(self._directories),
        )

    def _follow_earlier(self, session: Session) -> None:
        """Follow the run's earlier plan, if all ranks have one."""
        found = self._beside.plan()
        if all(self._workload.ranks.gather(found is not None)) and found is not None:
            session.follow(*found)

    def _step(self, step: int, watch: MemoryMeter) -> None:
        start_ns, processors = time.monotonic_ns(), Processors()
        with watch:
            loss = self._runner.step(step)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        # In this order: the other clocks never tell of more than the step took.
        spent, step_ms = processors.take(), (time.monotonic_ns() - start_ns) / 1e6
        values: dict[str, Any] = {"loss": loss, "step_ms": step_ms, "phase": ""}
        peak, self._course = watch.take()
        stall_ms = recompute_ms = 0.0
        if self._session is not None:
            self._session.trace.add("compute", f"step {step + 1}", start_ns, 0)
            values["phase"] = "observing"
            if self._session.is_settled:
                is_planned = self._session.plan is not None
                values["phase"] = "following" if is_planned else "fixed policy"
            report = self._reported(self._session)
            if report is not None:
                peak = report.saved_peak_bytes
                if report.allocated is not None:
                    peak = report.allocated.forward_backward_bytes
                stall_ms, recompute_ms = report.stall_ms, report.recompute_ms
                self._add(report)
                values |= {**report.as_dict(), "step": step}
        tally = StepTally(
            loss_hex=loss.hex(),
            step_ms=step_ms,
            peak_bytes=peak,
            stall_ms=stall_ms,
            recompute_ms=recompute_ms,
            **spent._asdict(),
        )
        self._steps.append(tally)
        self._sinks.write(self._leg.value, step, {**values, "peak_bytes": peak})

    def _add(self, report: StepReport) -> None:
        values = {name: getattr(report, name) for name in BYTES}
        self._own = replace(
            self._own,
            bytes=added(self._own.bytes, values),
            fallbacks=added(self._own.fallbacks, report.fallbacks),
        )

    def _reported(self, session: Session) -> StepReport | None:
        """Return the report of the step that has ended; None if there is none, as
        nothing was saved that is large enough."""
        report = session.last_step
        if report is None or report.step < self._num_reported:
            return None
        self._num_reported = report.step + 1
        return report

    def _tally(self) -> Tally:
        done = written(self._directories).since(self._before).since(self._saved)
        done = self._own.written.plus(done)
        return replace(self._own, steps=tuple(self._steps), **done._asdict())

    @property
    def _is_saved(self) -> bool:
        """Whether this run writes checkpoints; of a comparison only the second does."""
        alone = not (self._settings.compare and self._workload.settings.offload)
        return self._settings.checkpoint_every > 0 and (self._leg is Leg.WITH or alone)

    def _checkpoint(self, step: int) -> None:
        """Save a checkpoint if one is due, and after the last step."""
        done, last = step + 1, self._settings.steps
        every = self._settings.checkpoint_every
        if self._is_saved and (done == last or not done % every):
            self._save(done)

    def _save(self, next_step: int) -> None:
        self._beside.note(self._leg.value, self._tally())
        before = written(self._directories)
        directory = Path(self._workload.settings.run_directory) / "checkpoints"
        self._beside.save(self._leg.value, next_step, self._session)
        self._runner.save(str(directory), next_step)
        self._beside.saved(next_step)
        self._saved = self._saved.plus(written(self._directories).since(before))
        self._saved_step = next_step

    def _stop_if_asked(self, step: int) -> None:
        signum = self._stop.agreed(self._workload.ranks)
        if not signum:
            return
        if self._is_saved and self._saved_step != step + 1:
            self._save(step + 1)
        raise StoppedError(signum, self._leg.value, step + 1, self._saved_step > 0)


def least_bytes(settings: RunSettings) -> int:
    """Return the size below which saved tensors are in neither run's count on a CPU."""
    if not settings.offload:
        return 0
    return OffloadConfig.from_mapping(settings.offload).min_bytes


def _module(runner: Runner) -> nn.Module:
    attached = runner.attachable
    if isinstance(attached, list):
        return nn.ModuleList(attached)
    module: nn.Module = getattr(attached, "module", attached)
    return module if isinstance(module, nn.Module) else attached


def _watch(session: Session | None, least: int) -> MemoryMeter:
    """Watch the same bytes in both runs of a comparison."""
    if torch.cuda.is_available():
        return memory.AllocatorWatch(alone=session is None)
    if session is not None:
        return memory.SampledWatch(lambda: session.live_bytes)
    return memory.SavedObserver(least)
