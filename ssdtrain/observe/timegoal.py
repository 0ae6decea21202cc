"""Whether steps under a plan take as long as it said, and as they may.

Times are those from the start of a step to that of the next. They are compared with the
prediction, with the plan before, and with plain steps where some were measured: see
[Note: no oscillation] and [Note: the measured overhead] in plan/adapt.py.
(tests/ssdtrain/observe/test_overhead.py, test_timegoal.py)
"""

import logging
from dataclasses import replace
from typing import Any

from ssdtrain.cache.cache import TensorCache
from ssdtrain.observe.measured import Measured
from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.adapt import Drift, Overhead, Surprise, Trial, earned_aim
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.plan import Plan, Prediction

logger = logging.getLogger(__name__)

GONE_BACK = 0.5
"""Part of the overhead that may be predicted behind a plan that was given up."""


class TimeGoal:
    """Compares the times of steps with what the plan in force promises."""

    def __init__(
        self,
        cache: TensorCache,
        goal: Tightened,
        measured: Measured,
        peers: Peers,
    ) -> None:
        self.drift = Drift()
        """Of the steps from the plan in force."""
        self._cache = cache
        self._goal = goal
        self._measured = measured
        self._peers = peers
        self._overhead = Overhead()
        self._surprise = Surprise()
        self._trial: Trial | None = None
        """Of the plan in force, where nobody else follows it."""
        self._starts: list[tuple[Any, bool]] = []
        """Start of the last steps, and whether the step had the plan's sizes."""

    # -- measuring ----------------------------------------------------------------

    def restart(self) -> None:
        """The steps behind this one are not like those before it."""
        self._starts.clear()

    def last_step_ms(self) -> float | None:
        """Count the start of a step; time of the last one that has ended for sure, from
        its start to that of the next; None if it is not known, or its batch was of
        another size."""
        clock, starts = self._cache.ledger.clock, self._starts
        course = self._cache.course
        if starts and (course.num_resized or course.num_beside):
            starts[-1] = starts[-1][0], False
        starts.append((clock.now(), True))
        if len(starts) < 3:
            return None
        # The last step may still run on the device; the one before has ended.
        (before, is_alike), (after, _), _ = starts
        del starts[0]
        return clock.ms_between(before, after) if is_alike else None

    def plain_step(self, measured_ms: float) -> None:
        """Count a step without ssdtrain."""
        self._overhead.plain_step(measured_ms)

    # -- plans --------------------------------------------------------------------

    def taken(self, plan: Plan) -> None:
        """This plan takes the place of the one in force, and is to be no slower than
        that one but for what it says."""
        if self._peers.is_alone and not self.holds_overhead:
            self._trial = Trial(plan, self._trial)

    def planned(self, plan: Plan) -> None:
        """This plan is followed from now on."""
        if plan.prediction is not None:
            self.drift.planned(plan.prediction.step_ms)
        self._overhead.planned()
        self._surprise.planned()

    def priced_anew(self, prediction: Prediction | None) -> None:
        """The plan in force stays, with another prediction."""
        if prediction is not None:
            self.drift.predicted_ms = prediction.step_ms
        self._surprise.priced_anew()
        if self._goal.was:
            self._overhead.planned()  # it took too long: does it still?

    def forget_before(self) -> None:
        """The plan in force is not compared with the one before any more."""
        self._trial = None

    # -- judging ------------------------------------------------------------------

    @property
    def holds_overhead(self) -> bool:
        """Whether this rank, for all, holds an overhead over steps that it measured:
        those of ranks that wait for each other take as long on each."""
        is_own = not self._goal.goal.is_by_memory and self._peers.leads
        return is_own and self._overhead.knows_plain

    @property
    def is_judged(self) -> bool:
        """Whether nothing is left to compare the plan in force with."""
        if self.holds_overhead:
            return self._overhead.is_judged
        return not self._may_surprise or self._surprise.is_judged

    @property
    def _may_surprise(self) -> bool:
        """Whether steps are compared with what their plan says, which is believed where
        a step without a plan was measured. A CPU's copies share its cores."""
        is_told = bool(self._measured.corrections.plain)
        return is_told and self._peers.leads and self._cache.device.runs_beside

    def plan_before(self, measured_ms: float | None) -> Plan | None:
        """Return the plan before, to return to: the one in force is slower than it
        said."""
        if measured_ms is None or self._trial is None:
            return None
        before = self._trial.step(measured_ms)
        if before is not None:
            self._trial = Trial(before)
        return before

    def aim_lower(self, part: float = GONE_BACK) -> bool:
        """Let plans promise only this part of the overhead that they may have by now;
        whether that is less, and to be searched for. Under a memory limit time is no
        goal."""
        goal = self._goal.goal
        if goal.is_by_memory or not self._goal.can_be:
            return False
        self._goal.tighten(replace(goal, aim=goal.aim * part))
        logger.info(
            "ssdtrain: the plan takes longer than it may: the next one may predict "
            "%.2f %%",
            100 * self._goal.goal.overhead,
        )
        return True

    def is_exceeded(self, measured_ms: float | None, plan: Plan | None) -> bool:
        """Count a step under the plan; whether steps take more than they may, and the
        next plan is to promise less: see [Note: the measured overhead]. Or more or less
        than it said, and the next one is to know what hooks cost: see [Note: the price
        of hooks]."""
        if plan is None or plan.prediction is None:
            return False
        if not self.holds_overhead:
            return self._surprises(measured_ms, plan.prediction)
        was_judged = self._overhead.is_judged
        part = self._overhead.step(
            measured_ms, plan.prediction.overhead, self._goal.goal.max_overhead
        )
        is_new = self._overhead.is_judged and not was_judged
        if is_new and self._price_hooks(plan.prediction, is_over=part is not None):
            return True
        if part is None:
            return False
        goal, is_alone = self._goal.goal, self._peers.is_alone
        blamed = self._overhead.blamed_on_copies(plan.prediction, is_alone=is_alone)
        was_blamed = self._measured.corrections.copy_slowdown > 0.0
        if blamed is None or (is_alone and was_blamed):
            return self.aim_lower(part)
        if not self._goal.can_be:
            return False
        aim = min(1.0, goal.aim) if was_blamed else earned_aim(goal.max_overhead)
        self._goal.tighten(replace(goal, aim=aim))
        logger.info("ssdtrain: copies cost compute %.1f %%", 100 * blamed)
        self._measured.slow_copies(blamed)
        return True

    def _surprises(self, measured_ms: float | None, prediction: Prediction) -> bool:
        """Count a step that nothing but its plan's prediction is compared with; whether
        it takes longer, and the next plan is to know what copies cost: see [Note: the
        surprise]."""
        if not self._may_surprise:
            return False
        blamed = self._surprise.step(
            measured_ms, prediction, is_alone=self._peers.is_alone
        )
        if blamed is None:
            return False
        logger.info("ssdtrain: copies cost compute %.1f %%", 100 * blamed)
        self._measured.slow_copies(blamed)
        return True

    def _price_hooks(self, prediction: Prediction, *, is_over: bool) -> bool:
        """Have the next plan made with what the steps of this one say that hooks cost;
        whether there is to be one. Of ranks that wait for each other the slowest host
        counts, and no rank knows how slow the others' are.

        Args:
            prediction: of the plan in force.
            is_over: whether its steps take more than they may.
        """
        factor = self._overhead.host_factor(prediction)
        if factor is None or is_over != (factor > 1.0) or not self._peers.is_alone:
            return False
        # Once for cheaper ones: a plan beyond the goal must find another one.
        if not self._goal.can_be or (self._goal.was and not is_over):
            return False
        self._goal.tighten(self._goal.goal)
        logger.info("ssdtrain: hooks cost the host %.2f times as much", factor)
        self._measured.price_hooks(factor)
        return True

    def drifts(self, measured_ms: float | None, *, is_over: bool = True) -> bool:
        """Count a step under the plan; whether to observe the next one.

        Steps that take other times are a reason where this rank leads: of ranks that
        wait for each other one is enough. And where plans are compared with what they
        say, or another one is searched for, that comes first: an observed step is a
        long one.

        Args:
            is_over: whether nobody else has to judge the plan in force.
        """
        looks = self._peers.leads and self.is_judged and is_over
        return self.drift.step(
            measured_ms if looks else None, self._cache.course.num_strayed
        )
