"""The table of `megatron.core`'s results."""

import itertools
import statistics
from collections.abc import Callable

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, grouped, paragraphs, table

WAYS = {
    "keep": ("keep",),
    "ours auto": ("ours auto",),
    "ours within a budget": ("ours level", "ours at 40 %"),
    "full recompute": ("full recompute",),
    "fine-grained offloading": ("fine-grained offloading",),
}
"""Columns, and the cells that may stand there: the first that was measured."""


def megatron(*found: Data) -> str:
    """Step ratios and peaks on two ranks, estimates, and the law on all.

    found: records of two ranks, then of four.
    """
    cells = found[0]["cells"]
    laws = [
        law(data["cells"], ranks) for data, ranks in zip(found, (2, 4), strict=False)
    ]
    return paragraphs(placements(cells), estimates(cells), *laws)


def placements(cells: Data) -> str:
    """Every way to place activations, one row a model."""
    models = dict.fromkeys(
        name.rsplit("/", 1)[0]
        for name, cell in cells.items()
        if "step_ms" in cell and not name.startswith("law/")
    )
    rows = {model: {way: _cell(cells, model, way) for way in WAYS} for model in models}
    columns: dict[str, Column] = {
        way: lambda row, w=way: entry(row[w], row["keep"]) for way in WAYS
    }
    return table(rows, {"": "{name}", **columns})


def _cell(cells: Data, model: str, way: str) -> Data:
    found = (both(cells, f"{model}/{each}") for each in WAYS[way])
    return next(filter(None, found), {})


def both(cells: Data, name: str) -> Data:
    """A cell, with its second round if there was one: of the slowest rank."""
    first: Data = cells.get(name, {})
    rounds = [first, cells.get(f"{name} 2", {})]
    rounds = [cell for cell in rounds if "step_ms" in cell]
    found = dict(first)
    if len(rounds) > 1:
        found["step_ms"] = _slowest([cell["step_times"] for cell in rounds])
        peaks = zip(*(cell["peak_gb"] for cell in rounds), strict=True)
        found["peak_gb"] = [max(each) for each in peaks]
    besides = [cell["beside"] for cell in rounds if "beside" in cell]
    if besides:
        times = [[rank["step_times"] for rank in beside] for beside in besides]
        found["beside"] = {"step_ms": _slowest(times)}
    return found


def _slowest(rounds: list[list[list[float]]]) -> float:
    """Median step of the slowest rank, from the times of all ranks in every round."""
    ranks = zip(*rounds, strict=True)
    return max(statistics.median(itertools.chain(*own)) for own in ranks)


def entry(cell: Data, keep: Data) -> str:
    """Such as 1.004x, 5.1 GB."""
    if "step_ms" not in cell or "step_ms" not in keep:
        words = cell.get("error", "-").split("| rank")[0].strip().splitlines()
        return str(words[-1]).strip()[
            -60:
        ]  # a traceback's last line says what is wrong
    peaks = cell["peak_gb"]
    keep = cell.get("beside", keep)  # the file's may be of another run
    close = max(peaks) - min(peaks) < 0.02 * max(peaks)
    text = " / ".join(f"{p:.2f}" for p in ([max(peaks)] if close else peaks))
    return f"{cell['step_ms'] / keep['step_ms']:.3f}x, {text} GB"


def estimates(cells: Data) -> str:
    """Offloaded bytes of BERT's layers against the analytic model."""
    columns: dict[str, Column] = {
        "offloaded by the layers": lambda c: c["name"].removesuffix("/estimate"),
        "GiB": lambda c: f"{max(c['offloaded_gib']):.2f}",
        "estimate": "{estimate_gib[0]:.2f}",
        "source's estimate": "{source_gib[0]:.2f}",
        "ratio": lambda c: f"{max(c['offloaded_gib']) / c['estimate_gib'][0]:.3f}",
    }
    return table(cells, columns, needs="offloaded_gib")


