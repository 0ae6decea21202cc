"""Relational layers, ours against PyG, torch.compile, grouped and sorted products.

Wu's protocol (section 3.4.1): one layer, 64 channels in and out, one head, loss
on random labels, edges presorted, at least ten epochs. All contenders of a cell share
parameters and run in one process under a memory limit of 24 GiB. First one process a
graph makes it and compiles our kernels, side by side; then everything is timed alone.
Results are written after every measurement, so a run can be cut anywhere and gone on
with; after an error that loses the device the script starts itself again.

    python -m recipes.bench rgnn.layers --budget-s 250
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
from hector.runtime.bundle import BundleError, add, pack
from hector.statistics import statistics
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
from recipes.bench.rgnn.results import Results
from recipes.bench.rgnn.turns import Turns

PREPARE_S = 75.0
"""Longest time for making graphs and compiling kernels before anything is timed."""


class LostDeviceError(RuntimeError):
    """After an illegal access nothing more runs in this process."""


@dataclass
class Settings(Bench):
    """Of a run.

    from_: go on from these results
    limit_s: of one measurement
    scale: nodes and edges over Table 3.3's
    store: keep the graphs here
    prepare_s: limit of preparing
    again: contenders whose cells are stale
    again_dtypes: and in which dtypes
    prepare: only make graphs and compile
    cache_in: kernels that --cache-out of an earlier run made
    cache_out: write the compiled kernels to this file
    prepared_s: for internal use
    restarted: failures stay; for internal use
    """

    from_: Path | None = None
    limit_s: float = 20.0
    scale: float = 1.0
    phases: tuple[str, ...] = tuple(phase.value for phase in Phase)
    graphs: tuple[str, ...] = tuple(GRAPHS)
    models: tuple[str, ...] = tuple(kind.value for kind in KINDS)
    tasks: tuple[str, ...] = tuple(task.value for task in Task)
    contenders: tuple[str, ...] = tuple(each.value for each in Contender)
    store: Path = Path()
    prepare_s: float = PREPARE_S
    again: tuple[str, ...] = ()
    again_dtypes: tuple[str, ...] = ("float32",)
    prepare: bool = False
    cache_in: Path | None = None
    cache_out: Path | None = None
    prepared_s: float = 0.0
    restarted: bool = False


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


def take(
    work: Work, graphs: Graphs, results: Results, turns: Turns, limit_s: float
) -> Any:
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
            best = None if work.contender.ours else results.best_other_ms(work)
            values = measure(step, layer.clear, device, best)
            turns.take(work, values, layer)
            if work.contender.ours and values["status"] == "ok":
                values["mapping"] = _mapping(work.contender)
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
        return {"status": "failed", "reason": text[:500]}
    finally:
        if work.contender.compiled:
            torch.compiler.reset()


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as one CUDA graph, captured before it is timed."""
    replayed = CapturedStep(step)
    for _ in range(WARM_UP + 1):
        replayed()
    return replayed


def _mapping(contender: Contender) -> str:
    """Who walks groups: for the cost model's fit."""
    return "program" if contender is Contender.HECTOR_PROGRAM else "auto"


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
    """Take what is missing, in a new process wherever a device was lost."""
    began = time.monotonic()
    device = args.device
    cap_memory(device)
    with tempfile.TemporaryDirectory(dir=_memory_directory()) as scratch:
        if args.store == Path():
            args.store = Path(scratch)
        args.store.mkdir(parents=True, exist_ok=True)
        words = list(args.words)
        if args.prepare:
            return prepare(args, device)
        if args.cache_in or args.cache_out:
            os.environ["TRITON_CACHE_DIR"] = str(args.store / "triton")
        if args.cache_in and not (args.restarted or args.prepare):
            print("kernels from", args.cache_in, add(args.cache_in))
        if device.type == "cuda" and not args.restarted:
            prepare_all(args, words)
            keep_kernels(args)
            args.prepared_s = time.monotonic() - began
        args.budget_s -= time.monotonic() - began
        # What is loaded now stays: the collections between measurements skip it.
        gc.collect()
        gc.freeze()
        try:
            status = run_all(args, device, " ".join(words))
            keep_kernels(args)
            return status
        except LostDeviceError:
            words = _with(words, "--budget-s", str(args.budget_s))
            words = _with(words, "--store", str(args.store))
            command = command_of("rgnn.layers", *words)
            return subprocess.run([*command, "--restarted"]).returncode
        finally:
            gc.unfreeze()


def keep_kernels(args: Settings) -> None:
    """What was compiled so far, for the next run's --cache-in."""
    if args.cache_out:
        try:
            print("kernels packed:", pack(args.cache_out), flush=True)
        except BundleError as wrong:
            print(wrong, flush=True)


def _memory_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _with(words: list[str], option: str, *values: str) -> list[str]:
    """The command line with an option's values replaced (the last one counts)."""
    return [*words, option, *values]


