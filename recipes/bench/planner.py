"""The planner on a device: targets, frontier, prediction, regret, budgets.

    PYTHONPATH=. python recipes/bench/planner.py --budget-s 250

Cells are run in the order of what matters most and resumed by a second run.
`--small` runs all paths on tiny models (a CPU is enough).
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Cells
from placement import Size, plain, recompute, run_column
from planner_lab import Lab, predicted, random_orders

from ssdtrain.errors import ConfigError
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.policies import fixed_policies, references
from ssdtrain.plan.profile import Profile, to_json
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.timeline import Timeline

TARGETS = {
    "8192x4": (Size(8192, 4, 16, 1024), 0.02),
    "12288x3": (Size(12288, 3, 16, 1024), 0.01),
    "16384x2": (Size(16384, 2, 16, 1024), 0.01),
    "6144x24": (Size(6144, 24, 8, 2048), 0.05),
}
SMALL = {"256x2": (Size(256, 2, 4, 64), 0.05)}
FRONTIER = (0.0, 0.02, 0.05, 0.1)
NUM_STEPS = 5
LAB = Size(4096, 8, 16, 1024)
SECOND_LAB = Size(8192, 2, 16, 1024)
SMALL_LAB = Size(128, 2, 4, 64)
GRID = [
    (window, prefetch, fraction, recipes)
    for recipes in (True, False)
    for fraction in (1.0, 0.75, 0.5, 0.0)
    for window in (1, 2, 3, 5)
    for prefetch in (0.5, 1, 1.5, 3)
    if fraction or (window, prefetch) == (1, 0.5)
]


def target(size: Size, overhead: float, device: torch.device) -> dict[str, Any]:
    """`plan="auto"` as a user gets it, then the frontier around it."""
    lab = Lab(size, device, max_overhead=overhead)
    try:
        start = time.monotonic()
        profile = lab.settle()
        settle_s = time.monotonic() - start
        own = [lab.step() for _ in range(4)]
        found = {
            "step_ms": statistics.median(ms for ms, _ in own[1:]),
            "peak_gb": max(peak for _, peak in own[1:]) / 1e9,
            "losses": lab.losses[:NUM_STEPS],
            "settle_s": settle_s,
            "max_overhead": overhead,
            "plan": _summary(lab.session.plan),
            "report": lab.session.last_step.as_dict(),
        }
        lab.hold()
        timeline = Timeline(profile)
        points = []
        is_large = size.num_layers > 8
        for limit in FRONTIER[-1:] if is_large else FRONTIER:
            start = time.monotonic()
            plan = choose(profile, Goal(max_overhead=limit))
            choose_s = time.monotonic() - start
            points.append(
                {
                    "max_overhead": limit,
                    "policy": plan.policy,
                    "choose_s": choose_s,
                    **predicted(timeline, plan.orders),
                    **lab.under(plan.orders, 1),
                }
            )
        found["frontier"] = points
        found["policies"] = [] if is_large else _policies(lab, timeline)
        found["references"] = [
            {"name": r.name, "step_ms": r.step_ms, "peak_bytes": r.peak_bytes}
            for r in references(timeline)
        ]
        found["profile"] = _facts(profile)
        return found
    finally:
        lab.close()


def _policies(lab: Lab, timeline: Timeline) -> list[dict[str, Any]]:
    """Every fixed policy, predicted and measured."""
    found = []
    for fixed in fixed_policies(timeline):
        orders = schedule(timeline, fixed.placements, fixed.style)
        found.append(
            {
                "policy": fixed.name,
                **predicted(timeline, orders),
                **lab.under(orders, 1),
            }
        )
    return found


def _summary(plan: Any) -> dict[str, Any]:
    prediction = plan.prediction
    return {
        "policy": plan.policy,
        "bytes": plan.bytes_by_placement(),
        "step_ms": prediction.step_ms,
        "peak_gb": prediction.peak_bytes / 1e9,
        "keep_ms": prediction.keep_ms,
        "keep_peak_gb": prediction.keep_peak_bytes / 1e9,
        "stall_ms": prediction.stall_ms,
        "recompute_ms": prediction.recompute_ms,
    }


def _facts(profile: Profile) -> dict[str, Any]:
    links = profile.links
    recipes: dict[str, list[float]] = {}
    for items in profile.kinds.values():
        for item in items:
            if item.recipe is not None:
                cell = recipes.setdefault(item.recipe, [0, 0.0, 0.0])
                cell[0] += 1
                cell[1] += item.num_bytes / 1e9
                cell[2] += item.recipe_ms
    return {
        "d2h_gb_per_s": links.d2h.bytes_per_second / 1e9,
        "h2d_gb_per_s": links.h2d.bytes_per_second / 1e9,
        "num_marks": len(profile.marks),
        "compute_ms": profile.compute_ms,
        "head_ms": profile.head_ms,
        "tail_ms": profile.tail_ms,
        "recipes (number, GB, ms)": recipes,
    }


def prediction(size: Size, device: torch.device, num: int, limit_s: float) -> Any:
    """Predicted against measured over random and chosen plans of one model."""
    deadline = time.monotonic() + limit_s
    lab = Lab(size, device)
    try:
        profile = lab.settle()
        lab.step()
        lab.hold()
        timeline = Timeline(profile)
        plans: list[dict[str, Any]] = []
        plans += [{"how": "policy", **cell} for cell in _policies(lab, timeline)]
        for seed in range(num):
            if time.monotonic() > deadline:
                break
            orders = random_orders(timeline, seed)
            plans.append(
                {
                    "how": "random",
                    **predicted(timeline, orders),
                    **lab.under(orders, 2),
                }
            )
        for overhead in (0.0, 0.01, 0.03, 0.1, 0.2, 0.4):
            if time.monotonic() > deadline:
                break
            chosen = choose(profile, Goal(max_overhead=overhead))
            plans.append(
                {
                    "how": "chosen",
                    **predicted(timeline, chosen.orders),
                    **lab.under(chosen.orders, 2),
                }
            )
        return {"plans": plans, "profile": _facts(profile), "json": to_json(profile)}
    finally:
        lab.close()


def regret(size: Size, device: torch.device, num: int, limit_s: float) -> Any:
    """A measured grid, and plans for budgets between the least and keep."""
    deadline = time.monotonic() + limit_s
    lab = Lab(size, device)
    try:
        profile = lab.settle()
        lab.step()
        lab.hold()
        timeline = Timeline(profile)
        largest = max(item.num_bytes for item in timeline.items)
        grid = []
        for window, prefetch, fraction, recipes in GRID:
            if time.monotonic() > deadline - limit_s / 2:
                break
            cell = lab.under_settings(
                int(window * largest), int(prefetch * largest), fraction, recipes
            )
            point = [window, prefetch, fraction, recipes]
            grid.append({"point": point, **cell})
        return {"grid": grid, "budgets": _budgets(lab, profile, num, deadline)}
    finally:
        lab.close()


def _budgets(
    lab: Lab, profile: Profile, num: int, deadline: float
) -> list[dict[str, Any]]:
    timeline = Timeline(profile)
    keep = next(f for f in fixed_policies(timeline) if f.name == "keep-all")
    most = predicted(timeline, schedule(timeline, keep.placements))[
        "predicted_peak_bytes"
    ]
    least = least_peak(profile)
    draw = random.Random(0)
    budgets = [int(least + (most - least) * draw.random()) for _ in range(num)]
    found: list[dict[str, Any]] = [{"least_bytes": least, "keep_bytes": most}]
    try:
        choose(profile, Goal(memory_budget_bytes=int(0.9 * least)))
    except ConfigError as error:
        found[0]["unreachable"] = str(error)
    for budget in budgets:
        if time.monotonic() > deadline:
            break
        try:
            plan = choose(profile, Goal(memory_budget_bytes=budget))
        except ConfigError as error:
            found.append({"budget_bytes": budget, "error": str(error)})
            continue
        found.append(
            {
                "budget_bytes": budget,
                "policy": plan.policy,
                **predicted(timeline, plan.orders),
                **lab.under(plan.orders, 2),
            }
        )
    return found


def bandwidth(
    size: Size, device: torch.device, directory: str, gb_per_s: float | None
) -> dict[str, Any]:
    """The least peak at 1 % overhead behind a storage of this speed."""
    limit: dict[str, Any] = {}
    if gb_per_s is not None:
        limit = {"write_gb_per_s": gb_per_s, "io_threads": 16}
    lab = Lab(size, device, target="ssd", directory=directory, **limit)
    try:
        profile = lab.settle()
        own = [lab.step() for _ in range(4)]
        report = lab.session.last_step
        forward_backward_ms = profile.compute_ms - profile.tail_ms
        write = profile.links.ssd_write
        rate = 0.0 if write is None else write.bytes_per_second / 1e9
        return {
            "gb_per_s": gb_per_s,
            "measured_write_gb_per_s": rate,
            "step_ms": statistics.median(ms for ms, _ in own[1:]),
            "peak_gb": max(peak for _, peak in own[1:]) / 1e9,
            "plan": _summary(lab.session.plan),
            "offloaded_gb": report.bytes_offloaded / 1e9,
            "written_gb": report.bytes_written / 1e9,
            "half_step_gb": rate * forward_backward_ms / 2e3,
            "report": report.as_dict(),
        }
    finally:
        lab.close()


def least_peak(profile: Profile) -> int:
    """The least peak the planner says it can reach."""
    try:
        choose(profile, Goal(memory_budget_bytes=1))
    except ConfigError as error:
        return int(str(error).split("activations is ")[1].split()[0])
    raise RuntimeError("a budget of one byte was reached")


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--budget-s", type=float, default=250)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="+", help="cells whose name begins so")
    parser.add_argument("--directory", help="an SSD's, for the bandwidth cells")
    parser.add_argument(
        "--fast-directory", help="behind the rate limits, such as one in /dev/shm"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cells = Cells(options.out, options.budget_s, {"small": options.small})
    sizes = SMALL if options.small else TARGETS
    labs = (SMALL_LAB, SMALL_LAB) if options.small else (LAB, SECOND_LAB)
    num = 4 if options.small else 28

    def run(name: str, cell: Any) -> None:
        if not options.only or name.startswith(tuple(options.only)):
            cells.run(name, cell)

    first = list(sizes)[:3]

    def both(name: str) -> None:
        size, overhead = sizes[name]
        run(f"{name}/keep", lambda: run_column(size, plain, device, NUM_STEPS))
        run(f"{name}/auto", lambda: target(size, overhead, device))

    for name in first:
        both(name)
    run("prediction/1", lambda: prediction(labs[0], device, num, 40))
    for name in list(sizes)[3:]:
        both(name)
    budgets = 4 if options.small else 50
    run("regret", lambda: regret(labs[0], device, budgets, 90))
    run("prediction/2", lambda: prediction(labs[1], device, num, 40))
    for name, (size, _) in sizes.items():
        run(
            f"{name}/full recompute",
            lambda s=size: run_column(s, recompute, device, NUM_STEPS),
        )
    if options.directory:
        fast = options.fast_directory or options.directory
        for rate in (None, 2.0, 6.0, 12.0, 18.0, 24.0):
            where = options.directory if rate is None else fast
            run(
                f"bandwidth/{rate or 'disk'}",
                lambda r=rate, w=where: bandwidth(labs[1], device, w, r),
            )


if __name__ == "__main__":
    main()
