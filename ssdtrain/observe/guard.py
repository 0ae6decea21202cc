"""A plan under a memory limit is compared with checkpointing, by the clock.

[Note: the guard]
Under a memory limit a user's other choice is to run all regions again. That plan needs
no link and no recipe, and what it takes is known from a few steps. The one that was
searched for promises less, and may be wrong by any amount: on models that nobody had
measured, plans took up to 1.28 times checkpointing's step. So where all regions again
fit into the limit, they are tried once, and the plan whose steps are shorter stays. A
plan that is shorter by more than a prediction of checkpointing may err is not asked.
What such a step needs is nearly known: nothing of it leaves or comes back. So it may
use the budget to its end, without the reserve of other plans, where a step that goes
beyond is seen and ends the try.
(tests/ssdtrain/observe/test_guard.py)
"""

import logging
import statistics
from collections.abc import Callable
from dataclasses import replace

from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.adapt import (
    ALIKE_STEPS,
    GAIN,
    JUDGED_STEPS,
    LEAST_STEPS,
    NEW_STEPS,
)
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.baselines import checkpointing
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.scaled import as_observed
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.search import Answer
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline

logger = logging.getLogger(__name__)

SURELY_FASTER = 0.9
"""Of what all regions again are predicted to take: a plan that takes less is not
compared with them."""
MOST_TRIES = 2
"""For steps that save the same: the second one if times have changed."""


class Guard:
    """Tries all regions again beside the plans of one kind of step; reads no clock.

    Args:
        goal: what plans are judged by now.
        peers: of them the rank that leads compares.
    """

    def __init__(self, goal: Tightened, peers: Peers) -> None:
        self._goal = goal
        self._peers = peers
        self._measured: list[float] = []
        self._num_steps = 0
        self.is_judged = True
        """Whether nothing is left to compare the plan in force with."""
        self.is_in_force = False
        """Whether all regions run again, as a try or for good."""
        self._before: tuple[Plan, float] | None = None
        """The plan that a try is compared with, and what its steps took."""
        self._offered: Plan | None = None
        """For the try; a step that is observed may come in between, and no try."""
        self._best: Plan | None = None
        """The plan that was no longer than the try."""
        self._least_ms: float | None = None
        """What the steps of the last try took."""
        self._num_tries = 0

    @property
    def goal(self) -> Goal:
        """What its own plan is judged by. Of several ranks nobody sees that a step goes
        beyond: they keep the reserve."""
        goal = self._goal.goal
        return replace(goal, budget_margin=0.0) if self._peers.is_alone else goal

    def forget(self) -> None:
        """Steps save other tensors from now on."""
        self._before = self._offered = self._best = self._least_ms = None
        self._num_tries = 0

    def planned(self, plan: Plan, *, has_regions: bool) -> None:
        """This plan is followed from now on. has_regions: of its steps."""
        self._measured.clear()
        self._num_steps = 0
        # By their orders: a plan whose prediction is told anew is the same plan.
        offered, best = self._offered, self._best
        self.is_in_force = offered is not None and plan.orders is offered.orders
        was_compared = best is not None and plan.orders is best.orders
        may = has_regions and self._goal.goal.is_by_memory and self._peers.leads
        self.is_judged = was_compared or not may

    def step(
        self,
        measured_ms: float | None,
        plan: Plan,
        profiles: Callable[[], tuple[Profile, Profile]],
    ) -> Answer | None:
        """Count a step under the plan in force.

        Args:
            measured_ms: what it took; None if it is not known.
            plan: in force.
            profiles: what plans are made for, and the same with the largest batches so
                far, which must fit.

        Returns:
            What to follow from now on, as if it had been searched for; None: the same.
        """
        if self.is_judged:
            return None
        self._num_steps += 1
        if measured_ms is not None and self._num_steps > NEW_STEPS:
            self._measured.append(measured_ms)
        is_last = self._num_steps >= NEW_STEPS + JUDGED_STEPS
        if len(self._measured) < (LEAST_STEPS if is_last else ALIKE_STEPS):
            if is_last and self.is_in_force:
                return self.refuse()
            self.is_judged = is_last
            return None
        middle_ms = statistics.median(self._measured)
        if self.is_in_force:
            return self._judge(middle_ms, plan)
        return self._try(middle_ms, plan, profiles)

    def refuse(self) -> Answer | None:
        """It needs more memory than there is, or nobody can tell its time.

        Returns:
            The plan before.
        """
        self._num_tries = MOST_TRIES
        return self._go_back()

    def _go_back(self) -> Answer | None:
        self.is_judged = True
        if self._before is None:
            return None
        self._best, _ = self._before
        return Answer(plan=self._best)

    def _judge(self, middle_ms: float, plan: Plan) -> Answer | None:
        self.is_judged = True
        self._least_ms = middle_ms
        self._num_tries += 1
        if self._before is None:
            return None
        _, before_ms = self._before
        logger.info(
            "ssdtrain: all regions again take %.1f ms, the plan %.1f",
            middle_ms,
            before_ms,
        )
        if middle_ms > (1 - GAIN) * before_ms or plan.prediction is None:
            return self._go_back()
        told = replace(plan.prediction, step_ms=middle_ms)
        return Answer(
            plan=Plan(orders={}, policy=plan.policy, prediction=told), stays=True
        )

    def _try(
        self,
        middle_ms: float,
        plan: Plan,
        profiles: Callable[[], tuple[Profile, Profile]],
    ) -> Answer | None:
        self.is_judged = True
        if self._num_tries >= MOST_TRIES:
            return None
        if self._least_ms is not None and middle_ms <= (1 + GAIN) * self._least_ms:
            return None
        own = fastest_that_fits(*profiles(), self.goal)
        if own is None or own.prediction is None or own.orders == plan.orders:
            return None
        if middle_ms <= SURELY_FASTER * own.prediction.step_ms:
            return None
        self.is_judged = False
        self._before, self._offered = (plan, middle_ms), own
        return Answer(plan=own)


def fastest_that_fits(profile: Profile, larger: Profile, goal: Goal) -> Plan | None:
    """Return the plan that runs all regions again and keeps the rest.

    Args:
        profile: an observed step.
        larger: the same with batches that must fit.
        goal: with a memory limit.
    """
    most_bytes, timeline = goal.most_bytes(larger), Timeline(profile)
    found = []
    for each in checkpointing(timeline):
        orders = schedule(timeline, each.placements, each.style)
        own = simulate(timeline, orders)
        plan = Plan(orders=orders, policy=each.name, prediction=own)
        needs = own if larger is profile else as_observed(plan, larger).prediction
        if needs is not None and most_bytes is not None:
            if needs.peak_bytes <= most_bytes:
                found.append((own.step_ms, plan))
    return min(found, key=lambda pair: pair[0], default=(0.0, None))[1]
