"""`device_memory="fit"` on devices of 40, 60 and 80 GB, beside a grid of budgets.

Each cell is a process whose allocator may reserve no more than its limit. It trains the
stock loop under `device_memory="fit"` until nothing settles any more: within the limit,
or with an error before the second step that names what is short. In some cells a grid
of byte budgets follows, for each of which the session searches from the same
observation: the best of those that train is what "fit" is compared with.

A model of fewer layers stands for the whole one: its limit is what its own weights,
gradients and optimizer take, one layer's transients, and its layers' part of the rest.
The loss is Liger's fused one everywhere. One process a GPU.

    python -m recipes.bench models.grid --budget-s 100
    python -m recipes.bench models.grid --names qwen3-4b:36/full/1x8k@40 --grid 4
    python -m recipes.bench models.grid --device cpu --tiny     # every path, no limit
"""

import itertools
import statistics
from dataclasses import dataclass, replace
from typing import Any

from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.harness.processes import answer_of, on_gpus
from recipes.bench.models import fits
from recipes.bench.models.predictions import searched
from recipes.bench.models.stock import Case, case_of, fuse_the_loss

LAYERS = {"8k": 12, "16k": 12, "32k": 6, "64k": 3}
"""By tokens: steps of half a second or so."""
WHOLE = 36
"""Layers of both models."""
GRID_CELLS = (
    "qwen3-4b:12/full/1x8k@40",
    "qwen3-8b:12/lora/1x16k@40",
    "qwen3-4b:12/full/1x16k@60",
    "qwen3-8b:6/lora/1x32k@60",
)
"""These first."""
CELLS = GRID_CELLS + tuple(
    name
    for limit, tokens, model in itertools.product(
        (40, 80, 60), LAYERS, ("qwen3-4b:{}/full", "qwen3-8b:{}/lora")
    )
    if (name := f"{model.format(LAYERS[tokens])}/1x{tokens}@{limit}") not in GRID_CELLS
)
BUDGETS = (0.5, 0.7, 0.85, 0.92, 0.97)
"""Of what the limit leaves to activations; what may end out of memory comes last."""
ALIVE = 8
"""Tensors of a layer's inner width that are alive at once while it runs again."""
NUM_UNTIMED = 3
NUM_TIMED = 5
GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Run(fits.Run):
    """grid: whether budgets are measured behind "fit"."""

    grid: bool = False


def split(name: str) -> tuple[Case, int]:
    """The case and the GB of a name such as `qwen3-4b:12/full/1x8k@40`.

    Raises:
        ValueError: it is no such name.
    """
    case, _, limit = name.partition("@")
    if not limit.isdigit():
        raise ValueError(f"expects CASE@GB, got {name!r}")
    return case_of(case), int(limit)


def num_weights(case: Case, layers: int) -> int:
    """Of a decoder with so many layers; norms are nothing."""
    own = case.stock.settings
    hidden, width = own["hidden_size"], own["head_dim"]
    heads = 2 * own["num_attention_heads"] + 2 * own["num_key_value_heads"]
    layer = hidden * (heads * width + 3 * own["intermediate_size"])
    ends = 1 if own["tie_word_embeddings"] else 2
    return layers * layer + ends * own["vocab_size"] * hidden  # type: ignore[no-any-return]


def limit_bytes(case: Case, limit: int) -> int:
    """What the case may reserve where the whole model may reserve so many GB."""
    each = 8 if case.tuned == "full" else 2
    whole, own = (each * num_weights(case, n) for n in (WHOLE, case.layers))
    inside = case.stock.settings["intermediate_size"]
    passing = min(ALIVE * 2 * case.num_tokens * inside, limit * GB - whole)
    rest = limit * GB - whole - passing
    return own + passing + rest * case.layers // WHOLE


def measure(name: str, run: Run) -> dict[str, Any]:
    """Train one cell, and its grid."""
    import ssdtrain

    fits.take_gpu(run)
    case, _ = split(name)
    with fits.limited(run):
        if run.device == "cuda":
            fuse_the_loss(case.stock.fused)
        loop = fits.Loop(case, run)
        settings: dict[str, Any] = {"device_memory": "fit"}
        settings |= {"min_bytes": 1} if run.tiny else {}
        session = ssdtrain.offload(loop.model, **settings)
        found = fits.train(loop, session, run)
        found |= fits.told(loop)
        if "error" not in found:
            found["step_ms"] = middle_ms(loop)
            if run.grid:
                found["budgets"] = budgets(loop, session, run)
            session.close()
    return found


