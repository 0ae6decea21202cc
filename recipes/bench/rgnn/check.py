"""Checks every generated kernel against the float64 oracle, on this machine's GPU.

    python -m recipes.bench.rgnn.check --budget-s 120 --out hector_check.json

Each kernel of Wu's three layers (four settings of the two optimizations; forward,
backward and inference; several widths and dtypes) runs twice on random rows, into
memory that holds NaN before: results must be near the oracle's and repeat to the bit.
Then whole layers, gradients included. The work is shared by processes, since most of it
is compilation. Every failure is recorded and the run goes on; the JSON begins with a
list of them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hector.arrays import GraphArrays
from hector.emit.schedules import default_schedule
from hector.graph import HeteroGraph
from hector.ir.kernels import Kernel, Plan
from hector.ir.node import Node, Op
from hector.passes.pipeline import ALL_SETTINGS, Optimizations
from hector.runtime.device import (
    DevicePlan,
    DeviceProgram,
    ValueTypes,
    dot_precision,
)
from hector.runtime.reference import Reference
from recipes.bench.common import results
from recipes.bench.common.cells import environment
from recipes.bench.rgnn.layer_checks import CHECKS, layer_errors
from recipes.bench.rgnn.models import MODELS, plans

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest error over the largest value of the result."""
LAYER_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
"""Errors of kernel after kernel add up."""


class Case(NamedTuple):
    """The kernels of one model."""

    model: str
    width: int
    dtype: torch.dtype
    settings: Optimizations


