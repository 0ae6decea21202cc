"""Host time of a saved tensor by what becomes of it: kept, moved, rebuilt.

    python -m recipes.bench offload.host_actions
    python -m recipes.bench offload.host_actions --row tiny/full/64/eager/ours \\
        --device cpu

A stock model whose step the host bounds follows three plans in turns: one tensor of
each layer moves (so that no layer runs without hooks), all that can, and one of each
layer while all that has a recipe is rebuilt. Steps are timed on the host, from an idle
device until forward and backward are enqueued; the least of each counts, over a step
without a session. Three plans and three unknowns: microseconds of a kept tensor or
parameter, of a moved and of a rebuilt one, pack and use together, further handles of
the same bytes and the launches of what is rebuilt included.

Beside them, what moving costs at least (`bare`: the same copies by hooks that check
nothing, bare.py) and what it costs others (`trl`: TRL's OffloadActivations), each over
the same hooks when nothing is large enough to move. All of it in turns, `ROUNDS` times.

The tensors are small. A device takes a thousand calls before the host waits for it: of
large tensors the copies would fill its queues, and the figure would be the link's. So
64 tokens a step, and `min_bytes` low enough that their tensors move all the same;
`moved_mb` says how much that is. Of the planner the first profile alone is needed, and
no plan of its own is waited for.
"""

import gc
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait
from recipes.bench.models.real_build import build
from recipes.bench.models.real_catalogue import Row, row_of
from recipes.bench.models.real_row import Run, Trainer, around, trl_context
from recipes.bench.models.stock import num_tokens
from recipes.bench.offload.bare import BareHooks

SETTLED = 5
"""Steps under a plan before it is timed: tables and places are made."""
ROUNDS = 4
"""In turns, the least of which counts: a host may be slower for seconds."""
MOST_STEPS = 20
"""Until a step was observed; the fourth is the last one that should be needed."""
PLANS = ("one a layer", "all moved", "rebuilt")
MOVED = {"HostRow"}
REBUILT = {"RebuiltRow"}
KEPT = {
    *("KeptRow", "KeptItemRow", "ParameterRow", "ParameterViewRow"),
    *("RecordRow", "StayRow"),
}
"""Rows of a table by what becomes of their tensors; the others are in their figures."""


def solved(
    over_us: Mapping[str, float], rows: Mapping[str, Counter[str]]
) -> dict[str, float]:
    """Microseconds of each action.

    Args:
        over_us: host time of a step above plain, by plan.
        rows: of the tables, by plan.

    Raises:
        LookupError: a plan did nothing of its own.
    """
    numbers = [
        [
            float(sum(rows[plan][name] for name in kind))
            for kind in (KEPT, MOVED, REBUILT)
        ]
        for plan in PLANS
    ]
    for plan, action in ((1, 1), (2, 2)):
        if numbers[plan][action] <= numbers[0][action]:
            raise LookupError(
                f"the plan {PLANS[plan]!r} has rows {dict(rows[PLANS[plan]])}"
            )
    system = torch.tensor(numbers, dtype=torch.float64)
    values = torch.tensor([over_us[plan] for plan in PLANS], dtype=torch.float64)
    kept, moved, rebuilt = torch.linalg.solve(system, values).tolist()
    return {"kept_us": kept, "moved_us": moved, "rebuilt_us": rebuilt}


def plans_of(session: Any) -> dict[str, Any]:
    """The three plans for the session's profile."""
    from ssdtrain.plan.placement import Placement
    from ssdtrain.plan.plan import Plan
    from ssdtrain.plan.schedule import Late, Style, schedule
    from ssdtrain.plan.timeline import Timeline

    profile = session.profile
    timeline = Timeline(profile)
    ((kind, items),) = profile.kinds.items()
    own = [
        number
        for number, item in enumerate(items)
        if item.owner < 0 and item.serves < 0
    ]
    by_layer: dict[str, int] = {}
    for number in own:
        name = items[number].module.split(".self_attn")[0].split(".mlp")[0]
        found = by_layer.setdefault(name, number)
        if items[number].num_bytes < items[found].num_bytes:
            by_layer[name] = number
    some = set(by_layer.values())

    def plan(name: str, moved: set[int], rebuilt: set[int]) -> Plan:
        placed = tuple(
            Placement.OFFLOAD
            if number in moved
            else Placement.RECOMPUTE
            if number in rebuilt
            else Placement.KEEP
            for number in range(len(items))
        )
        orders = schedule(timeline, {kind: placed}, Style(late=Late.WAIT))
        return Plan(orders=orders, policy=name)

    again = {number for number in own if items[number].recipe is not None} - some
    return {
        "one a layer": plan("one a layer", some, set()),
        "all moved": plan("all moved", set(own), set()),
        "rebuilt": plan("rebuilt", some, again),
    }


