"""Which of the plans that were tried is followed: the clock decides.

[Note: tries]
A prediction orders plans; it does not know what a step takes on a machine that nobody
has measured. So every plan is tried for a few steps before it stays. Under a memory
limit the fastest one does, and the plan that runs all regions again, which costs what
checkpointing does, is tried as well where it fits. Under a limit in time the one with
the least memory does, of those that keep it. A plan whose steps took longer than it
said makes copies and hooks more expensive, and another one is searched for with these
prices, `MOST_TRIES` in all. None is tried that says itself that it takes longer than
the best one that was, or than the base says. Of the first steps under a plan none
counts: tables and memory are made in them. Of the others a step that is disturbed is
longer, never shorter, so the lower middle counts. A plan is faster than another one
where it is so by more than the steps of either differ: the middle one from the fastest.
On a host that others share, copies that win by chance lose later. Only a plan that does
nothing but leave out re-runs needs no more than `GAIN`.
The one that it takes the place of is timed once more at once: the first steps of a run
may be slow for reasons that are gone by now.
Machines change: a drive whose cache is full writes slower. So the plan that is followed
is compared again now and then, with the next best one, or under a limit in time with
steps that keep everything, where those fit.
(tests/ssdtrain/observe/test_trials.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from ssdtrain.plan.plan import Plan

MOST_TRIES = 3
"""Plans that are searched for and tried for one kind of step."""
LONG_MS, SHORT_MS = 1000.0, 200.0
"""A step that takes at least the first is long, one that takes less than the second is
short: what disturbs a step takes some milliseconds, and more of a short one."""
ALIKE = 0.05
"""By how much steps that take as long as one another may differ."""
GAIN = 0.01
"""By which a plan must be faster than the one that it takes the place of."""
ERROR = 0.01
"""Of a step, that two measurements of it may differ by."""
WRONG = 0.03
"""By how much a plan's steps may be longer than it says: after one that is further
off, another one is searched for with what its steps tell."""


def typical(times_ms: Sequence[float]) -> float:
    """Return the lower middle."""
    return sorted(times_ms)[(len(times_ms) - 1) // 2]


def noise_of(times_ms: Sequence[float]) -> float:
    """Return by how much steps differ that ought to be alike, as a fraction."""
    least_ms = min(times_ms)
    return typical(times_ms) / least_ms - 1.0 if least_ms > 0.0 else 0.0


class StepCounts(NamedTuple):
    """Steps of a try."""

    new: int
    """The first ones, that say nothing of a plan."""
    least: int
    """Behind those, that are timed."""
    most: int
    """The same where the fewer differ."""


def steps_of_a_try(step_ms: float) -> StepCounts:
    """Return how many steps of about this length a try takes."""
    if step_ms >= LONG_MS:
        return StepCounts(1, 1, 2)
    return StepCounts(3, 3, 6) if step_ms < SHORT_MS else StepCounts(1, 2, 4)


class Stopwatch:
    """Which steps under a plan are timed, and when there are enough; reads no clock.

    Args:
        expected_ms: what a step takes, about.
    """

    def __init__(self, expected_ms: float) -> None:
        self.num_new, self._least, self._most = steps_of_a_try(expected_ms)

    def asks(self, num_steps: int) -> bool:
        """Return whether to look at what steps have taken, after so many in all."""
        return num_steps - self.num_new in (self._least, self._most)

    def is_enough(self, num_steps: int, spread: float) -> bool:
        """Return whether so many steps in all tell what one takes.

        Args:
            spread: the longest of those that were timed over the shortest.
        """
        return spread <= 1 + ALIKE or num_steps - self.num_new >= self._most


class Verdict(Enum):
    """What follows from a try."""

    STAYS = auto()
    """The plan in force is the best one."""
    GOES_BACK = auto()
    """The best one before is."""
    KEEPS_ALL = auto()
    """None keeps the limit in time: no step does anything."""


@dataclass(frozen=True)
class Tried:
    """A plan, and what a step under it takes."""

    plan: Plan
    ms: float
    noise: float = 0.0
    """See `noise_of`."""
    told_ms: float = 0.0
    """Of the base: what it says by the prices of the plans that follow; 0: nobody
    knows."""

    def is_faster_than(self, other: "Tried", *, does_less: bool = False) -> bool:
        """Whether its steps are shorter, and not by chance.

        does_less: it is the other one without some of its re-runs; `GAIN` is enough.
        """
        noise = 0.0 if does_less else max(self.noise, other.noise)
        return (1 + max(GAIN, noise)) * self.ms < other.ms

    @property
    def peak_bytes(self) -> float:
        """Predicted."""
        prediction = self.plan.prediction
        return float("inf") if prediction is None else prediction.peak_bytes

    @property
    def is_as_told(self) -> bool:
        """Whether its steps take no longer than it says."""
        prediction = self.plan.prediction
        return prediction is None or self.ms <= (1 + WRONG) * prediction.step_ms


class Trials:
    """What was tried for one kind of step."""

    def __init__(self) -> None:
        self.best: Tried | None = None
        """The plan to follow."""
        self.second: Tried | None = None
        """Another one that keeps a memory limit; under a limit in time, the one that
        was compared with `best` again."""
        self.num_tries = 0
        """Of plans that were searched for."""
        self._has_compared = False
        """Whether a plan was timed next to the base under a memory limit."""

    def forget(self) -> None:
        """Steps are of another kind, or are judged by another limit, from now on."""
        self.best = self.second = None
        self.num_tries, self._has_compared = 0, False

    def timed(self, ms: float, noise: float) -> None:
        """The best plan's steps were timed since."""
        if self.best is not None:
            self.best = replace(self.best, ms=ms, noise=noise)

    def follow(self, tried: Tried) -> None:
        """This plan needs no comparison, or is what others are compared with."""
        self.best = tried

    def judge(
        self, tried: Tried, limit_ms: float | None, *, is_by_memory: bool
    ) -> Verdict:
        """Compare a plan that was searched for.

        Args:
            tried: that plan.
            limit_ms: what a step may take where memory is not limited; None: it is not
                known.
            is_by_memory: whether memory is limited, and the fastest plan asked for.
        """
        self.num_tries += 1
        best = self.best
        if is_by_memory:
            return self.compare(tried)
        if limit_ms is not None and tried.ms > limit_ms:
            return Verdict.KEEPS_ALL if best is None else Verdict.GOES_BACK
        if best is not None and tried.peak_bytes > (1 - GAIN) * best.peak_bytes:
            return Verdict.GOES_BACK
        self.best = tried
        return Verdict.STAYS

    def compare(self, tried: Tried, *, does_less: bool = False) -> Verdict:
        """Under a memory limit: follow the faster of this one and the best.

        does_less: see `Tried.is_faster_than`.
        """
        best, self._has_compared = self.best, True
        if best and not tried.is_faster_than(best, does_less=does_less):
            self.second = tried
            return Verdict.GOES_BACK
        self.best, self.second = tried, best
        return Verdict.STAYS

    def is_hopeless(self, plan: Plan) -> bool:
        """Whether a plan is not worth a try under a memory limit: it says itself that
        its steps take longer than those of the best plan that was tried. Where none was
        but the base, than what the base says: both are wrong alike."""
        best, told = self.best, plan.prediction
        if best is None or told is None:
            return False
        best_ms = best.ms if self._has_compared else best.told_ms
        return best_ms > 0.0 and told.step_ms > (1 - GAIN) * best_ms

    def wants_another(self, tried: Tried) -> bool:
        """Whether another plan is worth a search, with what this one's steps tell."""
        return self.num_tries < MOST_TRIES and not tried.is_as_told

    def compare_again(
        self, second: Tried, best_ms: float, max_overhead: float | None = None
    ) -> None:
        """Compare the two by what both took just now.

        Args:
            second: the second best.
            best_ms: what the best one takes.
            max_overhead: one of the two keeps everything, and the other one is better
                where it costs no more than this; None: the faster one is better.
        """
        if self.best is None:
            return
        best = Tried(self.best.plan, best_ms, self.best.noise)
        if max_overhead is None and second.plan.moves_nothing:
            # Of two that are as fast, the one without copies.
            copies = not best.plan.moves_nothing and not best.is_faster_than(second)
            is_better = copies or second.is_faster_than(best)
        elif max_overhead is None:
            is_better = second.is_faster_than(best)
        elif best.plan.keeps_all:
            is_better = second.ms <= most_ms(best_ms, max_overhead)
        else:
            is_better = best_ms > most_ms(second.ms, max_overhead)
        self.best, self.second = (second, best) if is_better else (best, second)


def most_ms(plain_ms: float, max_overhead: float) -> float:
    """Return what a step may take, over one without ssdtrain as it was measured."""
    return plain_ms * (1.0 + max_overhead + ERROR)