def prepare_all(args: Settings, words: list[str]) -> None:
    """One process a graph: makes it and compiles what will be timed on it."""
    running = []
    for name in args.graphs:
        mine = _with(words, "--graphs", name)
        mine = _with(mine, "--store", str(args.store))
        command = command_of("rgnn.layers", *mine, "--prepare")
        env = {**os.environ, "OMP_NUM_THREADS": "2"}
        running.append(subprocess.Popen(command, env=env))
    end = time.monotonic() + min(args.prepare_s, args.budget_s / 2)
    for process in running:
        try:
            process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def prepare(args: Settings, device: torch.device) -> int:
    """Graphs into the store, our kernels into Triton's cache; failures show later."""
    graphs = Graphs(device, args.scale, args.store)
    results = Results(args.out, args.from_)
    results.forget(args.again, "", args.again_dtypes)
    for name in args.graphs:
        graphs.get(name)
    for work in _staggered(plan([Phase(p) for p in args.phases], args.graphs), args):
        if not _wanted(work, args) or not work.contender.ours or results.has(work):
            continue
        try:
            release(device)
            graph = graphs.get(work.cell.graph)
            step_of(build(work.cell, work.contender, graph), work.cell.task)()
        except Exception as error:
            print("prepare", _name(work), type(error).__name__, str(error)[:200])
            if _is_lost(str(error)):
                return 1
    return 0


def _staggered(works: list[Work], args: Settings) -> list[Work]:
    """Each graph's process starts somewhere else in each phase: most kernels have the
    same text for all graphs, and the first process to compile one serves the others."""
    found: list[Work] = []
    for phase in dict.fromkeys(w.phase for w in works):
        mine = [w for w in works if w.phase is phase]
        start = GRAPHS.index(args.graphs[0]) * len(mine) // len(GRAPHS)
        found += mine[start:] + mine[:start]
    return found


def run_all(args: Settings, device: torch.device, words: str) -> int:
    """Take every wanted measurement that is not there yet, while time is left."""
    began = time.monotonic()
    graphs = Graphs(device, args.scale, args.store)
    results = Results(args.out, args.from_, keep_failed=args.restarted)
    command = f"python -m recipes.bench rgnn.layers {_without_places(words)}"
    about = {**machine(device), "command": command, "scale": args.scale}
    times = {"prepared_s": round(args.prepared_s, 1)}
    run = results.start_run({**about, **_ceilings(device), **times})
    if not args.restarted:
        results.forget(args.again, about.get("uuid", ""), args.again_dtypes)
    skipped, turns = 0, Turns(device)
    for work in plan([Phase(p) for p in args.phases], args.graphs):
        left = args.budget_s - (time.monotonic() - began)
        if not _wanted(work, args) or results.has(work):
            continue
        if turns.begin(work.cell):
            turns.finish(results, run, min(left - 2, args.limit_s))
        if left < 5:
            skipped += 1
            continue
        values = results.same_setting(work, run)
        started = time.monotonic()
        values = values or take(
            work, graphs, results, turns, min(left - 2, args.limit_s)
        )
        # All of it: building, the first call, timing, the check.
        values["took_s"] = round(time.monotonic() - started, 3)
        results.add(work, run, values)
        print(_line(work, values), flush=True)
        if _is_lost(values.get("reason", "")):
            args.budget_s -= time.monotonic() - began
            raise LostDeviceError
        if values["status"] == "ok":
            _note_graph(results, work.cell.graph, graphs)
    left = args.budget_s - (time.monotonic() - began)
    turns.finish(results, run, min(left, args.limit_s))
    print(f"{len(results.by_key)} records, {skipped} left for another run")
    results.write()
    return 0


def _without_places(words: str) -> str:
    """A command line that says nothing of where this machine keeps its files."""
    parts = (Path(w).name if w.startswith("/") else w for w in words.split())
    return " ".join(parts)


def _ceilings(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"ceilings": ceilings(device)}
    release(device)
    return found


def _is_lost(reason: str) -> bool:
    return "CUDA error" in reason or "illegal memory access" in reason


def _wanted(work: Work, args: Settings) -> bool:
    cell = work.cell
    return (
        cell.model.value in args.models
        and cell.task.value in args.tasks
        and work.contender.value in args.contenders
    )


def _note_graph(results: Results, name: str, graphs: Graphs) -> None:
    if name not in results.data["graphs"]:
        found = statistics(graphs.get(name))
        results.data["graphs"][name] = vars(found)


def _name(work: Work) -> str:
    cell = work.cell
    name = f"{cell.graph} {cell.model.value} {cell.task.value} {cell.dtype}"
    return f"{work.phase.value} {name} {cell.width} {work.contender.value}"


def _line(work: Work, values: dict[str, Any]) -> str:
    what = f"{values['ms']:.3f} ms" if "ms" in values else values.get("reason", "")
    difference = values.get("difference")
    tail = "" if difference is None else f" difference {difference}"
    return f"{_name(work)} {values['status']} {what[:120]}{tail}"
