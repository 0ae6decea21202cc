"""Two runs of the same steps, one with ssdtrain: how much longer a step takes, and why.

The first steps are left out: they warm up, or are observed. No ratio is told where the
others differ too much, or other programs used the processors.

[Note: parts of a step] On a CPU the kernel says how long the thread that trains was on
a processor and how long it was ready while none was free; the session says how long it
waited for copies. The rest of the step it slept, waiting for another rank or thread. On
a GPU the parts are the device's waits and re-runs, which events on its stream measure.
(tests/ssdtrain/train/test_comparison.py)
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ssdtrain.summary import NOISY
from ssdtrain.train.processors import num_processors
from ssdtrain.train.tally import StepTally, Tally

T = TypeVar("T")
NUM_FIRST = 3
"""Steps that are left out where at least as many follow."""
BUSY = 0.1
"""Share of the processors from which on other programs spoil a comparison."""
LEAST_SHARE = 0.03
"""Of the step: a smaller difference is not explained."""
WORKED = "work of the training thread: the model, ssdtrain's hooks, tensors made again"
QUEUED = "the training thread was ready, and copies or another rank had the processors"
COPIES = "compute waited for copies"
SLEPT = "the training thread waited for another rank, or for other threads of its own"
AGAIN = "the device made tensors again"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A median step of each run."""

    without_ms: float
    with_ms: float
    parts_ms: dict[str, float] = field(default_factory=dict)
    """What the difference is made of, as measured. A negative part is time saved."""
    why_not: str = ""
    """Why they cannot be compared."""

    @property
    def ratio(self) -> float | None:
        """With ssdtrain over without; None: they cannot be compared."""
        return None if self.why_not else self.with_ms / self.without_ms

    @property
    def more_ms(self) -> float:
        """How much longer a step takes with ssdtrain."""
        return self.with_ms - self.without_ms

    @property
    def share(self) -> float | None:
        """Of the difference, what its parts explain; None: nothing is explained."""
        if self.why_not or abs(self.more_ms) < LEAST_SHARE * self.without_ms:
            return None
        return 1 - abs(self.more_ms - sum(self.parts_ms.values())) / abs(self.more_ms)

    def __str__(self) -> str:
        """A few lines to read."""
        if self.why_not:
            return f"Two runs: {self.why_not}."
        told = (
            f"Two runs compared: a step took {self.without_ms:.1f} ms without ssdtrain "
            f"and {self.with_ms:.1f} ms with it, x {self.ratio:.3f}, the first steps "
            "left out."
        )
        if self.share is None:
            return told
        parts = sorted(self.parts_ms.items(), key=lambda part: -abs(part[1]))
        told += f" What was measured of these {self.more_ms:+.1f} ms explains "
        told += f"{100 * max(0.0, self.share):.0f} %:"
        return "\n".join([told, *(f"  {ms:+.1f} ms: {name}" for name, ms in parts)])


def later(values: Sequence[T]) -> Sequence[T]:
    """Return the steps that count."""
    first = NUM_FIRST if len(values) >= 2 * NUM_FIRST else 1
    return values[first:] or values


def compare(
    without: Sequence[Tally], with_: Sequence[Tally], *, on_cpu: bool
) -> Comparison:
    """Compare the steps of all ranks; on a CPU no other program may have run."""
    why_not = ""
    for name, ranks in (("without ssdtrain", without), ("with it", with_)):
        times = later(ranks[0].step_ms)
        if max(times) > NOISY * min(times):
            why_not = f"steps {name} took {min(times):.0f} to {max(times):.0f} ms"
        elif on_cpu and (others := _others(ranks)) > BUSY:
            why_not = (
                f"other programs had {100 * others:.0f} % of the processors in the "
                f"steps {name}"
            )
    if why_not:
        why_not = f"not compared: {why_not}; run again on a machine that is idle"
    steps = (step for rank in (*without, *with_) for step in rank.steps)
    is_told = all(step.queued_ms is not None for step in steps)
    before, after = (
        _parts(ranks, on_cpu=on_cpu, is_told=is_told) for ranks in (without, with_)
    )
    return Comparison(
        without_ms=statistics.median(later(without[0].step_ms)),
        with_ms=statistics.median(later(with_[0].step_ms)),
        parts_ms={name: after[name] - before[name] for name in after},
        why_not=why_not,
    )


def _others(ranks: Sequence[Tally]) -> float:
    """Return the share of the processors' time that was neither the ranks' nor idle."""
    idle_ms = _mean(ranks[0], "idle_ms")
    if not idle_ms:
        return 0.0
    all_ms = num_processors() * _mean(ranks[0], "step_ms")
    return 1 - (sum(_mean(rank, "own_ms") for rank in ranks) + idle_ms) / all_ms


def _mean(rank: Tally, name: str) -> float:
    return float(statistics.mean(later([getattr(s, name) for s in rank.steps])))


def _parts(ranks: Sequence[Tally], *, on_cpu: bool, is_told: bool) -> dict[str, float]:
    """Return the parts in ms of the median steps, averaged over the ranks. See [Note:
    parts of a step]. `is_told`: the kernel tells queueing from sleeping."""
    times = ranks[0].step_ms
    counted = later(range(len(times)))
    order = sorted(counted, key=lambda at: times[at])
    middle = order[(len(order) - 1) // 2 : len(order) // 2 + 1]
    found: dict[str, float] = {}
    for rank in ranks:
        for at in middle:
            parts = _parts_of(rank.steps[at], on_cpu=on_cpu)
            if not is_told:
                parts.pop(SLEPT, None)
            for name, ms in parts.items():
                share = ms / len(ranks) / len(middle)
                found[name] = found.get(name, 0.0) + share
    return found


def _parts_of(step: StepTally, *, on_cpu: bool) -> dict[str, float]:
    if not on_cpu:
        return {COPIES: step.stall_ms, AGAIN: step.recompute_ms}
    queued_ms = step.queued_ms or 0.0
    awake_ms = step.worked_ms + queued_ms
    return {
        WORKED: step.worked_ms,
        QUEUED: queued_ms,
        COPIES: step.stall_ms,
        SLEPT: max(0.0, step.step_ms - awake_ms - step.stall_ms),
    }
