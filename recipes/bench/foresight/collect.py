"""Everything that the performance models learn from and are judged by, on a device.

    python -m recipes.bench foresight.collect steps --out steps.json --budget-s 45
    python -m recipes.bench foresight.collect kernels --out kernels.json --budget-s 60
    python -m recipes.bench foresight.collect traces --out traces.json --budget-s 20

`steps`: training steps with peaks (timed alone, then once more under a watch of the
clock), what each phase takes the host, calibration's programs before every step, which
show a host whose speed drifts; then products and copies at length; `kernels`: the
random design (resumable); `traces`: host times of operators, device times by shapes.
Each part is a process of its own: a profiler that was used once slows every later
launch. `--shapes tiny` runs all paths on a CPU.
"""

import gc
import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from recipes.bench.foresight import subjects
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait
from ssdtrain.tools.foresight import sustained
from ssdtrain.tools.foresight.calibrate import programs
from ssdtrain.tools.foresight.call import Family
from ssdtrain.tools.foresight.gather import gather
from ssdtrain.tools.foresight.overheads import by_shape, summary
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.foresight.tracing import step_us, traced

COUNTS = {
    Family.PRODUCT: 4000,
    Family.MEMORY: 3000,
    Family.ATTENTION: 1400,
    Family.NORM: 1000,
    Family.LOOKUP: 900,
    Family.OPTIMIZER: 150,
    Family.CONVOLUTION: 350,
}


class Cell(NamedTuple):
    """One model at one batch."""

    kind: str
    model: str
    batch: int
    shape: dict[str, int]
    at: int

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.kind}/{self.model}/{self.batch}"


def cells(kinds: Sequence[str], models: Collection[str] = ()) -> Iterator[Cell]:
    """Host-bound ones of the first kind, then all of the second, then the rest.

    Args:
        kinds: of shapes.
        models: only these, if any are named.
    """
    found = [
        Cell(kind, name, batch, shape, at)
        for kind in kinds
        for name, (shape, batches) in subjects.SHAPES[kind].items()
        if not models or name in models
        for at, batch in enumerate(batches)
    ]
    first, last = kinds[0], kinds[-1]
    rank = {True: 0, False: 2}
    yield from sorted(
        found,
        key=lambda c: (
            1
            if c.kind == last and c.kind != first
            else rank[c.kind == first and c.at == 0]
        ),
    )


def built(cell: Cell) -> subjects.TrainingStep:
    subject = subjects.MAKERS[cell.model](cell.batch, **cell.shape)
    step = subjects.TrainingStep(subject)
    step()  # the optimizer's state
    step()
    return step


def measured(cell: Cell) -> dict[str, Any]:
    row: dict[str, Any] = {**cell._asdict(), "programs": host_programs()}
    step = built(cell)
    if torch.cuda.is_available():
        wait()
        torch.cuda.reset_peak_memory_stats()
        row["before_bytes"] = torch.cuda.memory_allocated()
    step()
    if torch.cuda.is_available():
        wait()
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    row["step_us"] = step_us(step, num_warm=1, seconds=0.9)
    row["host_us"] = step.host_us()
    with sustained.Watch() as watch:  # behind it: queries to the driver slow launches
        began = time.time()
        row["watched_us"] = step_us(step, num_warm=1, seconds=0.3)
        ended = time.time()
    row["clock"] = watch.between(began, ended)
    return row


def host_programs(seconds: float = 0.1) -> list[dict[str, Any]]:
    """Calibration's programs as they are now: the step, and the host's phases."""
    kind = Kind.CUDA if torch.cuda.is_available() else Kind.CPU
    found = []
    for program in programs(kind):
        step = subjects.TrainingStep(subjects.Subject(*program))
        us = step_us(step, seconds=seconds)
        found.append({"step_us": round(us, 1), "host_us": step.host_us()})
    gc.collect()
    return found


def profiled(cell: Cell) -> dict[str, Any]:
    step = built(cell)
    seen = traced(step, 1)
    return {**cell._asdict(), "host": summary(seen), "by_shape": by_shape(seen)}


def steps(cells: Cells, todo: Iterable[Cell]) -> None:
    """Every model, then products and copies at length."""
    for cell in todo:
        cells.run(cell.name, measured, cell)
    if torch.cuda.is_available():
        cells.run("sustained", lambda: {"runs": at_length()})


def at_length() -> list[dict[str, Any]]:
    with sustained.Watch() as watch:
        runs = sustained.products((2048, 3072, 4096, 8192, 12288), 0.8)
        runs.append(sustained.copies(1 << 30, 0.8))
    for row in runs:
        row["clock"] = watch.between(row.pop("from"), row.pop("to"))
    return runs


def main(
    bench: Bench,
    part: Literal["steps", "kernels", "traces"],
    /,
    *,
    seed: int = 0,
    shapes: tuple[str, ...] = ("explore",),
    models: tuple[str, ...] = (),
    at: tuple[int, ...] = (0, 2),
) -> None:
    """Measure one part.

    Args:
        seed: of the kernels that are drawn
        shapes: some of foresight.subjects.SHAPES
        models: only these
        at: batches that are traced
    """
    torch.set_default_device(bench.device)
    kept = bench.cells({"part": part, "shapes": shapes})
    if part == "steps":
        steps(kept, cells(shapes))
    elif part == "traces":
        found = list(cells(shapes, models))
        for cell in (c for each in at for c in found if c.at == each):
            kept.run(cell.name, profiled, cell)
    else:
        lines = bench.out.with_suffix(".jsonl")
        gather(COUNTS, lines, bench.device, seed=seed, budget_s=bench.budget_s)
        texts = lines.read_text().splitlines()
        kept.record("kernels", {"rows": [json.loads(line) for line in texts]})
