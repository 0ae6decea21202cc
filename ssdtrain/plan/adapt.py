"""When a plan no longer fits what is measured.

[Note: no oscillation]
A single slow step is noise: the middle of the last steps must be off, in the same
direction, and after every new plan the next look comes twice as late. An observed step
and the one behind it are long ones (2.0 and 1.2 s where others took 0.56, on an H100),
and steps may be a tenth longer for seconds and then as before. So a step is observed
only when those that were off have lost as much as that takes (`OBSERVATION_STEPS`):
after some 40 that are a tenth longer, after 8 that take half as long again. A plan that
is not clearly better than the one in force is not taken.

[Note: the measured overhead]
`max_overhead` is what a step may take more than one without ssdtrain, as users measure
it. Predictions err by up to `ERROR`; where more is wrong (a host that is busier than
it was, copies that slow kernels down as no probe saw), another prediction of the same
kind would be as wrong. So where plain steps were measured, a plan's steps are compared
with them. Of plain steps the shortest quarter counts: a search beside them makes steps
longer, never shorter. Of a plan's own, beside which none runs, it is the middle, as for
users: when it was their shortest quarter, a plan that was left in force on an H200 with
an uneven host took 366 to 443 ms, for 372 that it said. If they are beyond the goal by
more than that, what they took beyond the prediction is taken for what the plan's copies
cost (`blamed_on_copies`): copies that hide cost next to nothing by the prediction, so
that a plan which only promises less may well move as much. On an H200 a kernel starts 3
microseconds later while copies in fill the link over which it is launched, and a step
of stock layers has thousands: 2.5 % of the copies' time, where probes see 0.4. A plan
that is made with that cost errs less, so that it may use most of what was left to
predictions (`EARNED`). No more is blamed on
them than they can cost, a tenth of their time where no collective waits for them, or
half of it. On H100s whose hosts take up to twice as long in one step as in another, 28
and 38 % were blamed, and plans came of it that moved less than 0.1 GB, rebuilt 38 ms'
worth instead, and waited 33 and 93 ms for the host.
Five steps are enough where all of them are on one side of that limit; else nine are
taken.
If that one takes too long again, the next plan may predict only the part of the
overhead that comes out right. None of them is compared with the one before it: it may
cost more than that one, within the goal. Of ranks that wait for each other copies are
blamed each time, as they delay collectives as well; from the second time on plans may
predict the goal and no more.

[Note: the surprise]
Where nothing is compared with plain steps, because none fits into memory or memory is
the goal, steps are compared with the prediction alone. It may be wrong by up to
`MOST_SURPRISE`. Where steps are beyond that, what they took beyond the prediction is
taken for what the plan's copies cost, and never for more than they can. A 4B under
FSDP2 on H100s that do not hold it was promised 10 %, 885 ms, and took 1071 to the end.

[Note: the price of hooks]
What hooks cost the host is measured in a step or two, and hosts take twice as long in
one second as in another. Where a plan waits for the host by its prediction, its steps
tell how dear hooks were: what they took beyond or below the prediction, over what it
said of those waits. With that price the next plan is searched for. A 1.7B at 0.1 took
348 ms for 368 on one H200, and gave up 20 ms' worth of memory; on another 415 for 370.
No judgement takes the price for more than twice or less than half of what it was: the
waits grow faster than it does. Hooks come before copies: those of a plan that waits for
the host have the less to do with it.
(tests/ssdtrain/plan/test_adapt.py, tests/ssdtrain/observe/test_overhead.py)
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.plan.plan import Plan, Prediction, Wait

WINDOW_STEPS = 5
TOLERANCE = 0.08
"""Error of the predicted step time that is not looked at."""
OBSERVATION_STEPS = 4.0
"""What it takes to observe again, in steps."""
FIRST_PAUSE_STEPS = 8
FIRST_STRAY_PAUSE_STEPS = 4
LONGEST_PAUSE_STEPS = 1024
GAIN = 0.01
"""A new plan must be better by this fraction."""
LEAST_STEPS = 3
"""Measured under a plan before another is compared with it."""
NEW_STEPS = 3
"""Under a new plan tables and memory are made: they say nothing of it."""
JUDGED_STEPS = 9
"""By which a plan is judged at most."""
ALIKE_STEPS = 5
"""Of these: enough to judge it by, where all of them say the same."""
PLAIN_STEPS = 32
"""Plain steps that are remembered."""
COUNTED = 0.25
"""Which of the plain steps counts, of all from the shortest."""
ERROR = 0.01
"""Of a step beyond the goal that is left to predictions."""
MOST_SURPRISE = 0.03
"""By which a prediction may be wrong."""
NUM_SURPRISES = 2
"""Plans whose copies are blamed for what is beyond."""
EARNED = 0.75
"""Part of it that plans may use whose error was measured."""
MOST_BLAMED = 0.1
"""Of the time that copies take: what goes beyond is not theirs alone."""
MOST_BLAMED_OF_RANKS = 0.5
"""Likewise where ranks wait for each other."""
LEAST_PRICE, MOST_PRICE = 0.5, 2.0
"""Of what hooks were thought to cost, by one judgement."""
LEAST_AIM = 0.1
"""No judgement shrinks what may be predicted by more than to this part."""


@dataclass
class Drift:
    """Compares predicted with measured step times; reads no clock."""

    predicted_ms: float = 0.0

    def __post_init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._lost = 0.0
        """What the last steps were off by, in steps."""
        self._pause = FIRST_PAUSE_STEPS
        self._wait = 0
        self._strayed = 0
        self._stray_pause = FIRST_STRAY_PAUSE_STEPS
        self._stray_wait = 0

    def planned(self, predicted_ms: float) -> None:
        """Start over with a new plan in force."""
        self.predicted_ms = predicted_ms
        self._forget()
        self._strayed = 0
        self._wait = self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_STEPS)

    def step(self, measured_ms: float | None, num_strayed: int) -> bool:
        """Count a step; return whether to observe the next one and plan again.

        Args:
            measured_ms: None if it is not known.
            num_strayed: lanes that saved other tensors than the plan expects.
        """
        self._wait = max(0, self._wait - 1)
        self._stray_wait = max(0, self._stray_wait - 1)
        self._strayed = self._strayed + 1 if num_strayed else 0
        if num_strayed:
            self._forget()
        elif measured_ms is not None and self.predicted_ms > 0:
            self._errors.append(measured_ms / self.predicted_ms - 1)
            self._lost += abs(self._errors[-1])
        if self._strayed >= 2 and not self._stray_wait:
            # Two steps alike in being other: a new shape, not one odd batch.
            self._stray_wait = self._stray_pause
            self._stray_pause = min(2 * self._stray_pause, LONGEST_PAUSE_STEPS)
            return True
        if len(self._errors) < WINDOW_STEPS:
            return False
        if abs(statistics.median(self._errors)) <= TOLERANCE:
            self._lost = 0.0
        return self._lost >= OBSERVATION_STEPS and not self._is_paused

    @property
    def error(self) -> float | None:
        """Median relative error of the last steps."""
        return statistics.median(self._errors) if self._errors else None

    def _forget(self) -> None:
        self._errors.clear()
        self._lost = 0.0

    @property
    def _is_paused(self) -> bool:
        return self._wait > 0


class Trial:
    """Compares the measured steps of a new plan with those of the plan before.

    A prediction may be wrong where the simulator is; reads no clock.
    """

    def __init__(self, plan: Plan, before: "Trial | None" = None) -> None:
        self.plan = plan
        """In force."""
        self._before = before
        self._measured: deque[float] = deque(maxlen=WINDOW_STEPS)

    def step(self, measured_ms: float) -> Plan | None:
        """Count a step.

        Returns:
            The plan before, if this one lost more time to it than it said.
        """
        self._measured.append(measured_ms)
        before = self._before
        if before is None or len(self._measured) < WINDOW_STEPS:
            return None
        self._before = None  # judged once
        ours, theirs = self.plan.prediction, before.plan.prediction
        if len(before._measured) < LEAST_STEPS or ours is None or theirs is None:
            return None
        before_ms = statistics.median(before._measured)
        lost_ms = statistics.median(self._measured) - before_ms
        said_ms = ours.step_ms - theirs.step_ms
        return before.plan if lost_ms > max(0.0, said_ms) + GAIN * before_ms else None


class Overhead:
    """Compares a plan's measured steps with plain ones: [Note: the measured overhead].
    Reads no clock."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=PLAIN_STEPS)
        self._measured: list[float] = []
        self._num_steps = 0
        self._is_judged = False

    def plain_step(self, measured_ms: float) -> None:
        """Count a step without ssdtrain."""
        self._plain.append(measured_ms)

    def blamed_on_copies(
        self, prediction: Prediction, *, is_alone: bool
    ) -> float | None:
        """Return by how much its copies slowed the plan's steps down, beyond what it
        said, as a fraction of their time; None: that is not what took so long.

        Args:
            prediction: of the plan in force.
            is_alone: whether no other rank waits for this one's copies.
        """
        copies_ms = sum(load.busy_ms for load in prediction.links.values())
        if not self._measured or not self._plain or not copies_ms:
            return None
        added_ms = prediction.step_ms - prediction.keep_ms
        middle_ms = statistics.median(self._measured)
        lost_ms = middle_ms - _counted(self._plain) - added_ms
        slowdown = lost_ms / copies_ms
        most = MOST_BLAMED if is_alone else MOST_BLAMED_OF_RANKS
        return slowdown if 0.0 < slowdown <= most else None

    def host_factor(self, prediction: Prediction) -> float | None:
        """Return what hooks cost the host, over what the plan was made with: [Note: the
        price of hooks]. None: they cost as much, or the plan does not wait for them.

        Args:
            prediction: of the plan in force.
        """
        waits_ms = prediction.waits.get(Wait.HOST.value, 0.0)
        if not self._measured or not self._plain:
            return None
        plain_ms = _counted(self._plain)
        off_ms = statistics.median(self._measured) - plain_ms
        off_ms -= prediction.step_ms - prediction.keep_ms
        error_ms = math.hypot(_error(self._plain), _error(self._measured))
        if waits_ms < GAIN * plain_ms or abs(off_ms) <= GAIN * plain_ms + 2 * error_ms:
            return None
        return min(MOST_PRICE, max(LEAST_PRICE, 1.0 + off_ms / waits_ms))

    def planned(self) -> None:
        """Another plan is in force."""
        self._measured.clear()
        self._num_steps = 0
        self._is_judged = False

    @property
    def knows_plain(self) -> bool:
        """Whether there is something to compare with."""
        return len(self._plain) >= LEAST_STEPS

    @property
    def is_judged(self) -> bool:
        """Whether the plan in force was compared, or nothing can be."""
        return self._is_judged or not self.knows_plain

    def step(
        self, measured_ms: float | None, predicted: float, max_overhead: float
    ) -> float | None:
        """Count a step under the plan.

        Args:
            measured_ms: what it took; None if it is not known.
            predicted: the plan's overhead, a fraction.
            max_overhead: the goal, a fraction.

        Returns:
            By what the overhead that may be predicted is to be multiplied; None: the
            plan keeps the goal, or is not judged now.
        """
        if self.is_judged:
            return None
        self._num_steps += 1
        if measured_ms is not None and self._num_steps > NEW_STEPS:
            self._measured.append(measured_ms)
        is_last = self._num_steps == NEW_STEPS + JUDGED_STEPS
        if len(self._measured) < (LEAST_STEPS if is_last else ALIKE_STEPS):
            self._is_judged = is_last
            return None
        plain_ms = _counted(self._plain)
        error_ms = math.hypot(_error(self._plain), _error(self._measured))
        limit_ms = plain_ms * (1 + max_overhead + ERROR) + 2 * error_ms
        least_ms, most_ms = min(self._measured), max(self._measured)
        self._is_judged = is_last or most_ms <= limit_ms or least_ms > limit_ms
        measured = statistics.median(self._measured)
        if not self._is_judged or measured <= limit_ms:
            return None
        found = measured / plain_ms - 1
        said = min(1.0, max(predicted, 0.0) / max_overhead) if max_overhead else 0.0
        return max(LEAST_AIM, min(1.0, said * (max_overhead + EARNED * ERROR) / found))