def cases() -> list[Case]:
    """All kernel checks, the most telling first."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    chosen = [(m, 64, f32) for m in MODELS]
    chosen += [("rgat", 64, bf16), ("hgt_2_heads", 64, bf16), ("rgcn", 64, bf16)]
    chosen += [("rgat", w, f32) for w in (31, 1, 100, 513)]
    chosen += [("rgcn", 513, f32), ("hgt", 100, f16), ("rgat_2_heads", 1, f32)]
    return [Case(m, w, d, s) for m, w, d in chosen for s in ALL_SETTINGS]


def random_graph(size: tuple[int, ...], device: str) -> HeteroGraph:
    """Skewed endpoints and relations; two relations have no edges, the last tenth of
    the nodes is isolated."""
    nodes, edges, relations, kinds = size
    gen = torch.Generator().manual_seed(0)

    def skewed(n: int, power: float) -> torch.Tensor:
        return (torch.rand(edges, generator=gen) ** power * n).long().clamp_(max=n - 1)

    used = max(nodes * 9 // 10, 1)
    return HeteroGraph.from_arrays(
        skewed(used, 1.5),
        skewed(used, 1.5),
        1 + skewed(relations, 2.0),
        node_type=torch.arange(nodes) * kinds // nodes,
        num_edge_types=relations + 2,
    ).to(device)


def operands(
    kernel: Kernel, arrays: GraphArrays, types: ValueTypes
) -> dict[Node, torch.Tensor]:
    """Random values of moderate size; positive where something divides by them."""
    found = {}
    device = arrays.graph.device
    gen = torch.Generator(device=device).manual_seed(1)
    for n in kernel.operands:
        if n.op in (Op.GRAPH, Op.CONST):
            continue
        shape = (arrays.rows(n.domain), *n.shape)
        value = torch.randn(shape, generator=gen, device=device)
        if n.op is Op.AGG and n.type.width <= 16:
            value = value.abs() + 0.5
        found[n] = (value * 0.5).to(types.of(n))
    return found


def error_of(
    kernel: Kernel,
    arrays: GraphArrays,
    dtype: torch.dtype,
    given: dict[Node, torch.Tensor] | None = None,
) -> float:
    """Largest relative error of one kernel against the float64 oracle, on `given`
    operands or on random ones.

    Raises RuntimeError if a second run gives other bits: kernels have no atomics, so
    that would be a race.
    """
    types = ValueTypes(dtype)
    bound = operands(kernel, arrays, types) if given is None else given
    plan = Plan(kernels=(kernel,), outputs=kernel.outputs)
    schedule = default_schedule(kernel, arrays, precision=dot_precision(dtype))
    ready = DevicePlan(DeviceProgram(plan, types, [schedule]), arrays)
    got, again = ready.run(bound), ready.run(bound)
    oracle = Reference(arrays, torch.float64)
    leaves = {n: t.double() for n, t in bound.items()}
    exact = oracle.run(kernel.outputs, leaves)
    worst = 0.0
    for node, want in exact.items():
        if not want.numel():
            continue
        # No tolerance: torch.equal, but for NaN, which is told apart below.
        same = torch.allclose(got[node], again[node], rtol=0, atol=0, equal_nan=True)
        if not same:
            raise RuntimeError(f"a second run gives other bits for {node!r}")
        if not bool(torch.isfinite(got[node]).all()):
            return float("inf")
        gap = float((got[node].double() - want).abs().max())
        worst = max(worst, gap / (scale_of(node, want, oracle, leaves) + 1e-30))
    return worst


def scale_of(
    node: Node, want: torch.Tensor, oracle: Reference, leaves: dict[Node, torch.Tensor]
) -> float:
    """What an error is relative to: the result, and of a sum its terms, of sums among
    them theirs, which may cancel to nothing but their own rounding."""
    terms, sums = list[Node](), [node]
    while sums:
        one = sums.pop()
        if one.op in (Op.ADD, Op.SUB, Op.AGG) and one not in leaves:
            inputs = [n for n in one.inputs if n.op not in (Op.GRAPH, Op.CONST)]
            terms += inputs
            sums += inputs
    values = [want, *oracle.run(terms, leaves).values()]
    return max(float(value.abs().max()) for value in values if value.numel())


class Record:
    """The result file of one process, rewritten after every check."""

    def __init__(self, path: Path, budget_s: float) -> None:
        self.path, self.end = path, time.monotonic() + budget_s
        self.data: dict[str, Any] = {"failures": [], "skipped": [], "checks": []}

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def check(self, what: dict[str, Any], limit: float, error: float) -> None:
        self.data["checks"].append({**what, "relative_error": error})
        if not error <= limit:
            self.fail({**what, "problem": "wrong", "relative_error": error})
        self.write()

    def fail(self, what: dict[str, Any]) -> None:
        self.data["failures"].append(what)
        print("FAILED", json.dumps(what)[:1500], flush=True)
        self.write()

    def error(self, what: dict[str, Any], failed: Exception) -> None:
        where = traceback.format_exc()[-1500:]
        text = f"{type(failed).__name__}: {failed}"[:600]
        self.fail({**what, "problem": text, "trace": where})

    def write(self) -> None:
        results.write(self.path, self.data)


def check_kernels(record: Record, case: Case, arrays: GraphArrays) -> None:
    """Every distinct kernel of a model at one width, dtype and setting."""
    name = str(case.dtype).removeprefix("torch.")
    seen: set[str] = set()
    for label, plan in plans(case.model, case.width, case.settings):
        for kernel in plan.kernels:
            text = str(kernel)
            if text in seen:
                continue
            seen.add(text)
            what = {"model": case.model, "width": case.width, "dtype": name}
            what |= {"plan": label, "kernel": text[:1500]}
            try:
                record.check(
                    what, TOLERANCE[case.dtype], error_of(kernel, arrays, case.dtype)
                )
            except Exception as failed:
                record.error(what, failed)
                _stop_if_lost(failed)


def allowed(limit: float, theirs: float) -> float:
    """Relative error that a tensor may have: `limit`, and up to twice that where the
    same operations in PyTorch, rounded in another order, lose as much."""
    return min(max(limit, 1.25 * theirs), 2 * limit)


def check_layers(record: Record, name: str, graph: HeteroGraph) -> None:
    """A whole layer under each setting, outputs and gradients."""
    for dtype, limit in LAYER_TOLERANCE.items():
        if dtype is torch.bfloat16 and graph.device.type == "cpu":
            continue  # Triton's interpreter multiplies the bits of bfloat16.
        for settings in ALL_SETTINGS:
            what = {"layer": name, "dtype": str(dtype), "settings": str(settings)}
            try:
                errors = layer_errors(name, graph, dtype, settings)
                # The tensor that uses up most of what it is allowed.
                mine, theirs = max(errors, key=lambda e: e[0] / allowed(limit, e[1]))
                what["pytorch_error"] = theirs
                record.check(what, allowed(limit, theirs), mine)
            except Exception as failed:
                record.error(what, failed)
                _stop_if_lost(failed)


def _stop_if_lost(failed: Exception) -> None:
    """After an illegal access nothing more runs in this process."""
    if "CUDA error" in str(failed) or "illegal memory" in str(failed):
        raise SystemExit(3)


def units() -> Iterator[Case | str]:
    """What is shared out among processes."""
    yield from CHECKS
    yield from cases()


def work(args: argparse.Namespace) -> None:
    """One process's share of the units."""
    index, count = (int(n) for n in args.part.split("/"))
    record = Record(args.out, args.budget_s)
    if args.device == "cuda":
        # Memory that nobody wrote holds NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    graph = random_graph(tuple(args.size), args.device)
    arrays = GraphArrays(graph)
    for unit in list(units())[index::count]:
        if record.over:
            record.data["skipped"].append(str(unit))
        elif isinstance(unit, str):
            check_layers(record, unit, graph)
        elif unit.dtype is not torch.bfloat16 or args.device == "cuda":
            check_kernels(record, unit, arrays)
    record.data["done"] = True
    record.write()


