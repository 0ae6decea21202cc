"""Projections as tables for a terminal, as plain values, and as a plot."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ssdtrain.tools.printed import figures_table
from ssdtrain.tools.project.bubble import bubble_fraction
from ssdtrain.tools.project.endurance import Cost, Drives, Need
from ssdtrain.tools.project.model import Projection

if TYPE_CHECKING:
    from rich.table import Table

GB = 1e9
TB = 1e12
LONG_YEARS = 5.0


@dataclass(frozen=True, kw_only=True)
class CaseRow:
    """One case with everything computed for it; cost and need when asked for."""

    found: Projection
    drives: Drives
    cost: Cost | None = None
    needs: tuple[Need, ...] = ()

    @property
    def bubble(self) -> float:
        """Pipeline bubble of the case as a fraction of the step."""
        case = self.found.case
        return bubble_fraction(case.pipeline, case.micro_batches, case.chunks)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = asdict(self)
        case = values["found"]["case"]
        case["sharding"] = self.found.case.sharding.value
        case["throughput"] = self.found.case.throughput.value
        values["bubble_fraction"] = self.bubble
        return values


def projection_table(rows: Sequence[CaseRow]) -> "Table":
    """Step, activations, bandwidth, lifespan, micro-batch: one line a case."""
    drives = rows[0].drives
    heads = (
        *("case", "step s", "activations GB", "write GB/s", "drives' write", "bubble"),
        *("lifespan years", "state GB", "micro-batch", "in flight TB"),
    )
    cells = [
        (
            found.case.name,
            f"{found.step_seconds:.2f}",
            f"{found.activation_bytes / GB:.1f}",
            f"{found.write_gb_per_s:.2f}",
            f"{row.drives.bandwidth_used:.0%}",
            f"{row.bubble:.1%}",
            f"{years:.1f}" if years >= 1.0 else f"{years:.2g}",
            f"{found.state_bytes / GB:.1f}",
            f"{found.largest_micro_batch_power_of_two} ({found.largest_micro_batch})",
            f"{found.power_of_two_in_flight_bytes / TB:.2f} "
            f"({found.largest_in_flight_bytes / TB:.2f})",
        )
        for row in rows
        for found, years in [(row.found, row.drives.lifespan_years)]
    ]
    title = f"Per GPU, with {drives.count} x {drives.ssd.name}"
    caption = (
        "micro-batch and in flight: largest with all but the resident layers away; "
        "the power of two first, any integer in brackets"
    )
    return figures_table(title, heads, cells, caption=caption)


def cost_table(rows: Sequence[CaseRow], years: float) -> "Table":
    """Drives against the GPU, and the fewest drives of each kind."""
    cells = []
    for row in rows:
        if row.cost is None:
            continue
        cost, total = row.cost, row.cost.gpu_total_usd
        cells.append(
            (
                row.found.case.name,
                _cheapest(row.needs),
                f"{cost.drives_usd:,.0f}",
                f"{cost.drives_total_usd:,.0f}",
                f"{total:,.0f}" if total is not None else "set --gpu-price",
                "-" if cost.share is None else f"{cost.share:.0%}",
                f"{cost.drives_watts:.0f} of {cost.gpu_watts:.0f}",
                f"{cost.usd_per_pb:.2f}",
            )
        )
    words = ("case", "cheapest drives that do (count set by)")
    names = ("drives", "drives total", "GPU total", "share", "watts", "$ per PB")
    title = f"Cost for each GPU over {years:g} years, US dollars"
    return figures_table(title, (*words, *names), cells, words=2)


def _cheapest(needs: Sequence[Need]) -> str:
    need = min(needs, key=lambda each: each.price_usd)
    reasons = {
        "endurance": need.for_endurance,
        "bandwidth": need.for_bandwidth,
        "capacity": need.for_capacity,
    }
    reason = max(reasons, key=lambda name: reasons[name])
    return f"{need.count} {need.ssd.name} for {need.price_usd:,.0f} ({reason})"


def plot_projection(rows: Sequence[CaseRow], path: str) -> None:
    """Lifespan, write bandwidth and in-flight activations, as in Figure 5.10. Raises
    ImportError: matplotlib is not installed; OSError: the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 0.8 * len(rows)), 5.5), layout="constrained")
    bars = figure.add_subplot()
    points = bars.twinx()
    places = range(len(rows))
    years = [row.drives.lifespan_years for row in rows]
    rates = [row.found.write_gb_per_s for row in rows]
    shown = [min(value, LONG_YEARS) for value in years]
    life = bars.bar(
        [place - 0.2 for place in places], shown, 0.4, color="pink", label="years"
    )
    for bar, value in zip(life, years, strict=True):
        if value > LONG_YEARS:
            bars.annotate(
                f"{value:.1f}", (bar.get_x(), LONG_YEARS), color="firebrick", fontsize=8
            )
    rate_places = [place + 0.2 for place in places]
    bars.bar(rate_places, rates, 0.4, color="steelblue", label="write GB/s")
    away = [row.found.power_of_two_in_flight_bytes / TB for row in rows]
    points.plot(places, away, "kD", label="in flight TB")
    bars.set_ylabel("lifespan (years, cut at 5) and write bandwidth (GB/s)")
    points.set_ylabel("activations in flight at the largest micro-batch (TB)")
    points.set_ylim(bottom=0)
    names = [row.found.case.name for row in rows]
    bars.set_xticks(list(places), names, rotation=40, ha="right", fontsize=8)
    handles = [*bars.get_legend_handles_labels()[0], *points.lines]
    bars.legend(handles, ["years", "write GB/s", "in flight TB"], fontsize=8)
    figure.savefig(path)
