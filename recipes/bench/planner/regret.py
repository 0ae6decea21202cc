"""The planner on a device: targets, prediction, regret, budgets.

    python -m recipes.bench planner.regret --budget-s 250

Cells are run in the order of what matters most and resumed by a second run; each has
a limit of its own, within which it ends. `--only` also gives an order.
`--small` runs all paths on tiny models (a CPU is enough).
"""

import fnmatch
import multiprocessing
import random
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from recipes.bench.harness.blocks import Size
from recipes.bench.harness.cli import Bench
from recipes.bench.offload.placement import ours, plain, recompute, run_column
from recipes.bench.planner.lab import (
    Lab,
    Orders,
    Time,
    planned,
    predicted,
    random_orders,
    summary,
)
from ssdtrain.errors import ConfigError
from ssdtrain.plan.baselines import fixed_policies
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import Simulation, keep_all
from ssdtrain.plan.timeline import Timeline

TARGETS = {
    "12288x3": (Size(12288, 3, 16, 1024), 0.01),
    "8192x4": (Size(8192, 4, 16, 1024), 0.02),
    "16384x2": (Size(16384, 2, 16, 1024), 0.01),
    "6144x24": (Size(6144, 24, 8, 2048), 0.05),
}
SMALL = {"128x2": (Size(128, 2, 2, 64), 0.05)}
CHOSEN = (0.0, 0.02, 0.1, 0.4)
NUM_STEPS = 5
WARM_STEPS = 9
NUM_PLANNERS = 6
DECLINE_S = 10.0
"""In which a session that is asked for nothing settles."""
LABS = {
    "4096x8": Size(4096, 8, 8, 1024),
    "6144x6": Size(6144, 6, 8, 1024),
    "8192x2": Size(8192, 2, 16, 1024),
}
SMALL_LABS = {"64x2": Size(64, 2, 2, 32)}
GRID = [
    (window, prefetch, fraction, recipes)
    for recipes in (True, False)
    for fraction in (1.0, 0.75, 0.5, 0.0)
    for window in (1, 2, 3, 5)
    for prefetch in (0.5, 1, 1.5, 3)
    if fraction or (window, prefetch) == (1, 0.5)
]


def target(
    size: Size, overhead: float, device: torch.device, time: Time
) -> dict[str, Any]:
    """`plan="auto"` as a user gets it."""
    lab = Lab(size, device, max_overhead=overhead)
    try:
        lab.settle(time.limit_s / 2)
        own = lab.steps(6)[1:]
        return {
            "step_ms": statistics.median(ms for ms, _ in own[1:]),
            "peak_gb": max(peak for _, peak in own[1:]) / 1e9,
            "losses": lab.losses[:NUM_STEPS],
            "max_overhead": overhead,
            "plan": summary(lab.session.plan),
            "report": lab.session.last_step.as_dict(),
        }
    finally:
        lab.close()


def prediction(size: Size, device: torch.device, num: int, time: Time) -> Any:
    """Predicted against measured over fixed, random and chosen plans of one model.

    Everything kept is measured between any two of them: a device's clock drifts. All
    are drawn before: while a plan is chosen the device rests, and is faster behind it.
    """
    lab = Lab(size, device)
    plans: list[dict[str, Any]] = []
    try:
        profile = lab.settle()
        lab.steps(1)
        lab.hold()
        timeline = Timeline(profile)
        found = {"plans": plans}
        keep = keep_all(timeline)
        drawn = list(_drawn(profile, timeline, num))
        before_ms = lab.under(keep, WARM_STEPS)["step_ms"]
        for how, name, orders in drawn:
            if time.is_late:
                break
            cell = {"how": how, "policy": name, **predicted(timeline, orders)}
            cell |= lab.under(orders)
            behind_ms = lab.under(keep)["step_ms"]
            plans.append({**cell, "keep_ms": (before_ms + behind_ms) / 2})
            before_ms = behind_ms
        return found
    finally:
        lab.close()


def _drawn(
    profile: Profile, timeline: Timeline, num: int
) -> Iterator[tuple[str, str, Orders]]:
    """Plans to predict: fixed, chosen, and `num` random ones."""
    for fixed in fixed_policies(timeline):
        orders = schedule(timeline, fixed.placements, fixed.style)
        yield "policy", fixed.name, orders
    for overhead in CHOSEN:
        chosen = choose(profile, Goal(max_overhead=overhead))
        yield "chosen", f"max_overhead {overhead:g}", chosen.orders
    for seed in range(num):
        yield "random", str(seed), random_orders(timeline, seed)


