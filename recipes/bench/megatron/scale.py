"""Two, four or eight GPUs of one host: what one GPU cannot show.

    python -m recipes.bench megatron.scale --budget-s 1500
    python -m recipes.bench megatron.scale --ranks 4 --only '*fsdp2*' '*links'
    python -m recipes.bench megatron.scale --tiny    # two ranks on gloo, seconds

A cell is measured in fresh processes, one a rank, under a limit of its own. A rerun
goes on; cells of other numbers of ranks come into the same file. A layout is trained
plain, with checkpointing (`gc`), by ssdtrain within what checkpointing needed (`=gc`)
and with `device_memory="fit"`; `law` says whether losses, gradients and weights are
those without ssdtrain, byte for byte. Also measured: all host links at once, and what
BERT's layers offload over an estimate (Table 5.4: `--only '*estimate'`). Collectives
are `foresight.collectives`', tiering over several GPUs is `gnn.tiering`'s.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.harness.processes import answer_of
from recipes.bench.harness.records import Data
from recipes.bench.models.real_catalogue import Mode, Row, Tuned

PRELOAD = (
    "recipes.bench.megatron.scale_ranks",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Imported once, in the process that all ranks are forked from."""
WAYS = ("law", "gc", "plain", "=gc", "fit")
COLUMNS = {
    **{"plain": "keep", "gc": "gc", "=gc": "ours"},
    **{"fit": "ours device_memory=fit", "law": "ours"},
}
"""Of `real_models`, by way."""
MEGATRON = ("tp", "pp")
"""Layouts over all ranks: divided layers, and stages."""


class Job(NamedTuple):
    """A cell: what of `scale_ranks` all ranks run, and how long it may take."""

    name: str
    work: str
    given: tuple[Any, ...]
    limit_s: float
    takes_peaks: bool = False
    """Whether it is given peaks: those of the layout's checkpointing, or none."""

    @property
    def base(self) -> str:
        """The cell that must be there before this one; empty: none."""
        layout, _, way = self.name.rpartition("/")
        return f"{layout}/gc" if way == "=gc" else ""


def jobs(tiny: bool) -> Iterator[Job]:
    """All cells, the most telling first."""
    yield Job("links", "host_links", (tiny,), 90)
    model, tokens = ("tiny", "32") if tiny else ("qwen3-4b", "8k")
    for way in WAYS:
        row = Row(model, Tuned.FULL, tokens, Mode.FSDP2, COLUMNS[way])
        work = "train_row"
        if way == "law":
            work = "row_law"
            row = row if tiny else replace(row, model=f"{model}:2")
        yield Job(f"fsdp2 4b/{way}", work, (row, tiny), 200, takes_peaks=True)
        for name in MEGATRON:
            given = (name, tiny, way)
            told = f"megatron {name}/{way}"
            yield Job(told, "train_megatron", given, 150, takes_peaks=True)
    for width in (8192, 12288, 16384):
        given = (f"bert {width}", tiny, "estimate")
        told = f"bert {width}/estimate"
        yield Job(told, "train_megatron", given, 90, takes_peaks=True)


def on_rank(work: str, given: tuple[Any, ...]) -> Data:
    """Do it. Here, because the ranks alone need megatron-core."""
    from recipes.bench.megatron import scale_ranks

    found: Data = getattr(scale_ranks, work)(*given)
    return found


def on_all(job: Job, given: tuple[Any, ...], limit_s: float, ranks: int) -> Data:
    """One process a rank."""
    return answer_of(on_rank, (job.work, given), limit_s, PRELOAD, ranks=ranks)


def main(bench: Bench, *, ranks: Literal[0, 2, 4, 8] = 0, tiny: bool = False) -> None:
    """Run the cells that are missing.

    Args:
        ranks: 0: as many as there are GPUs
        tiny: on CPUs, to try it
    """
    num_gpus = torch.cuda.device_count()
    num_ranks = ranks or (2 if tiny else max(num_gpus, 2))
    if not tiny and num_gpus < num_ranks:
        raise UsageError(f"{num_ranks} GPUs are needed; --tiny runs on CPUs")
    cells = bench.cells({"tiny": tiny})
    for job in jobs(tiny):
        known = cells.data["cells"].get(f"{num_ranks} ranks/{job.base}", {})
        if job.base and "peak_gb" not in known:
            print(f"{job.name} needs {job.base}", flush=True)
            continue
        peaks = (tuple(known.get("peak_gb", ())),) if job.takes_peaks else ()
        limit_s = min(job.limit_s, cells.left_s())
        name = f"{num_ranks} ranks/{job.name}"
        cells.run(name, on_all, job, (*job.given, *peaks), limit_s, num_ranks)