class Surprise:
    """Compares a plan's measured steps with what it says: [Note: the surprise]. Reads
    no clock."""

    def __init__(self) -> None:
        self._measured: list[float] = []
        self._num_steps = 0
        self._num_blamed = 0

    def planned(self) -> None:
        """Another plan is in force."""
        self._measured.clear()
        self._num_steps = 0

    def priced_anew(self) -> None:
        """The plan in force stays, with another prediction."""
        if self._num_blamed:
            self.planned()  # it took longer: does it still?

    @property
    def is_judged(self) -> bool:
        """Whether the plan in force was compared."""
        return self._num_steps >= NEW_STEPS + JUDGED_STEPS

    def step(
        self, measured_ms: float | None, prediction: Prediction, *, is_alone: bool
    ) -> float | None:
        """Count a step under the plan.

        Args:
            measured_ms: what it took; None if it is not known.
            prediction: of the plan.
            is_alone: whether no other rank waits for this one's copies.

        Returns:
            By how much its copies slowed the plan's steps down, beyond what it said, as
            a fraction of their time; None: they did not, or are not judged now.
        """
        if self.is_judged:
            return None
        self._num_steps += 1
        if measured_ms is not None and self._num_steps > NEW_STEPS:
            self._measured.append(measured_ms)
        copies_ms = sum(load.busy_ms for load in prediction.links.values())
        if not self.is_judged or len(self._measured) < LEAST_STEPS or not copies_ms:
            return None
        if self._num_blamed == NUM_SURPRISES:
            return None
        lost_ms = statistics.median(self._measured) - prediction.step_ms
        least_ms = MOST_SURPRISE * prediction.step_ms + 2 * _error(self._measured)
        if lost_ms <= least_ms:
            return None
        self._num_blamed += 1
        most = MOST_BLAMED if is_alone else MOST_BLAMED_OF_RANKS
        return min(most, lost_ms / copies_ms)


def earned_aim(max_overhead: float) -> float:
    """Return the part of the goal that a plan may predict whose error was measured:
    more than all of it."""
    return 1.0 + EARNED * ERROR / max_overhead if max_overhead else 1.0


def _counted(values: Sequence[float]) -> float:
    return sorted(values)[int(COUNTED * len(values))]


def _error(values: Sequence[float]) -> float:
    """Standard error of the median, by the median distance from it: a few long steps
    do not count."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    # 1.48 distances are a standard deviation; a median's error is 1.25 of a mean's.
    return 1.25 * 1.48 * spread / math.sqrt(len(values))


def is_better(new: Prediction, old: Prediction, by_memory: bool, limit: float) -> bool:
    """Return whether a new plan should replace the one in force, both priced on one
    profile.

    Args:
        by_memory: the goal is least time within `limit` bytes; else least peak within
            `limit` ms.
    """
    if by_memory:
        if old.peak_bytes > limit:
            return True
        return new.step_ms < old.step_ms * (1 - GAIN)
    if old.step_ms > limit * (1 + GAIN):
        return True
    return new.peak_bytes < old.peak_bytes * (1 - GAIN)