def decline(size: Size, device: torch.device, num_steps: int) -> dict[str, Any]:
    """What a session costs whose memory budget asks for nothing; plain runs around."""
    least = 1024 if size.hidden < 1024 else 2**20
    auto = ours(target="host", memory_budget=10**13, min_bytes=least)
    before, own, behind = (
        run_column(size, column, device, num_steps, settle_s=DECLINE_S)
        for column in (plain, auto, plain)
    )
    keep_ms = (before["step_ms"] + behind["step_ms"]) / 2
    return {
        "step_ms": own["step_ms"],
        "keep_ms": keep_ms,
        "ratio": own["step_ms"] / keep_ms,
        "plain_ms": [before["step_ms"], behind["step_ms"]],
        "equal": own["losses"] == before["losses"],
        "plain_equal": behind["losses"] == before["losses"],
    }


def regret(size: Size, device: torch.device, num: int, time: Time) -> Any:
    """A measured grid, and plans for budgets between the least and keep."""
    lab = Lab(size, device)
    pool = ProcessPoolExecutor(NUM_PLANNERS, multiprocessing.get_context("spawn"))
    try:
        profile = lab.settle()
        lab.steps(1)
        lab.hold()
        least = least_peak(profile)
        keep = (
            Simulation(Timeline(profile), keep_all(Timeline(profile))).run().peak_bytes
        )
        draw = random.Random(0)
        budgets = [int(least + (keep - least) * draw.random()) for _ in range(num)]
        # Planned beside the grid: a search takes longer than the steps it is for.
        plans = [pool.submit(planned, profile, b) for b in (int(0.9 * least), *budgets)]
        found: dict[str, Any] = {"grid": []}
        _grid(lab, profile, found["grid"], time)
        found["budgets"] = [{"least_bytes": least, "keep_bytes": keep}]
        found["budgets"][0]["unreachable"] = str(plans[0].result())
        for budget, plan in zip(budgets, plans[1:], strict=True):
            if time.is_late:
                break
            cell = _within(lab, profile, plan.result())
            found["budgets"].append({"budget_bytes": budget, **cell})
        return found
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        lab.close()


def _grid(lab: Lab, profile: Profile, grid: list[dict[str, Any]], time: Time) -> None:
    """The policy's own numbers, added to `grid` while there is time."""
    largest = max(item.num_bytes for item in Timeline(profile).items)
    for window, prefetch, fraction, recipes in GRID:
        if time.left_s < time.limit_s * 0.4:
            return
        cell = lab.under_settings(
            int(window * largest), int(prefetch * largest), fraction, recipes
        )
        grid.append({"point": [window, prefetch, fraction, recipes], **cell})


def _within(lab: Lab, profile: Profile, plan: Plan | str) -> dict[str, Any]:
    """A plan for a budget, predicted and measured, or why there is none."""
    if isinstance(plan, str):
        return {"error": plan}
    cell = {"policy": plan.policy, **predicted(Timeline(profile), plan.orders)}
    return {**cell, **lab.under(plan.orders, 2)}


def least_peak(profile: Profile) -> int:
    """The least peak the planner says it can reach."""
    try:
        choose(profile, Goal(memory_budget_bytes=1))
    except ConfigError as error:
        return int(str(error).split("activations is ")[1].split()[0])
    raise RuntimeError("a budget of one byte was reached")


Jobs = dict[str, tuple[float, Callable[[Time], dict[str, Any]]]]
"""Cells by name: their limit in seconds, and how they are run."""


def jobs(device: torch.device, small: bool, num_random: int) -> Jobs:
    """All cells, what matters most first."""
    sizes = SMALL if small else TARGETS
    labs = SMALL_LABS if small else LABS
    first = labs[min(labs)]
    num_random, num_budgets = (4, 4) if small else (num_random, 50)
    found: Jobs = {}
    for name, (size, overhead) in sizes.items():
        found[f"{name}/keep"] = 30, lambda _, s=size: run_column(s, plain, device, 4)
        found[f"{name}/auto"] = (
            150,
            lambda r, s=size, most=overhead: target(s, most, device, r),
        )
        # The device is warm by then, and its clock another.
        again = f"{name}/keep again"
        found[again] = 30, lambda _, s=size: run_column(s, plain, device, 8)
        full = f"{name}/full recompute"
        found[full] = 30, lambda _, s=size: run_column(s, recompute, device, 4)
    for name, lab in labs.items():
        found[f"prediction/{name}"] = (
            150,
            lambda r, s=lab: prediction(s, device, num_random, r),
        )
    found["decline"] = 30, lambda _: decline(first, device, 5 if small else 24)
    found["regret"] = 130, lambda r: regret(first, device, num_budgets, r)
    return found


def main(bench: Bench, *, small: bool = False, random_plans: int = 45) -> None:
    """Run the cells that are missing; `--only` also gives an order.

    Args:
        random_plans: of each prediction cell
    """
    cells = bench.cells({"small": small})
    found = jobs(bench.device, small, random_plans)
    wanted = bench.only or ("*",)
    for name in [name for each in wanted for name in fnmatch.filter(found, each)]:
        limit_s, run = found[name]
        cells.run(name, run, Time(limit_s), limit_s=limit_s)
