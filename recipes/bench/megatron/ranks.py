"""One of the ranks of `megatron.core`."""

import gc
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ssdtrain
from recipes.bench.megatron.cells import (
    GPU,
    Cell,
    Training,
    law_cells,
    pipeline_cells,
    tensor_cells,
)
from recipes.bench.megatron.shared import PATIENCE, Options, Shared
from ssdtrain.engines.megatron import innermost
from ssdtrain.tools.project.cases import TABLE_5_4, bert
from ssdtrain.tools.project.layer import Split, saved_bytes
from ssdtrain.train.mcore import parallel
from ssdtrain.train.settings import Family

GIB = 1024**3
HOST: dict[str, Any] = {"target": "host", "host_bytes": 20 * GIB}
if not GPU:
    HOST = {"target": "host", "host_bytes": GIB, "min_bytes": 0}
LEVEL = ("ours level", "ours level 2")
"""No stage's peak above what the last one keeps."""
KEEP = ("keep", "keep 2")
SHARE = ("ours at 40 %", "ours at 40 % 2")
"""No rank's peak above this share of what it keeps."""
KEPT_SHARE = 0.4
OURS = ("ours auto", "ours auto 2", *LEVEL, *SHARE)
SETTLE_S = 20.0
"""A session may take so long until its steps are timed: a cell has 45 s for all."""
NUM_STEPS = {1: 5, 8: 9}
"""Timed steps by micro-batches of a step; their median counts."""


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


def settling(session: Any, limit_s: float = SETTLE_S) -> Callable[[], bool]:
    """Whether a step is not to be timed yet, the same for all ranks: the session of one
    of them settles still, and has not taken that long."""
    until = time.monotonic() + limit_s

    def asked() -> bool:
        every = [False] * dist.get_world_size()
        own = not session.is_settled and time.monotonic() < until
        dist.all_gather_object(every, own)
        return any(every)

    return asked


def measure(
    training: Training,
    warm_up: int,
    num_steps: int,
    settles: Callable[[], bool] = bool,
) -> dict[str, Any]:
    """Median wall time of a step, and its peaks.

    Args:
        settles: asked before each step whether it comes before all those.
    """
    times, before, peaks, losses = [], [], [], []
    first: int | None = None
    for step in itertools.count():
        if first is None and not settles():
            first = step + warm_up
        if first is not None and step >= first + num_steps:
            break
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
        step_ms = (time.perf_counter() - start) * 1e3
        if first is None or step < first:
            before.append(round(step_ms, 1))
        else:
            times.append(step_ms)
            peaks.append(peak if GPU else 0)
    return {
        "step_ms": statistics.median(times),
        "step_times": times,
        "before_times": before,
        "peak_gb": max(peaks) / 1e9,
        # Of a step that every column has, with the same seed and weights.
        "losses": losses[min(3, len(losses) - 1)].tolist(),
    }


def column(training: Training, name: str) -> dict[str, Any]:
    """One way to place activations, on a model that is there."""
    num_steps = NUM_STEPS[training.cell.size.micro_batches]
    if name == "full recompute":
        with training.recomputing():
            return measure(training, 1, 3)
    if name not in OURS:
        return measure(training, 2, num_steps)
    settings = {**HOST, "plan": "auto"}
    if name in (*LEVEL, *SHARE):
        kept = kept_bytes(training)
        share = int(KEPT_SHARE * min(kept)) if name in SHARE else kept[-1]
        settings["memory_budget"] = share or 1 << 40  # of a CPU none is known
    return ours(training, settings, num_steps)


