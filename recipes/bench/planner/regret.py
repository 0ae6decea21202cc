"""The planner on a device: targets, prediction, regret, budgets.

    python -m recipes.bench planner.regret --budget-s 250

Cells are run in the order of what matters most and resumed by a second run; each has
a limit of its own, and writes what it knows as it goes. `--only` also gives an order.
Profiles are written beside the results, as `profile_NAME.json`.
The bandwidth cells are run by `--only 'bandwidth/*' --directory SSD`, and want 50 GB of
memory that can be pinned. `--small` runs all paths on tiny models (a CPU is enough).
"""

import fnmatch
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from recipes.bench.harness.blocks import Size
from recipes.bench.harness.cli import Bench
from recipes.bench.offload.placement import ours, plain, recompute, run_column
from recipes.bench.planner.lab import (
    Lab,
    Orders,
    Record,
    facts,
    planned,
    predicted,
    random_orders,
    summary,
)
from ssdtrain.curves import COPY_SLOWDOWN
from ssdtrain.errors import ConfigError
from ssdtrain.plan.baselines import fixed_policies
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import Run, keep_all
from ssdtrain.plan.timeline import Timeline
from ssdtrain.tools.report.references import references

DISKS = ("disk", "disk, staged")
"""The path that is measured fastest, and through pinned memory: a slow disk then holds
no device memory."""
SETTLE_S = 20.0
"""Half of a cell's limit."""
MEMORY_BYTES = 16 << 30
"""Of the storage behind the bandwidth cells."""
RATES = ("12", "6", "18", "2", "24")
"""GB/s, each way."""
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
    size: Size, overhead: float, device: torch.device, record: Record
) -> dict[str, Any]:
    """`plan="auto"` as a user gets it."""
    start = time.monotonic()
    lab = Lab(size, device, max_overhead=overhead)
    try:
        profile = lab.settle(record.limit_s / 2)
        record.profile(profile)
        settle_s = time.monotonic() - start
        own = lab.steps(6)[1:]
        found: dict[str, Any] = {
            "step_ms": statistics.median(ms for ms, _ in own[1:]),
            "peak_gb": max(peak for _, peak in own[1:]) / 1e9,
            "losses": lab.losses[:NUM_STEPS],
            "settle_s": settle_s,
            "max_overhead": overhead,
            "plan": summary(lab.session.plan),
            "report": lab.session.last_step.as_dict(),
        }
        timeline = Timeline(profile)
        found["profile"] = facts(profile)
        found["references"] = [
            {"name": r.name, "step_ms": r.step_ms, "peak_bytes": r.peak_bytes}
            for r in references(timeline)
        ]
        record.note(found)
        lab.hold()
        beside = found["beside"] = []
        for name, plan in _beside(profile, overhead):
            cell = {"plan": name, **predicted(timeline, plan)}
            beside.append({**cell, **lab.under(plan, 2)})
            record.note(found)
        return found
    finally:
        lab.close()


def _beside(profile: Profile, overhead: float) -> Iterator[tuple[str, Orders]]:
    """In the same steps: everything kept, and what would have been chosen with the
    constant slowdown by copies instead of the measured one."""
    yield "keep-all", keep_all(Timeline(profile))
    links = replace(profile.links, copy_slowdown=COPY_SLOWDOWN)
    if links != profile.links:
        constant = replace(profile, links=links)
        yield "constant slowdown", choose(constant, Goal(max_overhead=overhead)).orders


def _fixed(timeline: Timeline) -> Iterator[tuple[str, Orders]]:
    for fixed in fixed_policies(timeline):
        yield fixed.name, schedule(timeline, fixed.placements, fixed.style)


def prediction(size: Size, device: torch.device, num: int, record: Record) -> Any:
    """Predicted against measured over fixed, random and chosen plans of one model.

    Everything kept is measured between any two of them: a device's clock drifts. All
    are drawn before: while a plan is chosen the device rests, and is faster behind it.
    """
    lab = Lab(size, device)
    plans: list[dict[str, Any]] = []
    try:
        profile = lab.settle()
        record.profile(profile)
        lab.step()
        lab.hold()
        timeline = Timeline(profile)
        found = {"plans": plans, "profile": facts(profile)}
        keep = keep_all(timeline)
        drawn = list(_drawn(profile, timeline, num))
        before_ms = lab.under(keep, WARM_STEPS)["step_ms"]
        for how, name, orders in drawn:
            if record.is_late:
                break
            cell = {"how": how, "policy": name, **predicted(timeline, orders)}
            cell |= lab.under(orders)
            behind_ms = lab.under(keep)["step_ms"]
            plans.append({**cell, "keep_ms": (before_ms + behind_ms) / 2})
            before_ms = behind_ms
            record.note(found)
        return found
    finally:
        lab.close()


def _drawn(
    profile: Profile, timeline: Timeline, num: int
) -> Iterator[tuple[str, str, Orders]]:
    """Plans to predict: fixed, chosen, and `num` random ones."""
    for name, orders in _fixed(timeline):
        yield "policy", name, orders
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


def regret(size: Size, device: torch.device, num: int, record: Record) -> Any:
    """A measured grid, and plans for budgets between the least and keep."""
    lab = Lab(size, device)
    pool = ProcessPoolExecutor(NUM_PLANNERS, multiprocessing.get_context("spawn"))
    try:
        profile = lab.settle()
        lab.step()
        lab.hold()
        least = least_peak(profile)
        keep = Run(Timeline(profile), keep_all(Timeline(profile))).run().peak_bytes
        draw = random.Random(0)
        budgets = [int(least + (keep - least) * draw.random()) for _ in range(num)]
        # Planned beside the grid: a search takes longer than the steps it is for.
        plans = [pool.submit(planned, profile, b) for b in (int(0.9 * least), *budgets)]
        found: dict[str, Any] = {"grid": []}
        _grid(lab, profile, found["grid"], record)
        found["budgets"] = [{"least_bytes": least, "keep_bytes": keep}]
        record.note(found)
        found["budgets"][0]["unreachable"] = str(plans[0].result())
        for budget, plan in zip(budgets, plans[1:], strict=True):
            if record.is_late:
                break
            cell = _within(lab, profile, plan.result())
            found["budgets"].append({"budget_bytes": budget, **cell})
            record.note(found)
        return found
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        lab.close()