def middle_ms(loop: fits.Loop) -> float:
    """Of the last steps."""
    return statistics.median(loop.steps_ms()[-NUM_TIMED:])


def budgets(loop: fits.Loop, session: Any, run: Run) -> dict[str, Any]:
    """Step time under the plan of each budget; its error where it does not train."""
    from ssdtrain.plan.goal import Goal

    profile = session.profile
    most = run.limit_bytes or 2 * session.plan.prediction.keep_peak_bytes
    left = most - profile.base_bytes
    goals = {f"{s:g}": Goal(memory_budget_bytes=int(s * left)) for s in BUDGETS}
    answers = searched(profile, list(goals.values()), run.most_seconds)
    found: dict[str, Any] = {}
    for (share, goal), answer in zip(goals.items(), answers, strict=True):
        budget_gb = (goal.memory_budget_bytes or 0) / GB
        if answer is None or answer.plan is None:
            error = "no plan in time" if answer is None else answer.error
            found[share] = {"budget_gb": budget_gb, "error": error[:200]}
            continue
        session.follow(answer.plan)
        own: dict[str, Any] = {"budget_gb": budget_gb, "policy": answer.plan.policy}
        try:
            for _ in range(NUM_UNTIMED + NUM_TIMED):
                loop.step()
            own["step_ms"] = middle_ms(loop)
        except Exception as error:  # whatever it is, it is the result
            found[share] = own | {"error": f"{type(error).__name__}: {error}"[:200]}
            break  # what it left behind is in no defined state
        found[share] = own
    return found


def best_ms(cell: dict[str, Any]) -> float | None:
    """Of its grid."""
    every = cell.get("budgets", {}).values()
    return min((each["step_ms"] for each in every if "step_ms" in each), default=None)


def verdict(cell: dict[str, Any]) -> str:
    """`fits`, `refused` before the second step, `unfinished`, or `failed`."""
    if fits.is_good(cell):
        within = cell["reserved_gb"] <= cell["limit_gb"] or not cell["limit_gb"]
        return "fits" if within else "failed"
    if "ConfigError" in cell.get("error", "") and cell.get("num_steps", 0) <= 1:
        return "refused"
    return "unfinished" if fits.is_unfinished(cell) else "failed"


def summary(cells: dict[str, Any]) -> str:
    """What became of the cells, and how far "fit" is from the best of each grid."""
    told = [verdict(cell) for cell in cells.values()]
    kinds = ("fits", "refused", "unfinished", "failed")
    lines = [", ".join(f"{told.count(kind)} {kind}" for kind in kinds)]
    for name, cell in cells.items():
        best = best_ms(cell)
        if best is not None:
            ratio = cell["step_ms"] / best
            lines.append(f"{name}: {ratio:.3f} of the grid's best, {best:.0f} ms")
    return "\n".join(lines)


def main(
    bench: Bench,
    *,
    names: tuple[str, ...] = CELLS,
    grid: int = 4,
    seconds: float = 10.0,
    most_seconds: float = 30.0,
    tiny: bool = False,
) -> None:
    """Run what is missing.

    Args:
        grid: of so many cells, the first ones
        seconds: of its steps
        most_seconds: to a plan
        tiny: narrow, few tokens
    """
    try:
        limits = {name: limit_bytes(*split(name)) for name in names}
    except ValueError as error:
        raise UsageError(str(error)) from error
    device = bench.device.type
    cells = bench.cells({"device": device, "tiny": tiny, "grid": grid})
    run = Run(device=device, tiny=tiny)

    def one(name: str, gpu: str) -> None:
        most_s = min(most_seconds, cells.left_s() - fits.START_S)
        if name in cells or most_s < fits.LEAST_SECONDS:
            return
        own = replace(
            run,
            seconds=min(seconds, most_s),
            most_seconds=most_s,
            limit_bytes=limits[name] if device == "cuda" else None,
            gpu=gpu,
            grid=names.index(name) < grid,
        )
        limit_s = min(cells.left_s(), (5 if own.grid else 3) * most_s)
        found = answer_of(measure, (name, own), limit_s, fits.PRELOAD)
        if not fits.is_cut(found, cells):
            cells.record(name, found | {"limit_gb": (own.limit_bytes or 0) / GB})

    on_gpus(names, one, fits.gpus_of(run))
    print(summary(cells.data["cells"]))
