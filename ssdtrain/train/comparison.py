"""Two runs of the same steps, one with ssdtrain: how much longer a step takes, and why.

The first steps are left out: they warm up, are observed, or are the first ones under a
plan. Where the others differ too much among themselves, or other programs used the
processors, no ratio is told.
(tests/ssdtrain/train/test_comparison.py)
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.summary import NOISY
from ssdtrain.train.processors import num_processors
from ssdtrain.train.tally import Tally

NUM_FIRST = 3
"""Steps that are left out where at least as many follow."""
BUSY = 0.1
"""Share of the processors from which on other programs spoil a comparison."""
LEAST_SHARE = 0.03
"""Of the step: a smaller difference is not explained."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A median step of each run."""

    without_ms: float
    with_ms: float
    why_not: str = ""
    """Why they cannot be compared."""

    @property
    def ratio(self) -> float | None:
        """With ssdtrain over without; None: they cannot be compared."""
        return None if self.why_not else self.with_ms / self.without_ms


def later(values: Sequence[float]) -> Sequence[float]:
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
    return Comparison(
        without_ms=statistics.median(later(without[0].step_ms)),
        with_ms=statistics.median(later(with_[0].step_ms)),
        why_not=why_not,
    )


def _others(ranks: Sequence[Tally]) -> float:
    """Return the share of the processors' time that was neither these ranks' nor idle;
    0.0: the kernel does not say."""
    idle_ms = _idle_ms(ranks[0])
    if not idle_ms:
        return 0.0
    all_ms = num_processors() * statistics.mean(later(ranks[0].step_ms))
    return 1 - (_own_ms(ranks) + idle_ms) / all_ms


def explained(without: Sequence[Tally], with_: Sequence[Tally], *, on_cpu: bool) -> str:
    """Return how the steps of all ranks compare, and on a CPU what the difference is
    made of: work of the processors, and time in which they had none."""
    found = compare(without, with_, on_cpu=on_cpu)
    if found.why_not:
        return f"Two runs: {found.why_not}."
    more_ms = found.with_ms - found.without_ms
    told = (
        f"Two runs compared: a step took {found.without_ms:.1f} ms without ssdtrain "
        f"and {found.with_ms:.1f} ms with it, "
        f"x {found.with_ms / found.without_ms:.3f}, the first steps left out."
    )
    is_small = abs(more_ms) < LEAST_SHARE * found.without_ms
    if not on_cpu or is_small or not _idle_ms(with_[0]):
        return told
    own_ms = (_own_ms(with_) - _own_ms(without)) / num_processors()
    idle_ms = (_idle_ms(with_[0]) - _idle_ms(without[0])) / num_processors()
    share = 1 - abs(more_ms - own_ms - idle_ms) / abs(more_ms)
    return (
        f"{told} Of these {more_ms:.0f} ms, ssdtrain's copies, writes, re-runs and "
        f"hooks took the processors {own_ms:.0f} ms, and {idle_ms:.0f} ms they waited, "
        "for copies, the disk or another rank (a negative time is one that was "
        f"saved). That explains {100 * max(0.0, share):.0f} %; other programs have "
        "the rest."
    )


def _own_ms(ranks: Sequence[Tally]) -> float:
    return sum(statistics.mean(later(tally.own_ms)) for tally in ranks if tally.own_ms)


def _idle_ms(tally: Tally) -> float:
    return statistics.mean(later(tally.idle_ms)) if tally.idle_ms else 0.0