def observed(session: Any, step: Callable[[], object]) -> None:
    """Run steps until one was observed.

    Raises:
        LookupError: none of so many was.
    """
    for _ in range(MOST_STEPS):
        if session.profile is not None:
            return
        step()
    raise LookupError(f"no profile after {MOST_STEPS} steps")


class Least:
    """The least host times of each way to run a step, over all rounds."""

    def __init__(
        self, trainer: Trainer, device: torch.device, num_tokens: int, num_steps: int
    ) -> None:
        self.times: dict[str, dict[str, float]] = {}
        self._device = device
        self._trainer = trainer
        self._num_tokens = num_tokens
        self._num_steps = num_steps

    def time(self, name: str, hooks: Callable[[], Any] = nullcontext) -> None:
        """Time steps under these hooks."""
        trainer = self._trainer
        trainer.around_forward = hooks
        for _ in range(SETTLED):
            trainer.step(self._num_tokens)
        gc.collect()
        found = []
        for _ in range(self._num_steps):
            began = wait(self._device)
            self.forward().backward()
            found.append((time.perf_counter() - began) * 1e3)
            trainer.update()
        wait(self._device)
        ms = {"host_ms": statistics.median(found), "host_least_ms": min(found)}
        before = self.times.setdefault(name, ms)
        self.times[name] = {key: min(before[key], ms[key]) for key in ms}

    def forward(self) -> torch.Tensor:
        """A forward under the last hooks."""
        return self._trainer.forward(self._num_tokens)

    def us_between(self, name: str, other: str, num: int) -> float:
        """Microseconds of each of so many tensors by which one takes longer."""
        ms = {key: found["host_least_ms"] for key, found in self.times.items()}
        return (ms[name] - ms[other]) * 1e3 / num


def without_session(
    least: Least, device: torch.device, parameters: list[Any], least_bytes: int
) -> dict[str, dict[str, float]]:
    """Time steps without hooks, under hooks that check nothing, and under TRL's where
    there are any; what a tensor that moves takes of these."""
    least.time("plain")
    found = {}
    bare = [BareHooks(device, parameters, each) for each in (math.inf, least_bytes)]
    for name, hooks in zip(("bare, keeps", "bare, moves"), bare, strict=True):
        least.time(name, hooks)
    num = bare[1].num_moved
    us = least.us_between("bare, moves", "bare, keeps", num)
    found["bare"] = {"num_moved": num, "moved_us": us}
    if device.type == "cuda" and find_spec("trl") is not None:
        trl, last = trl_context(), list[Any]()

        def hooks_of(size: int) -> Any:
            last[:] = [trl(min_offload_size=size)]
            return last[0]

        for name, each in (("trl, keeps", sys.maxsize), ("trl, moves", least_bytes)):
            least.time(name, partial(hooks_of, each))
        loss = least.forward()  # under those that move
        num = sum(1 for _, has_left, *_ in last[0].tracker.values() if has_left)
        loss.backward()
        us = least.us_between("trl, moves", "trl, keeps", num)
        found["trl"] = {"num_moved": num, "moved_us": us}
    return found


def measure(row: Row, device: torch.device, num_steps: int) -> dict[str, Any]:
    """Host times of the row's model and what they say of each action."""
    torch.manual_seed(0)
    num = num_tokens(row.tokens)
    model = build(row, device, num)
    trainer = Trainer(row, model, device)
    for _ in range(3):
        trainer.step(num)
    least = Least(trainer, device, num, num_steps)
    found: dict[str, Any] = {}
    rows: dict[str, Counter[str]] = {}
    parameters = list(model.parameters())
    for _ in range(ROUNDS):
        with around(row, Run(device=device.type), trainer) as session:
            observed(session, partial(trainer.step, num))
            least_bytes = session.cache.limits.least_bytes
            for name, plan in plans_of(session).items():
                session.follow(plan)
                least.time(name)
                found[name] = {"moved_mb": session.last_step.bytes_offloaded / 1e6}
                tables = session.cache.tables.tables.values()
                kinds = (type(each).__name__ for table in tables for each in table.rows)
                rows[name] = Counter(kinds)
        found |= without_session(least, device, parameters, least_bytes)
    over_us = {name: least.us_between(name, "plain", 1) for name in PLANS}
    for name, times in least.times.items():
        found[name] = {**found.get(name, {}), **times}
    found["rows"] = {name: dict(counter) for name, counter in rows.items()}
    return found | solved(over_us, rows)


def main(
    bench: Bench,
    *,
    row: str = "qwen3-4b/full/64/eager/ours min_bytes=65536",
    steps: int = 6,
) -> None:
    """Measure one row that is not in the file yet."""
    cells = bench.cells({"steps": ROUNDS * steps})
    cells.run(row, measure, row_of(row), bench.device, steps)
