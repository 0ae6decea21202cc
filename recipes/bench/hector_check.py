"""Checks every generated kernel against the float64 oracle on this machine's GPU, and
times a few layers kernel by kernel.

    python recipes/bench/hector_check.py --budget-s 240 --out hector_check.json

Every failure is recorded and the run goes on: one call shows the state of all kernels.
The record is rewritten after every case.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

import torch
from hector_models import MODELS, plans

from hector.arrays import GraphArrays
from hector.emit.device import DevicePlan, ValueTypes
from hector.emit.reference import Reference
from hector.emit.schedules import default_schedule
from hector.graph import HeteroGraph
from hector.ir.kernels import Kernel, Plan
from hector.ir.node import Node, Op
from hector.ir.types import TYPE_DOMAINS

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest error over the largest value of the result."""
SIZES = {
    "fb15k": (15_000, 620_000, 474, 1),
    "biokg": (94_000, 4_800_000, 51, 5),
    "mag": (1_900_000, 21_000_000, 4, 4),
    "aifb": (7_300, 49_000, 104, 7),
    "wikikg2": (2_500_000, 16_000_000, 535, 1),
}


def random_graph(size: tuple[int, ...], device: str) -> HeteroGraph:
    """A graph with a skewed choice of endpoints and relations."""
    nodes, edges, relations, kinds = size
    gen = torch.Generator(device=device).manual_seed(0)

    def skewed(n: int, power: float) -> torch.Tensor:
        u = torch.rand(edges, generator=gen, device=device)
        return (u**power * n).long().clamp_(max=n - 1)

    node_type = torch.arange(nodes, device=device) * kinds // nodes
    return HeteroGraph.from_arrays(
        skewed(nodes, 1.5),
        skewed(nodes, 1.5),
        skewed(relations, 2.0),
        node_type=node_type,
        num_edge_types=relations,
    )


def operands(
    kernel: Kernel, arrays: GraphArrays, types: ValueTypes
) -> dict[Node, torch.Tensor]:
    """Random values of moderate size; positive where something divides by them."""
    device = arrays.graph.device
    found = {}
    for n in kernel.operands:
        if n.op in (Op.GRAPH, Op.CONST):
            continue
        value = torch.randn(arrays.rows(n.domain), *n.shape, device=device)
        if n.op is Op.AGG and n.type.width <= 16:
            value = value.abs() + 0.5
        found[n] = (value * 0.5).to(types.of(n))
    return found


def error_of(kernel: Kernel, arrays: GraphArrays, dtype: torch.dtype) -> float:
    """Largest relative error of one kernel against the float64 oracle."""
    types = ValueTypes(dtype)
    bound = operands(kernel, arrays, types)
    plan = Plan(kernels=(kernel,), outputs=kernel.outputs)
    ready = DevicePlan(plan, arrays, types, [default_schedule(kernel, arrays)])
    got = ready.run(bound)
    oracle = Reference(arrays, torch.float64)
    exact = oracle.run(kernel.outputs, {n: t.double() for n, t in bound.items()})
    worst = 0.0
    for node, want in exact.items():
        if not want.numel():
            continue
        if not bool(torch.isfinite(got[node]).all()):
            return float("inf")
        gap = float((got[node].double() - want).abs().max())
        worst = max(worst, gap / (float(want.abs().max()) + 1e-30))
    return worst


class Record:
    """The result file, rewritten after every case."""

    def __init__(self, path: Path, budget_s: float) -> None:
        self.path, self.start, self.budget_s = path, time.monotonic(), budget_s
        self.data: dict[str, Any] = {"command": sys.argv, "torch": torch.__version__}
        if torch.cuda.is_available():
            self.data["device"] = torch.cuda.get_device_name()
        self.data.update(checks=[], failures=[], timings=[])

    def add(self, key: str, item: dict[str, Any]) -> None:
        self.data[key].append(item)
        self.data["elapsed_s"] = round(time.monotonic() - self.start, 1)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")

    def over(self, share: float = 1.0) -> bool:
        return time.monotonic() - self.start > self.budget_s * share


