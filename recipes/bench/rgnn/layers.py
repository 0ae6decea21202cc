"""Relational layers, ours against PyG, torch.compile, grouped and sorted products.

Wu's protocol (section 3.4.1): one layer, 64 channels in and out, one head, loss on
random labels, edges presorted, at least ten epochs. All contenders of a cell share
parameters and run in one process under a memory limit of 24 GiB. First one process a
graph makes it and compiles our kernels, side by side; then everything is timed alone. A
measurement that loses the device ends the run; the next one goes on after it.

    python -m recipes.bench rgnn.layers --budget-s 250
    python -m recipes.bench rgnn.layers --again '*/hector/time'    # ours once more
"""

import gc
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hector.capture import WARM_UP, CapturedStep
from hector.runtime import executables
from hector.statistics import statistics
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import command_of
from recipes.bench.rgnn.cells import (
    GRAPHS,
    KINDS,
    Cell,
    Contender,
    Phase,
    Task,
    Work,
    name_of,
    plan,
)
from recipes.bench.rgnn.contenders import Graphs, build, difference, step_of
from recipes.bench.rgnn.kernels import ceilings, kernel_times
from recipes.bench.rgnn.measure import (
    CARD_BYTES,
    OutOfTimeError,
    cap_memory,
    deadline,
    measure,
    profile,
    release,
)
from recipes.bench.rgnn.turns import Turns

PREPARE_S = 75.0
"""Longest time for making graphs and compiling kernels before anything is timed."""


@dataclass
class Settings(Bench):
    """Of a run.

    limit_s: of one measurement
    scale: nodes and edges over Table 3.3's
    store: keep the graphs here
    prepare_s: limit of preparing
    prepare: only make graphs and compile
    """

    limit_s: float = 20.0
    scale: float = 1.0
    phases: tuple[str, ...] = tuple(phase.value for phase in Phase)
    graphs: tuple[str, ...] = tuple(GRAPHS)
    models: tuple[str, ...] = tuple(kind.value for kind in KINDS)
    tasks: tuple[str, ...] = tuple(task.value for task in Task)
    contenders: tuple[str, ...] = tuple(each.value for each in Contender)
    store: Path = Path()
    prepare_s: float = PREPARE_S
    prepare: bool = False

    def wanted(self) -> list[Work]:
        """All measurements that are asked for, in their order."""
        return [
            work
            for work in plan(map(Phase, self.phases), self.graphs)
            if work.cell.model.value in self.models
            and work.cell.task.value in self.tasks
            and work.contender.value in self.contenders
        ]


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were taken on."""
    found: dict[str, Any] = {
        "device": platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in ("torch_geometric", "triton", "numpy"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "none"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["uuid"] = str(properties.uuid)
        found["memory_limit_bytes"] = CARD_BYTES
    return found


def take(work: Work, graphs: Graphs, cells: Cells, turns: Turns, limit_s: float) -> Any:
    """One measurement; a failure is recorded in words and never hidden."""
    device = graphs.device
    try:
        release(device)
        with deadline(limit_s):
            graph = graphs.get(work.cell.graph)
            layer = build(work.cell, work.contender, graph)
            step = step_of(layer, work.cell.task)
            if work.phase is Phase.PROFILE:
                return profile(step)
            if work.phase is Phase.KERNELS:
                step()
                return kernel_times(graph)
            if work.phase is Phase.CAPTURED:
                step = captured(step)
            best = None if work.contender.ours else best_other_ms(work, cells)
            values = measure(step, layer.clear, device, best)
            turns.take(work, values, layer)
            if work.contender.ours and values["status"] == "ok":
                one = work.contender is Contender.HECTOR_PROGRAM
                values["mapping"] = "program" if one else "auto"  # for the fit
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
    finally:
        if work.contender.compiled:
            torch.compiler.reset()


def best_other_ms(work: Work, cells: Cells) -> float | None:
    """The best time of a baseline in the cell of `work` so far."""
    known = cells.data["cells"]
    others = (
        known.get(name_of({**work.key(), "contender": each.value}), {})
        for each in Contender
        if not each.ours
    )
    return min((other["ms"] for other in others if "ms" in other), default=None)


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as one CUDA graph, captured before it is timed."""
    replayed = CapturedStep(step)
    for _ in range(WARM_UP + 1):
        replayed()
    return replayed


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
    began = time.monotonic()
    device = args.device
    cap_memory(device)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as scratch:
        if args.store == Path():
            args.store = Path(scratch)
        args.store.mkdir(parents=True, exist_ok=True)
        if args.prepare:
            prepare(args, device)
            return 0
        if device.type == "cuda":
            prepare_all(args)
        prepared_s = time.monotonic() - began
        args.budget_s -= prepared_s
        # What is loaded now stays: the collections between measurements skip it.
        gc.collect()
        gc.freeze()
        try:
            return run_all(args, device, prepared_s)
        finally:
            gc.unfreeze()


