"""Tables of `models.fits`, `.grid`, `.lengths` and `.predictions`."""

import re
import statistics
from typing import Any

from recipes.bench.common.results import Data
from recipes.bench.common.text import markdown, where
from recipes.bench.models.fits import (
    COLUMNS,
    LEAST_PLANNED_STEPS,
    is_good,
    is_unfinished,
)
from recipes.bench.models.grid import best_ms, verdict
from recipes.bench.models.lengths import LONG

SHORT = re.compile(r"short by (?:at least )?(\d+) bytes")
"""What an error says."""


def fits(data: Data) -> str:
    """Which cases train in what checkpointing reserves."""
    cases: dict[str, dict[str, Data]] = {}
    for name, cell in data["cells"].items():
        case, column = name.rsplit("/", 1)
        cases.setdefault(case, {})[column] = cell
    rows = []
    for case, cells in cases.items():
        plain = cells.get("gc", {})
        if "reserved_gb" in plain:
            own = f"{plain['allocated_gb']:.1f}, {plain['reserved_gb']:.1f} GB"
        else:
            own = str(plain.get("error", "-"))[:40]
        others = [fitted(cells.get(name)) for name in COLUMNS if name != "gc"]
        rows.append([case, own, *others])
    counts = [
        f"`{column}` {counted([cells[column] for cells in ran])}"
        for column in COLUMNS
        if column != "gc" and (ran := [c for c in cases.values() if column in c])
    ]
    room = data["settings"]["room"] - 1
    text = (
        "**In the memory that checkpointing takes**: stock models of many "
        "architectures, a few layers of their real widths, the stock loop, a process "
        f"each. What the allocator reserved under `gc`, and {room:.0%}, is all that "
        "ours may reserve, without checkpointing, from the first step to at least "
        f"{LEAST_PLANNED_STEPS} under a plan. {', '.join(counts)} trained. `gc` "
        "allocated and reserved; ours reserved, unfinished: no plan came in its time."
    )
    return "\n\n".join([text, markdown(["", *COLUMNS], rows), where(data)])


def counted(cells: list[Data]) -> str:
    """How many are good, of those that came to an end."""
    unfinished = sum(is_unfinished(cell) for cell in cells)
    text = f"{sum(is_good(cell) for cell in cells)} of {len(cells) - unfinished}"
    return f"{text} ({unfinished} unfinished)" if unfinished else text


def fitted(cell: Data | None) -> str:
    """What became of a case."""
    if cell is None:
        return "-"
    if "error" in cell:
        return " ".join(str(cell["error"]).split())[:60].replace("|", "/")
    text = f"{cell['reserved_gb']:.1f} GB"
    if not is_good(cell):
        return f"{text}, unfinished"
    return text


def grid(data: Data) -> str:
    """What became of each model and length under each limit."""
    limits = sorted({name.partition("@")[2] for name in data["cells"]}, key=int)
    rows: dict[str, dict[str, str]] = {}
    for name, cell in data["cells"].items():
        case, _, limit = name.partition("@")
        rows.setdefault(case, {})[limit] = limited(cell)
    told = [verdict(cell) for cell in data["cells"].values()]
    ratios = [
        f"`{name}` {cell['step_ms'] / best:.3f} of {best:.0f} ms"
        for name, cell in data["cells"].items()
        if (best := best_ms(cell)) is not None
    ]
    counts = [f"{told.count(kind)} {kind}" for kind in sorted(set(told))]
    text = (
        '**`device_memory="fit"`** where a device of so many GB would hold the whole '
        "model: a few of its layers are trained, in what such a device would leave to "
        "them. Reserved at most, from the first step on, of what may be; refused: an "
        f"error before the second step that says by how much. {', '.join(counts)}. "
        "Step over the best of plans for a grid of byte budgets in the same process: "
        f"{', '.join(ratios) or 'not measured'}."
    )
    head = ["", *(f"{limit} GB" for limit in limits)]
    body = [[case, *(own.get(n, "-") for n in limits)] for case, own in rows.items()]
    return "\n\n".join([text, markdown(head, body), where(data)])


