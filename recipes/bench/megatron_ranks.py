"""One of the two ranks of megatron_core.py; started by it through torchrun."""

import argparse
import datetime
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Cells
from megatron_cells import (
    GPU,
    Cell,
    Training,
    law_cells,
    pipeline_cells,
    tensor_cells,
)

import ssdtrain
from ssdtrain.hosts.megatron import innermost
from ssdtrain.project.cases import TABLE_5_4, bert
from ssdtrain.project.layer import Split, saved_bytes
from ssdtrain.train.mcore import parallel

GIB = 1024**3
HOST: dict[str, Any] = {"target": "host", "host_bytes": 20 * GIB}
if not GPU:
    HOST = {"target": "host", "host_bytes": GIB, "min_bytes": 0}
OURS: dict[str, dict[str, Any]] = {
    "ours auto": {"plan": "auto"},
    "ours offload-all": {"plan": "offload-all"},
}


class Shared:
    """Cells that both ranks run together; the first rank keeps the file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=120)
        )
        self._only = options.only
        self._cells: Cells | None = None
        self._begun = options.out.with_suffix(".begun")
        self._deadline = time.monotonic() + options.budget_s
        if self.rank == 0:
            settings = {"batch": 16, "sequence": 1024, "dtype": "bf16", "tiny": not GPU}
            self._cells = Cells(options.out, options.budget_s, settings)
            self._leave_out_the_fatal()

    def _leave_out_the_fatal(self) -> None:
        """A cell that was begun and never ended killed a rank."""
        if self._cells is None or not self._begun.exists():
            return
        name = self._begun.read_text()
        if name and name not in self._cells:
            self._cells.data["cells"][name] = {"error": "a rank died in it"}
            self._cells.save()

    def gather(self, value: Any) -> list[Any]:
        """`value` of both ranks."""
        values: list[Any] = [None, None]
        dist.all_gather_object(values, value, group=self._group)
        return values

    def wanted(self, names: list[str]) -> list[str]:
        """Which of these are to be run, as the first rank sees it."""
        late = time.monotonic() > self._deadline
        mine = [
            name
            for name in names
            if self._cells is not None
            and name not in self._cells
            and not late
            and (not self._only or any(map(name.startswith, self._only)))
        ]
        return self.gather(mine)[0]  # type: ignore[no-any-return]

    def run(self, name: str, cell: Callable[[], dict[str, Any]]) -> None:
        """Run one cell on both ranks; an error is a result."""
        if not self.wanted([name]):
            return
        if self.rank == 0:
            self._begun.write_text(name)
        start = time.monotonic()
        try:
            result = cell()
        except torch.OutOfMemoryError:
            result = {"error": "out of memory"}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        both = self.gather(result)
        errors = [one["error"] for one in both if "error" in one]
        merged = {"error": errors[0]} if errors else merge(both)
        merged["cell_s"] = round(time.monotonic() - start, 2)
        if self._cells is not None:
            self._cells.data["cells"][name] = merged
            self._cells.save()
            self._begun.write_text("")
            print(name, json.dumps(merged)[:700], flush=True)

    def get(self, name: str) -> dict[str, Any]:
        """A result, on the first rank; empty elsewhere or when missing."""
        cells = {} if self._cells is None else self._cells.data["cells"]
        return cells.get(name, {})  # type: ignore[no-any-return]


def merge(both: list[dict[str, Any]]) -> dict[str, Any]:
    """One result from two ranks: the slower time, all peaks, equal if both are."""
    merged: dict[str, Any] = {}
    for name, value in both[0].items():
        values = [one[name] for one in both]
        if isinstance(value, bool):
            merged[name] = all(values)
        elif name.endswith("_ms"):
            merged[name] = max(values)
        else:
            merged[name] = values
    return merged


# -- the law --------------------------------------------------------------------------


def law(cell: Cell, directory: Path) -> dict[str, Any]:
    """Losses, gradients and weights with ssdtrain, byte for byte as without it."""
    result: dict[str, Any] = {}
    theirs = Training(cell).train(2)
    for target in ("host", "ssd"):
        settings: dict[str, Any] = {
            "target": target,
            "plan": "offload-all",
            "min_bytes": 0,
            "window_bytes": 1,
            "host_bytes": GIB // 2,
            "gpu_direct": "off",
            "recompute": "auto" if target == "host" else "off",
        }
        if target == "ssd":
            settings["directory"] = str(directory)
        ours = Training(cell).train(2, settings)
        equal = same(theirs, ours)
        result[f"{target}_equal"] = equal
        if not equal:
            result["equal_to_itself"] = same(theirs, Training(cell).train(2))
        report = ours.reports[-1]
        names = ("bytes_offloaded", "bytes_recomputed", "bytes_reloaded")
        moved = {name: report[name] for name in (*names, "bytes_written")}
        result[f"{target}_moved"] = moved
        result[f"{target}_restored"] = ours.restored
    return result


def same(left: Any, right: Any) -> bool:
    """Byte for byte."""
    if left.losses != right.losses or len(left.tensors) != len(right.tensors):
        return False
    return all(map(torch.equal, left.tensors, right.tensors))


# -- time and memory ------------------------------------------------------------------


def measure(training: Training, warm_up: int, num_steps: int) -> dict[str, Any]:
    """Median wall time of a step, and its peaks."""
    times, peaks, losses = [], [], []
    for step in range(warm_up + num_steps):
        parallel.seed_everything(step + 1)
        dist.barrier()
        if GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        start = time.perf_counter()
        losses.append(training.schedule(step))
        if GPU:
            peak = torch.cuda.max_memory_allocated() - base
        training.sgd(0.0)  # the same weights for every column
        if GPU:
            torch.cuda.synchronize()
        if step >= warm_up:
            times.append((time.perf_counter() - start) * 1e3)
            peaks.append(peak if GPU else 0)
    return {
        "step_ms": statistics.median(times),
        "peak_gb": max(peaks) / 1e9,
        # Of a step that every column has, with the same seed and weights.
        "losses": losses[3].tolist(),
    }


def column(training: Training, name: str) -> dict[str, Any]:
    """One way to place activations, on a model that is there."""
    if name == "full recompute":
        with training.recomputing():
            return measure(training, 1, 3)
    if name not in OURS:
        return measure(training, 2, 3)
    settings = {**HOST, **OURS[name]}
    with ssdtrain.offload(training.chunks, **settings) as session:
        result = measure(training, 2, 3)
        report = session.last_step
    names = ("saved", "kept", "offloaded", "recomputed", "reloaded", "forwarded")
    if report is not None:
        result["report"] = {
            **{part: getattr(report, f"bytes_{part}") for part in names},
            "stall_ms": report.stall_ms,
            "recompute_ms": report.recompute_ms,
            "fallbacks": report.fallbacks,
        }
    return result


def estimate(training: Training, cell: Cell) -> dict[str, Any]:
    """Bytes of the layers alone against the model of ssdtrain.project."""
    encoder = innermost(training.chunks[0]).encoder
    settings = {**HOST, "recompute": "off", "plan": "offload-all"}
    with ssdtrain.offload(encoder, **settings) as session:
        training.schedule(0)
        training.sgd(0.0)
        report = session.last_step
    size = cell.size
    split = Split(micro_batch=size.rows, tensor=2)
    expected = size.layers * saved_bytes(bert(size.hidden, size.layers), split)
    source = [r.estimate_gib for r in TABLE_5_4 if r.hidden == size.hidden]
    return {
        "offloaded_gib": 0 if report is None else report.bytes_offloaded / GIB,
        "saved_gib": 0 if report is None else report.bytes_saved / GIB,
        "estimate_gib": expected / GIB,
        "source_gib": source[0] if source else 0.0,
    }


def columns(shared: Shared, cell: Cell, names: list[str]) -> None:
    """All columns of one model, which is built once."""
    held: list[Training] = []

    def training() -> Training:
        if not held:
            held.append(Training(cell))
        return held[0]

    def run(name: str) -> dict[str, Any]:
        if name == "estimate":
            return estimate(training(), cell)
        return column(training(), name)

    for name in names:
        shared.run(f"{cell.name}/{name}", lambda name=name: run(name))
        gc.collect()
    held.clear()
    tidy()


def tidy() -> None:
    """Give memory back between models."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def run_group(shared: Shared, layout: str, cells: list[Cell], work: Any) -> None:
    """Cells of one layout between making and dropping Megatron's groups."""
    mine = [cell for cell in cells if cell.layout == layout]
    if not mine:
        return
    parallel.start(mine[0].parallel, 1, timeout_minutes=1)
    try:
        for cell in mine:
            work(shared, cell)
            tidy()
    finally:
        parallel.stop()