def ours(
    training: Training, settings: dict[str, Any], num_steps: int
) -> dict[str, Any]:
    """Steps under ssdtrain, once it has settled: what was predicted, and reported."""
    with ssdtrain.offload(training.chunks, **settings) as session:
        result = measure(training, 2, num_steps, settling(session))
        report, plan, profile = session.last_step, session.plan, session.profile
        result["settled"] = session.is_settled
    if plan is not None and plan.prediction is not None and profile is not None:
        predicted, links = plan.prediction, profile.links
        result["explain"] = session.explain().splitlines()
        result["plan"] = {
            "policy": plan.policy,
            "step_ratio": predicted.step_ms / predicted.keep_ms,
            "peak_gone": 1 - predicted.peak_bytes / predicted.keep_peak_bytes,
            "step_predicted": predicted.step_ms,
            "peak_predicted_gb": predicted.peak_bytes / 1e9,
            "d2h_gb_per_s": links.d2h.bytes_per_second / 1e9,
            "h2d_gb_per_s": links.h2d.bytes_per_second / 1e9,
            "copy_slowdown": links.copy_slowdown,
            "duplex_slowdown": links.duplex_slowdown,
            "copy_slowdown_is": profile.notes.get("copy_slowdown"),
        }
    names = ("saved", "kept", "offloaded", "recomputed", "reloaded", "forwarded")
    if report is not None:
        result["report"] = {
            **{part: getattr(report, f"bytes_{part}") for part in names},
            "stall_ms": report.stall_ms,
            "recompute_ms": report.recompute_ms,
            "fallbacks": report.fallbacks,
        }
    return result


def kept_bytes(training: Training) -> list[int]:
    """Peak of every rank's activations where all are kept; 0 on a CPU."""
    own_gb = measure(training, 1, 1)["peak_gb"]
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, own_gb)
    return [int(each * 1e9) for each in every]


def estimate(training: Training, cell: Cell) -> dict[str, Any]:
    """Bytes of the layers alone against the model of ssdtrain.tools.project."""
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
    keep: dict[str, Any] = {}

    def training() -> Training:
        if not held:
            held.append(Training(cell))
        return held[0]

    def run(name: str) -> dict[str, Any]:
        if name == "estimate":
            return estimate(training(), cell)
        found = column(training(), name)
        if name in KEEP:
            keep.update({each: found[each] for each in ("step_times", "peak_gb")})
        elif name in OURS and keep:
            found["beside"] = dict(keep)  # a file may hold cells of several runs
        return found

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


def exact_law(cell: Cell, directory: Path) -> dict[str, Any]:
    """The law with torch's deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # cuDNN's attention differs from itself.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        return law(cell, directory)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)


def everything(shared: Shared, directory: Path) -> None:
    """All cells, most needed first."""
    # Twice, in turns: the clock rate drifts.
    ways = ["keep", "ours auto", "keep 2", "ours auto 2", "full recompute"]
    laws = law_cells(dist.get_world_size())
    for layout in dict.fromkeys(cell.layout for cell in laws):
        run_group(
            shared,
            layout,
            laws,
            lambda shared, cell: shared.run(
                f"law/{cell.name}", lambda: exact_law(cell, directory)
            ),
        )
    if dist.get_world_size() > 2:
        return
    families = tensor_cells()

    def tensor(shared: Shared, cell: Cell) -> None:
        more = []
        if cell.family is Family.BERT:
            more = ["estimate"]
        columns(shared, cell, [*ways[:3], *SHARE, *ways[3:], *more])

    def pipeline(shared: Shared, cell: Cell) -> None:
        columns(shared, cell, [*ways[:3], *LEVEL, *ways[3:]])

    fine = [cell.offloading() for cell in families["gpt"]]
    run_group(shared, "tp2", families["bert"], tensor)
    run_group(shared, "tp2", families["gpt"], tensor)
    run_group(
        shared,
        "tp2",
        fine,
        lambda shared, cell: columns(shared, cell, ["fine-grained offloading"]),
    )
    run_group(shared, "1f1b", pipeline_cells()[:1], pipeline)
    run_group(shared, "tp2", families["t5"], tensor)
    run_group(shared, "1f1b", pipeline_cells()[1:], pipeline)


def main(options: Options) -> None:
    """Join, run, leave."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=PATIENCE)
        stand_in: Any = nullcontext()
    else:
        from tests.ssdtrain.megatron.standin import cpu_for_cuda

        dist.init_process_group("gloo", timeout=PATIENCE)
        stand_in = cpu_for_cuda()
    with stand_in:
        shared = Shared(options)
        directory = options.out.parent / f"activations{shared.rank}"
        directory.mkdir(exist_ok=True)
        everything(shared, directory)
    shutil.rmtree(directory, ignore_errors=True)
    dist.destroy_process_group()
