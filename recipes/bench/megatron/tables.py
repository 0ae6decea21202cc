"""The table of `megatron.scale`'s results."""

from collections.abc import Callable

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, grouped, paragraphs, table


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


def scale(*found: Data) -> str:
    """What several GPUs showed: layouts, predictions, host links."""
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
    return paragraphs(
        table(shown, columns),
        estimates(cells),
        table(links, {"host links at once over one alone": "{name}", **LINKS}),
    )


def known(way: str, told: Callable[[Data], str]) -> Column:
    """What is told of a layout; a dash where that way of it was not measured."""
    return lambda row: told(row) if "error" not in row.get(way, {"error": ""}) else "-"


def shares(way: str) -> Column:
    """The least of all ranks' rates over what `doctor` says of one alone."""
    return lambda cell: f"{min(rank['share'] for rank in cell[way]):.2f}"


LINKS: dict[str, Column] = {way: shares(way) for way in ("out", "in", "both")}


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