def run_law(shared: Shared, cell: Cell, directory: Path) -> None:
    """One cell of the law, with torch's deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    shared.run(f"law/{cell.name}", lambda: law(cell, directory))
    torch.use_deterministic_algorithms(False)


def everything(shared: Shared, directory: Path) -> None:
    """All cells, most needed first."""
    ways = ["keep", *OURS, "full recompute"]
    for layout in ("tp2", "dp2", "1f1b", "interleaved"):
        run_group(
            shared,
            layout,
            law_cells(),
            lambda shared, cell: run_law(shared, cell, directory),
        )
    families = tensor_cells()

    def tensor(shared: Shared, cell: Cell) -> None:
        more = ["estimate"] if cell.family.value == "bert" else []
        columns(shared, cell, [*ways, *more])

    def pipeline(shared: Shared, cell: Cell) -> None:
        columns(shared, cell, ways)

    run_group(shared, "tp2", families["bert"], tensor)
    run_group(shared, "1f1b", pipeline_cells()[:1], pipeline)
    run_group(shared, "tp2", families["gpt"], tensor)
    run_group(shared, "tp2", families["t5"], tensor)
    run_group(shared, "1f1b", pipeline_cells()[1:], pipeline)
    fine = [cell.offloading() for cell in families["gpt"]]
    run_group(
        shared,
        "tp2",
        fine,
        lambda shared, cell: columns(shared, cell, ["fine-grained offloading"]),
    )


def main() -> None:
    """Join, run, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget-s", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    wait = datetime.timedelta(seconds=60)
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=wait)
        stand_in: Any = nullcontext()
    else:
        sys.path.insert(0, str(Path(__file__).parents[2] / "tests/ssdtrain/megatron"))
        from standin import cpu_for_cuda

        dist.init_process_group("gloo", timeout=wait)
        stand_in = cpu_for_cuda()
    with stand_in:
        shared = Shared(options)
        directory = options.out.parent / f"activations{shared.rank}"
        directory.mkdir(exist_ok=True)
        everything(shared, directory)
    shutil.rmtree(directory, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
