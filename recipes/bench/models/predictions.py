"""What plans predict of step and memory, and whether budgets hold: many plans a model.

A session observes the model, as in training; from what it observed, plans for budgets
and overheads are searched for by the processes that search beside training, and
followed one after another. Nothing corrects a plan then, as a session of its own would.
Budgets are shares of the plain step's activation peak. `whole` is all that is allocated
in forward and backward: weights, gradients, optimizer and activations. Plain steps are
timed first and last: a device that has worked for some seconds may be slower than in
those that plans were made by.

    python -m recipes.bench models.predictions --budget-s 150
    python -m recipes.bench models.predictions --rows tiny/full/32 --device cpu
"""

import statistics
import time
from typing import Any

import torch

from recipes.bench.harness.cli import Bench
from recipes.bench.models.real_build import build
from recipes.bench.models.real_catalogue import Row, row_of
from recipes.bench.models.real_row import Step, Trainer
from recipes.bench.models.stock import num_tokens

ROWS = (
    "qwen3-1.7b:8/full/2k",
    "qwen3-1.7b:8/full/8k",
    "qwen3-1.7b:8/lora/16k",
    "qwen3-4b:6/full/4k",
    "qwen3-4b:6/full/8k",
    "qwen3-4b:6/lora/16k",
    "qwen3-8b:4/full/8k",
    "qwen3-8b:6/lora/8k",
    "mistral-7b:5/lora/8k",
    "moe:4/full/8k",
)
GOALS: tuple[tuple[str, float], ...] = (
    ("budget", 0.85),
    ("budget", 0.7),
    ("budget", 0.55),
    ("budget", 0.45),
    ("budget", 0.35),
    ("overhead", 0.05),
)
"""Of each row: shares of the plain peak, and of the plain step."""
MARKS = 400_000
"""How long is searched, as `choose` says: a second or two."""
LEAST_PLANNED_STEPS = 5
"""Under the session's own plan: its third step says what hooks cost the host."""
NUM_UNTIMED = 3
"""Under each plan: its tables and its pinned memory are made."""


def trained(trainer: Trainer, num: int, count: int) -> list[Step]:
    """So many steps."""
    return [trainer.step(num) for _ in range(count)]


def middle_ms(steps: list[Step]) -> float:
    """Of their times."""
    return statistics.median(step.ms for step in steps)


def observed(trainer: Trainer, num: int, session: Any, limit_s: float) -> int:
    """Steps until the session knows what it can know; how many."""
    until = time.perf_counter() + limit_s
    planned = count = 0
    while not (planned >= LEAST_PLANNED_STEPS and session.is_settled):
        if time.perf_counter() > until:
            break
        trainer.step(num)
        count += 1
        planned += session.plan is not None
    if session.profile is None:
        raise RuntimeError(f"nothing is observed after {limit_s:.0f} s")
    return count


def searched(profile: Any, goals: list[Any], limit_s: float) -> list[Any]:
    """What the processes that search beside training find for these goals."""
    from ssdtrain.plan.search import Request, Search

    until = time.perf_counter() + limit_s
    searches = [
        Search(Request(profile=profile, goal=goal, efforts=(MARKS,))) for goal in goals
    ]
    found: list[Any] = [None] * len(goals)
    waiting = set(range(len(goals)))
    while waiting and time.perf_counter() < until:
        for number in list(waiting):
            found[number] = searches[number].answer()
            if found[number] is not None or searches[number].is_over:
                waiting.discard(number)
        time.sleep(0.002)
    for search in searches:
        search.stop()
        search.clear(wait=True)
    return found


def goals_of(plain_bytes: int) -> dict[str, Any]:
    """The goals of a row, by name."""
    from ssdtrain.plan.goal import Goal

    found = {}
    for name, value in GOALS:
        if name == "budget":
            goal = Goal(memory_budget_bytes=int(value * plain_bytes))
        else:
            goal = Goal(max_overhead=value)
        found[f"{name} {value:g}"] = goal
    return found


