"""Published throughputs by layout, beside what the search predicts of them.

    python -m tests.ssdtrain.tools.search.published [NAME...]

`published.json` has the tables: each group is one model on one number of GPUs. An A100
is priced with an H100's kernels, each as far from the roofline of its own data sheet.
BLOOM's layers are priced as Llama's of as many parameters.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ssdtrain.tools.foresight.cluster import cluster_of
from ssdtrain.tools.foresight.device import DeviceCosts, load_device, transferred
from ssdtrain.tools.foresight.spec import SPECS
from ssdtrain.tools.report.build_public import Loss, Shape, Train
from ssdtrain.tools.search.layout_search import job_of, keyed_costs
from ssdtrain.tools.search.parallel_layout import ParallelLayout
from ssdtrain.tools.search.pricing import Key, PricedLayout, Pricer
from ssdtrain.tools.search.stage_costs import StageCosts
from ssdtrain.tools.search.stores import Stores

TABLES = Path(__file__).parent / "published.json"
OF_JOB = ("tokens", "batch", "seconds")
"""Of a row, what is not its layout."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A layout as it was measured and as it is predicted."""

    priced: PricedLayout
    tokens: int
    """Of a step, on one GPU."""
    measured_s: float

    @property
    def measured(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.measured_s

    @property
    def predicted(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.priced.step_ms * 1e3


def groups() -> list[dict[str, Any]]:
    """Return the published tables."""
    found: list[dict[str, Any]] = json.loads(TABLES.read_text(encoding="utf-8"))
    return found


@cache
def device_of(name: str) -> DeviceCosts:
    """Return a device by its own kernels or, for an A100, by those of an H100."""
    own = load_device("h100")
    return own if name == "h100" else transferred(own, SPECS[name])


@cache
def _costs(
    values: str, tensor: int, sequences: int, tokens: int, gpu: str, is_blocking: bool
) -> dict[Key, StageCosts]:
    shape = Shape(json.loads(values), Train.FULL, Loss.STOCK)
    job = job_of(shape, tokens, 1, 1)
    return keyed_costs(
        shape, job, tensor, sequences, device_of(gpu), is_blocking=is_blocking
    )


def compared(group: dict[str, Any]) -> list[Compared]:
    """Predict every row of a table."""
    device = device_of(group["gpu"])
    shape = Shape(group["model"], Train.FULL, Loss.STOCK)
    found = []
    for row in group["rows"]:
        layout = ParallelLayout(**{k: v for k, v in row.items() if k not in OF_JOB})
        tokens, batch = row["tokens"], row["batch"]
        costs = _costs(
            json.dumps(group["model"]),
            *(layout.tensor, max(1, layout.sequences // layout.context)),
            *(tokens, group["gpu"]),
            group.get("is_blocking", False),
        )
        pricer = Pricer(
            job=job_of(shape, tokens, batch, group["gpus"]),
            spec=device.spec,
            cluster=cluster_of(group["fabric"], device.spec),
            capacity_bytes=device.spec.memory_bytes - device.context_bytes,
            stores=Stores(host_bytes=0.0),
            costs=costs,
        )
        found.append(
            Compared(
                priced=pricer.price(layout),
                tokens=tokens * batch // group["gpus"],
                measured_s=row["seconds"],
            )
        )
    return found


def ranks(values: list[float]) -> list[float]:
    """Return the place of each in order, the mean of equal ones."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def rank_correlation(rows: list[Compared]) -> float:
    """Return Spearman's, between measured and predicted throughput."""
    return statistics.correlation(
        ranks([row.measured for row in rows]), ranks([row.predicted for row in rows])
    )


def summary(group: dict[str, Any], rows: list[Compared]) -> str:
    """Return a line of the table in docs/search.md."""
    fitting = [row for row in rows if row.priced.fits]
    chosen = max(fitting or rows, key=lambda row: row.predicted)
    regret = max(row.measured for row in rows) / chosen.measured - 1
    ratios = [row.predicted / row.measured for row in rows]
    among = "-"
    if len(fitting) > 3:
        among = f"{rank_correlation(fitting):.2f} of {len(fitting)}"
    return (
        f"| {group['name']} | {group['gpus']} | {len(rows)} | "
        f"{rank_correlation(rows):.2f} | {among} | "
        f"{100 * regret:.1f} % | {min(ratios):.2f} to {max(ratios):.2f} |"
    )


def main() -> None:
    """Print a line for each group, and every layout of the named ones."""
    for group in groups():
        rows = compared(group)
        print(summary(group, rows), flush=True)
        if group["name"] not in sys.argv[1:]:
            continue
        for row in sorted(rows, key=lambda one: -one.measured):
            one, own = row.priced, row.priced.layout
            parts = {k: round(v / 1e3, 1) for k, v in one.parts_ms.items() if v > 99}
            print(
                f"  data {own.data} tensor {own.tensor} context {own.context} stages "
                f"{own.pipeline} micro {own.sequences} {own.way}: measured "
                f"{row.measured:.0f}, predicted {row.predicted:.0f} tokens/s and GPU, "
                f"{one.memory_bytes / 1e9:.0f} GB, {parts}"
            )


if __name__ == "__main__":
    main()