def _grid(
    lab: Lab, profile: Profile, grid: list[dict[str, Any]], record: Record
) -> None:
    """The policy's own numbers, added to `grid` while there is time."""
    largest = max(item.num_bytes for item in Timeline(profile).items)
    for window, prefetch, fraction, recipes in GRID:
        if record.left_s < record.limit_s * 0.4:
            return
        cell = lab.under_settings(
            int(window * largest), int(prefetch * largest), fraction, recipes
        )
        grid.append({"point": [window, prefetch, fraction, recipes], **cell})
        record.note({"grid": grid})


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


Jobs = dict[str, tuple[float, Callable[[Record], dict[str, Any]]]]
"""Cells by name: their limit in seconds, and how they are run."""


def bandwidth(
    size: Size, device: torch.device, directory: str, name: str, record: Record
) -> dict[str, Any]:
    """The least peak at 1 % overhead behind a storage of this speed."""
    gb_per_s = None if name in DISKS else float(name)
    # What stands in for a limited SSD is host memory: nothing reaches it directly.
    path = {} if name == DISKS[0] else {"gpu_direct": "off"}
    lab = Lab(size, device, target="ssd", directory=directory, io_threads=16, **path)
    try:
        if gb_per_s is not None:
            lab.limit_storage(gb_per_s, MEMORY_BYTES)
        profile = lab.settle(SETTLE_S)
        record.profile(profile)
        own = lab.steps(8)
        report = lab.session.last_step
        forward_backward_ms = profile.compute_ms - profile.tail_ms
        write = profile.links.ssd_write
        rate = 0.0 if write is None else write.bytes_per_second / 1e9
        plan = summary(lab.session.plan)
        lab.hold()
        keep = lab.under(keep_all(Timeline(profile)), 6)
        return {
            "keep_ms": keep["step_ms"],
            "gb_per_s": gb_per_s,
            "measured_write_gb_per_s": rate,
            "step_ms": statistics.median(ms for ms, _ in own[2:]),
            "steps_ms": [ms for ms, _ in own],
            "peak_gb": max(peak for _, peak in own[2:]) / 1e9,
            "profile": facts(profile),
            "plan": plan,
            "offloaded_gb": report.bytes_offloaded / 1e9,
            "written_gb": report.bytes_written / 1e9,
            "half_step_gb": rate * forward_backward_ms / 2e3,
            "report": report.as_dict(),
        }
    finally:
        lab.close()


def jobs(
    device: torch.device,
    *,
    small: bool,
    num_random: int,
    prediction_s: float,
    directory: str | None,
) -> Jobs:
    """All cells, what matters most first."""
    sizes = SMALL if small else TARGETS
    labs = SMALL_LABS if small else LABS
    first, second = labs[min(labs)], labs[max(labs)]
    num_random, num_budgets = (4, 4) if small else (num_random, 50)
    found: Jobs = {}

    def column(size: Size, how: Callable[[Any], Any], steps: int) -> Any:
        return lambda _: run_column(size, how, device, steps)

    def both(name: str) -> None:
        size, overhead = sizes[name]
        found[f"{name}/keep"] = 30, column(size, plain, 4)
        found[f"{name}/auto"] = 150, lambda r: target(size, overhead, device, r)
        # The device is warm by then, and its clock another.
        found[f"{name}/keep again"] = 30, column(size, plain, 8)

    for name in list(sizes)[:3]:
        both(name)
    found |= _predictions(labs, device, num_random, prediction_s)
    for name in list(sizes)[3:]:
        both(name)
    for name, (size, _) in sizes.items():
        found[f"{name}/full recompute"] = 30, column(size, recompute, 4)
    found["decline"] = 30, lambda _: decline(first, device, 5 if small else 24)
    found["regret"] = 130, lambda r: regret(first, device, num_budgets, r)
    if directory:
        for name in (*DISKS, *RATES):
            behind = partial(bandwidth, second, device, directory, name)
            found[f"bandwidth/{name}"] = 40, behind
    return found


def _predictions(
    labs: dict[str, Size], device: torch.device, num_random: int, limit_s: float
) -> Jobs:
    return {
        f"prediction/{name}": (
            limit_s,
            lambda r, size=size: prediction(size, device, num_random, r),
        )
        for name, size in labs.items()
    }


def main(
    bench: Bench,
    *,
    small: bool = False,
    random_plans: int = 45,
    prediction_s: float = 150.0,
    directory: str | None = None,
) -> None:
    """Run the cells that are missing; `--only` also gives an order.

    Args:
        random_plans: of each prediction cell
        prediction_s: limit of each of them
        directory: an SSD's, for the bandwidth cells
    """
    torch.set_num_threads(1)  # the storage's own threads copy in main memory
    cells = bench.cells({"small": small})
    found = jobs(
        bench.device,
        small=small,
        num_random=random_plans,
        prediction_s=prediction_s,
        directory=directory,
    )
    wanted = bench.only or ("*",)
    for name in [name for each in wanted for name in fnmatch.filter(found, each)]:
        limit_s, run = found[name]
        cells.run(name, run, Record(cells, name, limit_s), limit_s=limit_s)