def limited(cell: Data) -> str:
    """What became of one."""
    told = verdict(cell)
    if told == "refused":
        short = SHORT.search(str(cell["error"]))
        return f"refused, {int(short[1]) / 1e9:.1f} GB" if short else "refused"
    if "error" in cell:
        return f"{told}: {' '.join(str(cell['error']).split())[:40]}".replace("|", "/")
    text = f"{cell['reserved_gb']:.1f} of {cell['limit_gb']:.1f} GB"
    return text if told == "fits" else f"{text}, {told}"


def lengths(data: Data) -> str:
    """Changing lengths: over plain, long steps, budget."""
    settings = data["settings"]
    rows = []
    for name, cell in data["cells"].items():
        if "ratio" not in cell:
            rows.append([name, *[str(cell.get("error", "-"))[:40]], *["-"] * 5])
            continue
        tokens = cell["tokens"]
        rows.append(
            [
                f"{name}, {min(tokens)} to {max(tokens)}",
                f"{cell['ratio']:.3f}x",
                later_of(cell.get("plain_later_s"), cell.get("plain_s")),
                f"{cell['longest_settled']:.2f}",
                f"{cell['longest_late']:.2f}",
                f"{cell['num_long']} of {len(cell['steps_ms'])}",
                f"{cell['peak_gb']:.2f} of {cell['budget_gb']:.2f} GB",
            ]
        )
    text = (
        f"**Lengths that change**: `{settings['model']}` trained on three traces, each "
        f"by a session of its own with a budget of {settings['share']:.0%} of the "
        "plain peak. `over plain` is the settled trace over the same trace without "
        "ssdtrain before it, `plain, later` by how much that was slower after it; a "
        "step is long if it takes more than "
        f"{LONG:g} times what a plain step of its length and that ratio predict, "
        "counted after the fifth, observation and changes of plan included."
    )
    head = ["tokens a step", "over plain", "plain, later", "longest settled"]
    head += ["longest", "long steps", "peak"]
    return "\n\n".join([text, markdown(head, rows), where(data)])


def predictions(data: Data) -> str:
    """Errors of step and memory, and whether budgets held."""
    rows, every = [], []
    for name, cell in data["cells"].items():
        plans = [each for each in cell.get("plans", {}).values() if "step_ms" in each]
        every += plans
        if not plans:
            rows.append([name, str(cell.get("error", "no plan"))[:40], *["-"] * 4])
            continue
        later = later_of(cell.get("plain_later_ms"), cell.get("plain_ms"))
        rows.append([name, str(len(plans)), *errors_of(plans), later])
    if not every:
        return ""
    rows.append(["all", str(len(every)), *errors_of(every), ""])
    text = (
        "**What plans predict**: for each model and length one observed session, and "
        "plans for budgets and an overhead, followed one after another without any "
        "correction. `whole` is all that is allocated in forward and backward, "
        "weights, gradients and optimizer included. Mean and worst error of the "
        "prediction; a budget is exceeded if activations took more. `plain, later`: by "
        "how much plain steps after all plans are slower than those before them."
    )
    head = ["", "plans", "step", "whole peak", "budgets exceeded", "plain, later"]
    return "\n\n".join([text, markdown(head, rows), where(data)])


def later_of(later: float | None, before: float | None) -> str:
    """By how much one is more than the other; "-" where one is not known."""
    return f"{later / before - 1:+.1%}" if later and before else "-"


def errors_of(plans: list[dict[str, Any]]) -> list[str]:
    """Of step and whole peak, and how many budgets did not hold."""
    found = []
    for key in ("step_error", "whole_error"):
        errors = [abs(plan[key]) for plan in plans if key in plan]
        mean = statistics.fmean(errors) if errors else 0.0
        found.append(f"{mean:.1%}, {max(errors, default=0.0):.1%}")
    budgets = [plan for plan in plans if "budget_gb" in plan]
    over = sum(plan["peak_gb"] > plan["budget_gb"] for plan in budgets)
    return [*found, f"{over} of {len(budgets)}"]