def prepare_all(args: Settings) -> None:
    """One process a graph: makes it and compiles what will be timed on it."""
    running = []
    for name in args.graphs:
        # The last of two options counts.
        own = ("--graphs", name, "--store", str(args.store), "--prepare")
        command = command_of("rgnn.layers", *args.words, *own)
        env = {**os.environ, "OMP_NUM_THREADS": "2"}
        running.append(subprocess.Popen(command, env=env))
    end = time.monotonic() + min(args.prepare_s, args.budget_s / 2)
    for process in running:
        try:
            process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def opened(args: Settings) -> Cells:
    """The cells; what failed is tried again, what ran out of memory or time is not."""
    cells = args.cells()
    for name, record in list(cells.data["cells"].items()):
        if record["status"] == "failed":
            del cells.data["cells"][name]
    cells.data.setdefault("runs", [])
    cells.data.setdefault("graphs", {})
    return cells


def prepare(args: Settings, device: torch.device) -> None:
    """Graphs into the store, our kernels into Triton's cache; failures show later."""
    graphs, cells = Graphs(device, args.scale, args.store), opened(args)
    for name in args.graphs:
        graphs.get(name)
    for work in _staggered(args):
        if not work.contender.ours or work.name in cells:
            continue
        try:
            release(device)
            graph = graphs.get(work.cell.graph)
            step_of(build(work.cell, work.contender, graph), work.cell.task)()
        except Exception as error:
            print("prepare", work.name, type(error).__name__, str(error)[:200])
            if "CUDA error" in str(error):
                return


def _staggered(args: Settings) -> list[Work]:
    """Each graph's process starts somewhere else in each phase: most kernels have the
    same text for all graphs, and the first process to compile one serves the others."""
    found, works = list[Work](), args.wanted()
    for phase in dict.fromkeys(w.phase for w in works):
        mine = [w for w in works if w.phase is phase]
        start = GRAPHS.index(args.graphs[0]) * len(mine) // len(GRAPHS)
        found += mine[start:] + mine[:start]
    return found


def run_all(args: Settings, device: torch.device, prepared_s: float) -> int:
    """Take every wanted measurement that is not there yet, while time is left."""
    graphs, cells = Graphs(device, args.scale, args.store), opened(args)
    about = {**machine(device), "scale": args.scale, "ceilings": ceilings(device)}
    about["command"] = cells.data["environment"]["command"]
    release(device)
    run = len(cells.data["runs"])
    cells.data["runs"].append({**about, "prepared_s": round(prepared_s, 1)})
    skipped, turns, status = 0, Turns(device), 0
    for work in args.wanted():
        if work.name in cells:
            continue
        if turns.begin(work.cell):
            turns.finish(cells, min(cells.left_s() - 2, args.limit_s))
        limit_s = min(cells.left_s() - 2, args.limit_s)
        if limit_s < 3:
            skipped += 1
            continue
        started = time.monotonic()
        values = take(work, graphs, cells, turns, limit_s)
        # All of it: building, the first call, timing, the check.
        values["took_s"] = round(time.monotonic() - started, 3)
        name = work.cell.graph
        if values["status"] == "ok" and name not in cells.data["graphs"]:
            cells.data["graphs"][name] = vars(statistics(graphs.get(name)))
        cells.record(work.name, {"key": work.key(), "run": run, **values})
        if values["status"] == "lost":
            status = 1
            break
    turns.finish(cells, min(cells.left_s(), args.limit_s))
    print(f"{len(cells.data['cells'])} records, {skipped} left for another run")
    cells.save()
    return status