def law(cells: Data, num_ranks: int) -> str:
    """How many cells of the law held on so many ranks."""
    found = {n: c for n, c in cells.items() if n.startswith("law/")}
    unequal = [
        name
        for name, cell in found.items()
        if not (cell.get("host_equal") and cell.get("ssd_equal"))
    ]
    verdict = f"NOT in {unequal}" if unequal else f"all {len(found)} cells"
    told = (
        f"{num_ranks} GPUs: losses, gradients and weights equal to the run without "
        "ssdtrain to the last bit, targets host and ssd, torch's deterministic "
        f"algorithms: {verdict}."
    )
    return told if found else ""


def scale(*found: Data) -> str:
    """What several GPUs showed: layouts, predictions, host links, tiering."""
    cells = found[0]["cells"]
    layouts = grouped(cells)
    shown = {name: ways for name, ways in layouts.items() if "plain" in ways}
    columns: dict[str, Column] = {
        "": "{name}",
        "plain": lambda row: f"{row['plain']['step_ms']:.0f} ms, {peak(row['plain'])}",
        "checkpointing": known("gc", lambda row: over(row["gc"], row["plain"])),
        "ours in its memory": known("=gc", lambda row: over(row["=gc"], row["plain"])),
        "over checkpointing": known("=gc", lambda row: ratio(row["=gc"], row["gc"])),
        "`fit`": known("fit", lambda row: over(row["fit"], beside(row))),
        "predicted step, peak": known("=gc", lambda row: errors(row["=gc"])),
        "byte for byte": known(
            "law", lambda row: "yes" if is_equal(row["law"]) else "NO"
        ),
    }
    links = {n: c for n, c in cells.items() if n.endswith("/links") and "out" in c}
    gained = {n: c for n, c in cells.items() if "speedup" in c}
    return paragraphs(
        table(shown, columns),
        table(links, {"host links at once over one alone": "{name}", **LINKS}),
        table(gained, {"tiering with peers over none": "{name}", "": times}),
    )


def known(way: str, told: Callable[[Data], str]) -> Column:
    """What is told of a layout; a dash where that way of it was not measured."""
    return lambda row: told(row) if "error" not in row.get(way, {"error": ""}) else "-"


def shares(way: str) -> Column:
    """The least of all ranks' rates over what `doctor` says of one alone."""
    return lambda cell: f"{min(rank['share'] for rank in cell[way]):.2f}"


WAYS_OF_LINKS = ("out", "in", "both", "out beside all-reduce", "in beside all-reduce")
LINKS: dict[str, Column] = {way: shares(way) for way in WAYS_OF_LINKS}


def times(cell: Data) -> str:
    """Such as 1.62x."""
    return f"{cell['speedup']:.2f}x"


def peak(cell: Data) -> str:
    """Of the rank that needs most, such as 8.2 GB."""
    return f"{max(cell['peak_gb']):.1f} GB"


def ratio(cell: Data, base: Data) -> str:
    """Such as 0.981x."""
    return f"{cell['step_ms'] / base['step_ms']:.3f}x"


def beside(row: Data) -> Data:
    """Plain steps: where there are such, those of the process of `fit`."""
    return {"step_ms": row["fit"].get("beside_ms", row["plain"]["step_ms"])}


def over(cell: Data, base: Data) -> str:
    """Such as 1.263x, 8.2 GB."""
    return f"{ratio(cell, base)}, {peak(cell)}"


def errors(cell: Data) -> str:
    """Measured over predicted, in percent, of step and peak; the worst rank's."""
    plans = cell.get("plan") or [
        {"step_predicted": cell["predicted_ms"], "peak_predicted_gb": most}
        for most in cell["predicted_gb"]
    ]
    steps = [cell["step_ms"] / plan["step_predicted"] - 1 for plan in plans]
    peaks = [
        own / plan["peak_predicted_gb"] - 1
        for own, plan in zip(cell["peak_gb"], plans, strict=True)
    ]
    return f"{max(steps, key=abs):+.1%}, {max(peaks, key=abs):+.1%}"


def is_equal(cell: Data) -> bool:
    """Whether the law held on all ranks."""
    return bool(cell.get("equal") or (cell["host_equal"] and cell["ssd_equal"]))
