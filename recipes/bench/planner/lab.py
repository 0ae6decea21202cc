"""One model under one session whose plan is exchanged between steps; what results keep
of a plan and of a profile."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ssdtrain
from recipes.bench.harness.blocks import SETTLE_S, Size, Steps, settling
from ssdtrain.cache.regions import Choice
from ssdtrain.cache.window import CacheLimits
from ssdtrain.errors import ConfigError
from ssdtrain.observe.planner import Purpose
from ssdtrain.plan.choose import choose, options
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.rule import KEEP_ALL, Rule
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline

Orders = Mapping[str, Sequence[Order]]
NUM_TIMED = 3
SHARE_TO_END = 0.2
"""Share of a cell's limit in which nothing new is begun."""


@dataclass(frozen=True)
class FirstPart(Rule):
    """Moves the first bytes of a lane."""

    rest_bytes: int = 0
    """Stay, the last ones."""

    def place(self, left_bytes: int, tail_bytes: int, *, held: bool) -> Placement:
        """Offload what has the rest behind it."""
        if 0 <= left_bytes < self.rest_bytes:
            return Placement.KEEP
        return super().place(left_bytes, tail_bytes, held=held)


class Time:
    """What a running cell has left of its limit."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s
        self.limit_s = limit_s

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._end - time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether nothing new should be begun."""
        return self.left_s < SHARE_TO_END * self.limit_s


class Lab:
    """Steps under any plan, measured."""

    def __init__(self, size: Size, device: torch.device, **settings: Any) -> None:
        self.runs: Steps | None = Steps(size, device)
        if size.hidden < 1024:
            settings["min_bytes"] = 1024
        self.session = ssdtrain.offload(
            self.runs.model,
            **{"target": "host", "plan": "auto", "max_overhead": 0.01, **settings},
        )
        self.losses: list[float] = []
        self.cache = self.session.cache
        self.recipes = self.cache.recipes

    def steps(self, num: int) -> list[tuple[float, int]]:
        """Steps in a row, as in training: nobody waits for the device in between. Gives
        ms, and peak bytes above a step's start.

        A step lasts to the begin of the next, or to the end of the last.
        """
        runs = self.runs
        if runs is None:
            raise RuntimeError("the lab is closed")
        done, peaks = [], []
        for _ in range(num):
            done.append(runs.step())
            peaks.append(done[-1].peak_bytes)
            if runs.device.type != "cuda":
                peaks[-1] = int(self.session.steps[-1].saved_peak_bytes)
        marks = [*(each.marks[0] for each in done), runs.clock.mark()]
        self.losses.extend(each.loss.item() for each in done)
        return list(zip(runs.clock.between(marks), peaks, strict=True))

    def settle(self, limit_s: float = SETTLE_S) -> Profile:
        """Steps until nothing settles any more, or the time is over. Plain steps and
        regions are measured in those behind the observed one, and plans are searched
        for beside the next: a profile is there long before its plan.

        Raises:
            RuntimeError: there is no plan yet.
        """
        settles = settling(self.session, limit_s)
        while settles():
            self.steps(4)
        profile = self.session.profile
        if profile is None or self.session.plan is None:
            raise RuntimeError(f"no plan after {limit_s:g} s")
        return profile

    def hold(self) -> None:
        """From now on the plan changes only by hand."""
        self.session._planner.close()
        self.session._planner._stage = Purpose.RESTING
        self.cache.regions.choice = Choice.PLANNED

    def under(
        self, orders: Orders | None, num_timed: int = NUM_TIMED
    ) -> dict[str, Any]:
        """Median step and highest peak under these orders (None: the policy)."""
        plan = None
        if orders is not None:
            plan = Plan(
                orders={kind: tuple(own) for kind, own in orders.items()},
                policy="by hand",
            )
        self.cache.cursor.plan = plan
        found = self.steps(1 + num_timed)[1:]
        return {
            "step_ms": statistics.median(ms for ms, _ in found),
            "peak_bytes": max(peak for _, peak in found),
        }

    def under_settings(
        self, window_bytes: int, prefetch_bytes: int, fraction: float, recipes: bool
    ) -> dict[str, Any]:
        """A point of the grid: no plan, the policy's own numbers."""
        from ssdtrain.cache.recipes import Recipes

        before = self.cache.limits, self.cache.cursor.rule
        rest_bytes = round((1 - fraction) * self.cache.ledger.saved_bytes)
        self.cache.limits = self.cache.moves.limits = CacheLimits(
            min_bytes=self.cache.limits.min_bytes,
            window_bytes=window_bytes,
            prefetch_bytes=prefetch_bytes,
        )
        rule = FirstPart(rest_bytes=rest_bytes) if fraction else KEEP_ALL
        self.cache.cursor.rule = rule
        self.cache.recipes = self.recipes if recipes else Recipes()
        try:
            self.steps(1)  # the lane learns its new size
            return self.under(None)
        finally:
            self.cache.limits, self.cache.cursor.rule = before
            self.cache.moves.limits = self.cache.limits
            self.cache.recipes = self.recipes

    def close(self) -> None:
        """Free the model and the session."""
        self.session.close()
        self.runs = None
        del self.session, self.cache, self.recipes


def random_orders(timeline: Timeline, seed: int) -> dict[str, tuple[Order, ...]]:
    """A plan drawn at random: how much leaves, how much is rebuilt, how strictly."""
    draw = random.Random(seed)
    weights = {
        Placement.KEEP: draw.random() ** 2,
        Placement.OFFLOAD: draw.random() + 0.2,
        Placement.RECOMPUTE: draw.random(),
    }
    placements = {
        kind: [
            draw.choices(found := options(timeline, item), [weights[p] for p in found])[
                0
            ]
            for item in items
        ]
        for kind, items in timeline.profile.kinds.items()
    }
    largest = max(item.num_bytes for item in timeline.items)
    window = draw.choice([None, None, 1.5, 2, 3, 4, 6])
    style = Style(window_bytes=None if window is None else int(window * largest))
    return schedule(timeline, placements, style)


def planned(profile: Profile, budget_bytes: int) -> Plan | str:
    """The plan for a memory budget, or what the error says; runs in any process."""
    try:
        return choose(profile, Goal(memory_budget_bytes=budget_bytes))
    except ConfigError as error:
        return str(error)


def predicted(timeline: Timeline, orders: Orders) -> dict[str, Any]:
    """What the simulator says, for the results."""
    found = simulate(timeline, orders)
    return {
        "predicted_ms": found.step_ms,
        "predicted_peak_bytes": found.peak_bytes,
        "predicted_keep_ms": found.keep_ms,
    }


def summary(plan: Any) -> dict[str, Any]:
    """Of a plan with a prediction."""
    prediction = plan.prediction
    return {
        "policy": plan.policy,
        "bytes": plan.bytes_by_placement(),
        "step_ms": prediction.step_ms,
        "peak_gb": prediction.peak_bytes / 1e9,
    }