def check(
    record: Record, case: tuple[str, int, torch.dtype], arrays: GraphArrays
) -> None:
    """Every distinct kernel of a model at one width and dtype."""
    model, width, dtype = case
    seen: set[str] = set()
    for label, plan in plans(model, width):
        for kernel in plan.kernels:
            text = str(kernel)
            if text in seen or record.over(0.6):
                continue
            seen.add(text)
            what = {"model": model, "width": width, "dtype": str(dtype), "plan": label}
            try:
                error = error_of(kernel, arrays, dtype)
            except Exception as failed:
                where = traceback.format_exc()[-1500:]
                item = {**what, "kernel": text, "error": repr(failed)[:600]}
                record.add("failures", {**item, "trace": where})
                print("FAILED", what, type(failed).__name__, str(failed)[:200])
                continue
            record.add("checks", {**what, "kernel": text[:200], "error": error})
            if not error <= TOLERANCE[dtype]:
                record.add(
                    "failures", {**what, "kernel": text, "relative_error": error}
                )
                print("WRONG", what, error, text)


def seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median of CUDA-event times."""
    run()
    times = []
    for _ in range(repeats):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        run()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return sorted(times)[len(times) // 2]


def time_plan(
    record: Record, what: dict[str, Any], plan: Plan, arrays: GraphArrays
) -> None:
    """The whole plan, then kernel by kernel."""
    types = ValueTypes(getattr(torch, what["dtype"]))
    made = {n for k in plan.kernels for n in k.outputs}
    known: dict[Node, torch.Tensor] = {}
    for kernel in plan.kernels:
        known.update(operands(kernel, arrays, types))
    bound = {n: t for n, t in known.items() if n not in made}
    chosen = [default_schedule(k, arrays) for k in plan.kernels]
    ready = DevicePlan(plan, arrays, types, chosen)
    total = seconds(lambda: ready.run(bound))
    wall = time.perf_counter()
    for _ in range(10):
        ready.run(bound)
    host = (time.perf_counter() - wall) / 10
    torch.cuda.synchronize()
    kernels = []
    for kernel, schedule in zip(plan.kernels, chosen, strict=True):
        if all(n.domain in TYPE_DOMAINS for n in kernel.operands):
            continue
        one = Plan(kernels=(kernel,), outputs=kernel.outputs)
        alone = DevicePlan(one, arrays, types, [schedule])
        ms = seconds(lambda p=alone: p.run(known), 5) * 1e3
        kernels.append({"ms": round(ms, 4), "kernel": str(kernel).split("\n")[0]})
    item = {
        **what,
        "ms": round(total * 1e3, 4),
        "host_ms": round(host * 1e3, 4),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "kernels": kernels,
    }
    record.add("timings", item)
    print(what, "ms", item["ms"], "host_ms", item["host_ms"])


def time_cells(record: Record, device: str) -> None:
    """Layers of width 64 on graphs of Table 3.3's sizes."""
    for name, size in SIZES.items():
        if record.over():
            return
        arrays = GraphArrays(random_graph(size, device))
        for model in ("rgcn", "rgat", "hgt"):
            for label, plan in plans(model, 64):
                if label.endswith("forward") or record.over():
                    continue
                what = {
                    "graph": name,
                    "model": model,
                    "plan": label,
                    "dtype": "float32",
                }
                try:
                    torch.cuda.reset_peak_memory_stats()
                    time_plan(record, what, plan, arrays)
                except Exception as failed:
                    record.add("failures", {**what, "error": repr(failed)[:600]})
                    print("FAILED", what, repr(failed)[:200])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=Path("hector_check.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, nargs=4, default=(300, 4000, 7, 3))
    args = parser.parse_args()
    record = Record(args.out, args.budget_s)
    small = GraphArrays(random_graph(tuple(args.size), args.device))
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    cases = [(m, 64, f32) for m in MODELS]
    cases += [("rgat", 31, f32), ("hgt_2_heads", 64, bf16), ("rgat", 64, bf16)]
    cases += [("rgat", w, f32) for w in (100, 1, 513)]
    cases += [("rgcn", 64, bf16), ("hgt", 100, f16)]
    for case in cases:
        check(record, case, small)
        print("checked", case, "failures so far:", len(record.data["failures"]))
    if args.device == "cuda":
        time_cells(record, args.device)
    print(
        "checks", len(record.data["checks"]), "failures", len(record.data["failures"])
    )


if __name__ == "__main__":
    main()
