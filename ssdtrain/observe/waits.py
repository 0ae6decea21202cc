"""Whether compute waits for copies as a plan said.

[Note: slower links]
A link is measured in the observed step, before there is a plan. Under one it may be
slower: another device behind the same switch copies as well, or the host's memory is
busy. A plan that fills the link up to the end of forward then waits for all that it was
wrong by, where a plan for the slower link would move a little less and wait for
nothing. So the waits of some steps under each plan are measured: what they are longer
than predicted is taken for a link that is slower, and the next search has that link.
The second least of a few counts: one step may have waited for what is over.
(tests/ssdtrain/observe/test_waits.py)
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from ssdtrain.cache.cache import TensorCache
from ssdtrain.observe.measured import Measured
from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.plan import Plan, Prediction, Wait
from ssdtrain.transfer.device import Device, Stalled

logger = logging.getLogger(__name__)

FIRST_STEP = 3
"""Under a plan whose waits are measured: tables and memory are made before."""
NUM_STEPS = 4
LEAST_EXCESS = 0.006
"""Of the predicted step: a shorter wait is no reason for another plan."""
LEAST_BUSY_MS = 1.0
"""A link that is used less says nothing of its rate."""
MOST_SLOWDOWN = 1.0
"""Of one judgement: a link of half its rate."""


class Slower(NamedTuple):
    """By which fractions copies take longer than in the plan's profile."""

    out: float
    into: float


Stalls = Callable[[], Stalled]


class WaitWatch:
    """Compares the waits of steps under a plan with those that it predicts."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._num_steps = 0
        self._stalls: list[Stalls] = []

    def planned(self) -> None:
        """Another plan is in force."""
        self._num_steps = 0
        self._stalls = []

    @property
    def has_judged(self) -> bool:
        """Whether the waits of the plan in force are known."""
        return self._num_steps > FIRST_STEP + NUM_STEPS

    def step(self, stalls: Stalls | None, prediction: Prediction) -> Slower | None:
        """Count a step that has been launched under the plan.

        Args:
            stalls: its waits; calling it waits for the device, which is done when
                another step has been launched.

        Returns:
            What the links are slower by; None: they are not, or are not judged now.
        """
        if self.has_judged:
            return None
        self._num_steps += 1
        if self._num_steps == FIRST_STEP:
            self._device.time_waits(NUM_STEPS)
        if FIRST_STEP < self._num_steps <= FIRST_STEP + NUM_STEPS and stalls:
            self._stalls.append(stalls)
        if not self.has_judged or len(self._stalls) < 2:
            return None
        return _slower([each() for each in self._stalls], prediction)


class WaitGoal:
    """Has plans made for the links that steps under a plan show."""

    def __init__(
        self,
        cache: TensorCache,
        goal: Tightened,
        measured: Measured,
        peers: Peers,
    ) -> None:
        self._cache = cache
        self._goal = goal
        self._measured = measured
        self._peers = peers
        self._watch = WaitWatch(cache.device)

    def planned(self) -> None:
        """Another plan is followed from now on."""
        self._watch.planned()

    @property
    def is_asked(self) -> bool:
        """Whether waits matter: of one rank alone. A CPU's copies are no links'."""
        return self._peers.is_alone and self._cache.device.torch_device.type == "cuda"

    @property
    def is_judged(self) -> bool:
        """Whether nothing is left to compare the plan in force with."""
        return not self.is_asked or self._watch.has_judged

    def is_exceeded(self, plan: Plan | None) -> bool:
        """Count a step under the plan; whether compute waits for copies longer than it
        said, and the next plan is to be made for slower links."""
        if self.is_judged or plan is None or plan.prediction is None:
            return False
        slower = self._watch.step(self._cache.ledger.stalls, plan.prediction)
        if slower is None or not self._goal.can_be:
            return False
        self._goal.tighten(self._goal.goal)
        logger.info(
            "ssdtrain: copies take %.0f %% longer out and %.0f %% in than planned",
            100 * slower.out,
            100 * slower.into,
        )
        self._measured.slow_links(*slower)
        return True


def _slower(waits: list[Stalled], prediction: Prediction) -> Slower | None:
    found = sorted(waits, key=lambda each: each.ms)[1]
    said = prediction.waits
    out_ms = found.out_ms - said.get(Wait.COPY_OUT.value, 0.0)
    into_ms = found.ms - found.out_ms - said.get(Wait.COPY_IN.value, 0.0)
    if max(out_ms, 0.0) + max(into_ms, 0.0) < LEAST_EXCESS * prediction.step_ms:
        return None
    busy = {name: load.busy_ms for name, load in prediction.links.items()}
    return Slower(
        _fraction(out_ms, busy.get("d2h", 0.0)),
        _fraction(into_ms, busy.get("h2d", 0.0)),
    )


def _fraction(excess_ms: float, busy_ms: float) -> float:
    if busy_ms < LEAST_BUSY_MS or excess_ms <= 0.0:
        return 0.0
    return min(MOST_SLOWDOWN, excess_ms / busy_ms)
