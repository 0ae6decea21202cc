"""Relational layers, ours against PyG, torch.compile, grouped and sorted products.

The seed's protocol (section 3.4.1): one layer, 64 channels in and out, one head, loss
on random labels, edges presorted, at least ten epochs. All contenders of a cell share
parameters and run in one process under a memory limit of 24 GiB. Results are written
after every measurement, so a run can be cut anywhere and gone on with.

    python -m recipes.bench.rgnn --budget-s 560 --out recipes/bench/results/rgnn.json
"""

import argparse
import gc
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hector.statistics import statistics
from hector.train import LayerKind
from recipes.bench.rgnn_cells import (
    GRAPHS,
    Contender,
    Phase,
    Task,
    Work,
    plan,
)
from recipes.bench.rgnn_contenders import Graphs, build, difference, step_of
from recipes.bench.rgnn_measure import (
    CARD_BYTES,
    OutOfTimeError,
    cap_memory,
    deadline,
    measure,
    profile,
    release,
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("recipes/bench/results/rgnn.json"))
    add("--from", type=Path, dest="earlier", help="go on from these results")
    add("--budget-s", type=float, default=560.0, help="stop before this many seconds")
    add("--limit-s", type=float, default=45.0, help="limit of one measurement")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--scale", type=float, default=1.0, help="nodes and edges over Table 3.3's")
    add("--phases", nargs="+", default=[p.value for p in Phase])
    add("--graphs", nargs="+", default=list(GRAPHS))
    add("--models", nargs="+", default=[k.value for k in LayerKind])
    add("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add("--tasks", nargs="+", default=[t.value for t in Task])
    add("--contenders", nargs="+", default=[c.value for c in Contender])
    return parser.parse_args(argv)


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were taken on."""
    found = {
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


class Results:
    """The results file: read once, rewritten after every measurement."""

    def __init__(self, path: Path, earlier: Path | None) -> None:
        self.path = path
        source = earlier or path
        self.data: dict[str, Any] = {"runs": [], "graphs": {}, "records": []}
        if source.exists():
            self.data = json.loads(source.read_text())
            # What failed is tried again; what ran out of memory or time is not.
            records = self.data["records"]
            self.data["records"] = [r for r in records if r["status"] != "failed"]
        self.keys = {self._text(r["key"]) for r in self.data["records"]}

    @staticmethod
    def _text(key: dict[str, Any]) -> str:
        return json.dumps(key, sort_keys=True)

    def start_run(self, about: dict[str, Any]) -> int:
        self.data["runs"].append(about)
        return len(self.data["runs"]) - 1

    def has(self, work: Work) -> bool:
        return self._text(work.key()) in self.keys

    def add(self, work: Work, run: int, values: dict[str, Any]) -> None:
        self.keys.add(self._text(work.key()))
        self.data["records"].append({"key": work.key(), "run": run, **values})
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self.data, indent=0) + "\n")
        partial.replace(self.path)


def take(work: Work, graphs: Graphs, limit_s: float) -> dict[str, Any]:
    """One measurement; a failure is recorded in words and never hidden."""
    device = graphs.device
    release(device)
    try:
        with deadline(limit_s):
            graph = graphs.get(work.cell.graph)
            layer = build(work.cell, work.contender, graph)
            step = step_of(layer, work.cell.task)
            if work.phase is Phase.PROFILE:
                return profile(step)
            values = measure(step, layer.clear, device)
            if work.contender is Contender.HECTOR and values["status"] == "ok":
                values["difference"] = _check(work, graphs, layer)
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


def _check(work: Work, graphs: Graphs, layer: Any) -> float | str:
    """Our output against the sorted baseline's."""
    graph = graphs.get(work.cell.graph)
    release(graphs.device)
    try:
        reference = build(work.cell, Contender.SORTED_LOOP, graph)
        return difference(layer, reference)
    except torch.OutOfMemoryError:
        return "the reference ran out of memory"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    cap_memory(device)
    # What is loaded now stays: the collections between measurements skip it.
    gc.collect()
    gc.freeze()
    try:
        return run_all(args, device, " ".join(argv or sys.argv[1:]))
    finally:
        gc.unfreeze()


def run_all(args: argparse.Namespace, device: torch.device, words: str) -> int:
    """Take every wanted measurement that is not there yet, while time is left."""
    began = time.monotonic()
    graphs = Graphs(device, args.scale)
    results = Results(args.out, args.earlier)
    command = f"python -m recipes.bench.rgnn {words}"
    about = {**machine(device), "command": command, "scale": args.scale}
    run = results.start_run(about)
    skipped = 0
    for work in plan([Phase(p) for p in args.phases], args.graphs):
        left = args.budget_s - (time.monotonic() - began)
        if not _wanted(work, args) or results.has(work):
            continue
        if left < 5:
            skipped += 1
            continue
        values = take(work, graphs, min(left - 2, args.limit_s))
        _note_graph(results, work.cell.graph, graphs)
        results.add(work, run, values)
        print(_line(work, values), flush=True)
    print(f"{len(results.data['records'])} records, {skipped} left for another run")
    results.write()
    return 0


def _wanted(work: Work, args: argparse.Namespace) -> bool:
    cell = work.cell
    return (
        cell.model.value in args.models
        and cell.dtype in args.dtypes
        and cell.task.value in args.tasks
        and work.contender.value in args.contenders
    )


def _note_graph(results: Results, name: str, graphs: Graphs) -> None:
    if name not in results.data["graphs"]:
        found = statistics(graphs.get(name))
        results.data["graphs"][name] = vars(found)


def _line(work: Work, values: dict[str, Any]) -> str:
    cell = work.cell
    what = f"{values['ms']:.3f} ms" if "ms" in values else values.get("reason", "")
    name = f"{cell.graph} {cell.model.value} {cell.task.value} {cell.dtype}"
    words = [work.phase.value, name, str(cell.width), work.contender.value]
    difference = values.get("difference")
    tail = "" if difference is None else f" difference {difference}"
    return " ".join([*words, values["status"], what[:120]]) + tail


if __name__ == "__main__":
    sys.exit(main())