def share_out(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the processes and joins what they found."""
    start = time.monotonic()
    parts = [args.out.with_suffix(f".part{i}") for i in range(args.jobs)]
    running = []
    for i, part in enumerate(parts):
        part.unlink(missing_ok=True)
        command = [sys.executable, "-m", "recipes.bench.rgnn.check"]
        command += ["--part", f"{i}/{args.jobs}", "--out", str(part)]
        command += ["--budget-s", str(args.budget_s - 15), "--device", args.device]
        command += ["--size", *map(str, args.size)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen(command, env=env))
    for process in running:
        try:
            process.wait(max(args.budget_s - (time.monotonic() - start), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    found: dict[str, Any] = {"failures": [], "skipped": [], "checks": []}
    for i, part in enumerate(parts):
        data = json.loads(part.read_text()) if part.exists() else {}
        for key, items in found.items():
            items.extend(data.get(key, []))
        if not data.get("done"):
            code = running[i].returncode
            found["failures"].append({"problem": f"process {i} ended early: {code}"})
        part.unlink(missing_ok=True)
    elapsed = round(time.monotonic() - start, 1)
    worst: dict[str, float] = {}
    for check in found["checks"]:
        name = f"{check.get('model', check.get('layer'))} {check['dtype']}"
        worst[name] = max(worst.get(name, 0.0), check["relative_error"])
    counts = {k: len(v) for k, v in found.items()}
    return {"counts": counts, "elapsed_s": elapsed, "worst_errors": worst, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--budget-s", type=float, default=120.0)
    add("--out", type=Path, default=Path("hector_check.json"))
    add("--device", default="cuda")
    add("--size", type=int, nargs=4, default=(300, 4000, 7, 3))
    add("--jobs", type=int, default=min(12, len(os.sched_getaffinity(0))))
    add("--part", help="i/n: this process's share; for internal use")
    args = parser.parse_args()
    if args.part:
        work(args)
        return 0
    found = {"environment": environment(), **share_out(args)}
    results.write(args.out, found)
    for failure in found["failures"]:
        print("-", {k: v for k, v in failure.items() if k != "trace"})
    print(found["counts"], "in", found["elapsed_s"], "s")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
