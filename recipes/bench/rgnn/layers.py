"""Relational layers, ours against PyG, grouped and sorted products.

Wu's protocol (section 3.4.1): one layer, 64 channels in and out, one head, loss on
random labels, edges presorted, at least ten epochs. All contenders of a cell share
parameters and run in one process under a memory limit of 24 GiB. A measurement that
loses the device ends the run; the next one goes on after it.

    python -m recipes.bench rgnn.layers --budget-s 250
    python -m recipes.bench rgnn.layers --again '*/hector/time'    # ours once more
"""

import gc
import time
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from hector.runtime import executables
from hector.statistics import statistics
from recipes.bench.harness.cells import Cells, limited, matches
from recipes.bench.harness.cli import Bench
from recipes.bench.rgnn.cells import (
    GRAPHS,
    Cell,
    Contender,
    Phase,
    Work,
    name_of,
    plan,
)
from recipes.bench.rgnn.contenders import Graphs, build, difference, step_of
from recipes.bench.rgnn.measure import (
    CARD_BYTES,
    OutOfTimeError,
    cap_memory,
    measure,
    release,
)
from recipes.bench.rgnn.turns import take_turns


@dataclass
class Settings(Bench):
    """Of a run.

    limit_s: of one measurement
    scale: nodes and edges over Table 3.3's
    """

    limit_s: float = 20.0
    scale: float = 1.0
    phases: tuple[str, ...] = tuple(phase.value for phase in Phase)

    def wanted(self) -> list[Work]:
        """All measurements that are asked for, in their order."""
        asked = self.only or ("*",)
        found = plan(map(Phase, self.phases), GRAPHS)
        return [work for work in found if matches(work.name, asked)]


def machine(cells: Cells, device: torch.device) -> dict[str, Any]:
    """What the numbers were taken on."""
    told = cells.data["environment"]
    found = {name: told[name] for name in ("device", "python", "command")}
    found |= {name.replace("-", "_"): v for name, v in told["versions"].items()}
    if device.type == "cuda":
        found["uuid"] = str(torch.cuda.get_device_properties(device).uuid)
        found["memory_limit_bytes"] = CARD_BYTES
    return found


def take(work: Work, graphs: Graphs, cells: Cells, limit_s: float) -> Any:
    """One measurement; a failure is recorded in words and never hidden."""
    device = graphs.device
    try:
        release(device)
        with limited(limit_s, OutOfTimeError):
            graph = graphs.get(work.cell.graph)
            layer = build(work.cell, work.contender, graph)
            step = step_of(layer, work.cell.task)
            best = None if work.contender.ours else best_other_ms(work, cells)
            values = measure(step, layer.clear, device, best)
            if work.contender.ours and values["status"] == "ok":
                report = executables(graph)[-1].report
                values["setting"] = str(report.optimizations)
                values["generated_lines"] = report.generated_lines
            if work.contender is Contender.HECTOR and values["status"] == "ok":
                values["difference"] = _check(work.cell, graphs, layer)
            return values
    except OutOfTimeError:
        return {"status": "out-of-time", "reason": f"over {limit_s:.0f} s"}
    except torch.OutOfMemoryError as error:
        return {"status": "oom", "reason": str(error).split(". ")[0]}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        lost = "CUDA error" in text or "illegal memory access" in text
        return {"status": "lost" if lost else "failed", "reason": text[:500]}


def best_other_ms(work: Work, cells: Cells) -> float | None:
    """The best time of a baseline in the cell of `work` so far."""
    known = cells.data["cells"]
    others = (
        known.get(name_of({**work.key(), "contender": each.value}), {})
        for each in Contender
        if not each.ours
    )
    return min((other["ms"] for other in others if "ms" in other), default=None)


def _check(cell: Cell, graphs: Graphs, layer: Any) -> float | str:
    """Our output against the sorted baseline's."""
    graph = graphs.get(cell.graph)
    release(graphs.device)
    try:
        reference = build(cell, Contender.SORTED_LOOP, graph)
        return difference(layer, reference)
    except torch.OutOfMemoryError:
        return "the reference ran out of memory"


def main(args: Settings) -> int:
    """Take what is missing."""
    cap_memory(args.device)
    # What is loaded now stays: the collections between measurements skip it.
    gc.collect()
    gc.freeze()
    try:
        return run_all(args, Graphs(args.device, args.scale))
    finally:
        gc.unfreeze()


def opened(args: Settings) -> Cells:
    """The cells; what failed is tried again, what ran out of memory or time is not."""
    cells = args.cells()
    for name, record in list(cells.data["cells"].items()):
        if record["status"] == "failed":
            del cells.data["cells"][name]
    cells.data.setdefault("runs", [])
    cells.data.setdefault("graphs", {})
    return cells


def run_all(args: Settings, graphs: Graphs) -> int:
    """Take every wanted measurement that is not there yet, while time is left."""
    cells, device = opened(args), graphs.device
    about = {**machine(cells, device), "scale": args.scale}
    release(device)
    run = len(cells.data["runs"])
    cells.data["runs"].append(about)
    missing = [work for work in args.wanted() if work.name not in cells]
    skipped, lost = 0, False
    for (phase, _), works in groupby(missing, key=lambda work: (work.phase, work.cell)):
        taken = []
        for work in works:
            limit_s = min(cells.left_s() - 2, args.limit_s)
            if limit_s < 3 or lost:
                skipped += 1
                continue
            started = time.monotonic()
            values = take(work, graphs, cells, limit_s)
            # All of it: building, the first call, timing, the check.
            values["took_s"] = round(time.monotonic() - started, 3)
            name = work.cell.graph
            if values["status"] == "ok" and name not in cells.data["graphs"]:
                cells.data["graphs"][name] = vars(statistics(graphs.get(name)))
            cells.record(work.name, {"key": work.key(), "run": run, **values})
            lost = values["status"] == "lost"
            taken.append(work)
        if phase is Phase.ABLATION and not lost:
            take_turns(taken, graphs, cells, min(cells.left_s(), args.limit_s))
    print(f"{len(cells.data['cells'])} records, {skipped} left for another run")
    cells.save()
    return int(lost)