def followed(
    trainer: Trainer, num: int, session: Any, answer: Any, count: int
) -> dict[str, Any]:
    """Train under a plan: predicted and measured."""
    if answer is None or answer.plan is None:
        return {"error": answer.error if answer else "no plan in time"}
    plan, base_bytes = answer.plan, session.profile.base_bytes
    prediction = plan.prediction
    session.follow(plan)
    trained(trainer, num, NUM_UNTIMED)
    level_bytes = trainer.allocated_bytes
    steps = trained(trainer, num, count)
    step_ms, peak_bytes = middle_ms(steps), max(step.peak_bytes for step in steps)
    report = session.last_step
    found = {
        "step_ms": step_ms,
        "predicted_ms": prediction.step_ms,
        "predicted_keep_ms": prediction.keep_ms,
        "predicted_waits_ms": dict(prediction.waits),
        "peak_gb": peak_bytes / 1e9,
        "predicted_gb": prediction.peak_bytes / 1e9,
        "whole_gb": (level_bytes + peak_bytes) / 1e9,
        "predicted_whole_gb": (base_bytes + prediction.peak_bytes) / 1e9,
        "predicted_keep_gb": prediction.keep_peak_bytes / 1e9,
        "peak_at": peak_of(session.profile, plan),
        "policy": plan.policy,
        "fallbacks": {} if report is None else report.fallbacks,
    }
    found["step_error"] = prediction.step_ms / step_ms - 1
    if found["whole_gb"] > 0:
        found["whole_error"] = found["predicted_whole_gb"] / found["whole_gb"] - 1
    return found


def peak_of(profile: Any, plan: Any) -> str:
    """Where a plan's peak is predicted, and how much of it is no saved tensor."""
    from ssdtrain.plan.simulate import Run
    from ssdtrain.plan.timeline import Timeline

    at = Run(Timeline(profile), plan.orders).run().peak_mark
    mark = profile.marks[at]
    item = profile.items_of(mark.lane)[mark.item]
    others = f"{mark.other_bytes / 1e9:.3f} GB of others"
    return f"{mark.phase.value} {item.name} of {item.module}, {others}"


def row(own: Row, device: torch.device, count: int, limit_s: float) -> dict[str, Any]:
    """All plans of one model and length.

    Args:
        count: timed steps of a plan.
        limit_s: to observe.
    """
    import ssdtrain

    num = num_tokens(own.tokens)
    torch.manual_seed(0)
    model = build(own, device, num)
    trainer = Trainer(own, model, device)
    trained(trainer, num, NUM_UNTIMED)
    plain = trained(trainer, num, count)
    plain_bytes = max(step.peak_bytes for step in plain)
    found: dict[str, Any] = {
        "plain_ms": middle_ms(plain),
        "plain_peak_gb": plain_bytes / 1e9,
        "plans": {},
    }
    more = {"min_bytes": 1} if own.model.startswith("tiny") else {}
    with ssdtrain.offload(model, **more) as session:
        found["num_observed"] = observed(trainer, num, session, limit_s)
        found["settled"] = session.is_settled
        # A CPU's tensors are counted nowhere: then of what the plan says they need.
        most = plain_bytes or session.plan.prediction.keep_peak_bytes
        goals = goals_of(most)
        began = time.perf_counter()
        answers = searched(session.profile, list(goals.values()), 5 * limit_s)
        found["search_s"] = round(time.perf_counter() - began, 2)
        for (name, goal), answer in zip(goals.items(), answers, strict=True):
            plan = followed(trainer, num, session, answer, count)
            if goal.memory_budget_bytes is not None:
                plan["budget_gb"] = goal.memory_budget_bytes / 1e9
            found["plans"][name] = plan
    later = trained(trainer, num, NUM_UNTIMED + count)
    found["plain_later_ms"] = middle_ms(later[NUM_UNTIMED:])
    return found


def main(
    bench: Bench,
    *,
    rows: tuple[str, ...] = tuple(ROWS),
    steps: int = 5,
    limit_s: float = 6.0,
) -> None:
    """Measure the rows that are missing.

    Args:
        steps: timed ones of a plan
        limit_s: to observe a row
    """
    settings = {"device": bench.device.type, "steps": steps, "marks": MARKS}
    cells = bench.cells(settings)
    device = bench.device
    for name in rows:
        own = row_of(f"{name}/eager/ours")
        limit = 8 * limit_s + 10
        cells.run(name, row, own, device, steps, limit_s, limit_s=limit)
