"""What the ranks of `megatron.scale` run."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ssdtrain
from recipes.bench.harness.records import Data
from recipes.bench.harness.timing import wait
from recipes.bench.megatron import training as megatron
from recipes.bench.megatron.training import GPU, Cell, Size, Training
from recipes.bench.models import real_row
from recipes.bench.models.real_build import build
from recipes.bench.models.real_catalogue import Row, num_tokens
from recipes.bench.models.unseen import settings_of
from ssdtrain.config import MIB
from ssdtrain.tools.machine.copies import (
    CopyBudget,
    measure_gpu_copies,
    measure_host_copy,
)
from ssdtrain.train.mcore import parallel
from ssdtrain.train.mcore.parallel import Parallel
from ssdtrain.train.settings import Family

PATIENCE = timedelta(seconds=120)
"""What a rank waits for another: one of them searches, or pins memory."""
WARM_UP_S = 60.0
WIDTHS = ((8192, 4), (12288, 3), (16384, 2))
"""Of Table 5.4, and their layers."""
AT_ONCE: Data = {
    **{"target": "host", "plan": "offload-all", "recompute": "regions"},
    **{"window_bytes": 1, "min_bytes": 0},
}
"""A plan that moves and reruns in the first step."""


@contextlib.contextmanager
def joined(cell: Cell | None = None) -> Iterator[torch.device]:
    """All ranks, and the cell's groups of Megatron."""
    around: Any = contextlib.nullcontext()
    device = torch.device("cpu")
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    elif cell is not None:
        from tests.ssdtrain.megatron.standin import cpu_for_cuda

        around = cpu_for_cuda()
    dist.init_process_group("nccl" if GPU else "gloo", timeout=PATIENCE)
    with around:
        if cell is not None:
            parallel.start(cell.split, 1, timeout_minutes=2)
        yield device
        if cell is not None:
            parallel.stop()


def of_all(own: Data) -> Data:
    """One result of what all ranks found: the slowest time, whether all are equal, and
    the rest of each."""
    every: list[Data] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own)
    merged: Data = {}
    for name, value in every[0].items():
        values = [one.get(name) for one in every]
        merged[name] = all(values) if isinstance(value, bool) else values
        if name.endswith("_ms"):
            merged[name] = max(values)  # type: ignore[type-var]
    return merged


def host_links(tiny: bool) -> Data:
    """GB/s of every rank's host link, one way: what doctor says of it alone, and with
    all of them at work. `share` is the second over the first."""
    num_bytes, rounds = (MIB, 2) if tiny else (256 * MIB, 40)
    with joined() as device:
        sizes = tuple(num_bytes >> shift for shift in range(0, 17, 2))
        budget = CopyBudget(max_seconds=3.0, sizes_bytes=sizes)
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                told = (
                    measure_gpu_copies(device.index, budget)
                    if GPU
                    else [measure_host_copy(budget)] * 3
                )
            dist.barrier()
        alone = [link.curve.gb_per_s(num_bytes) for link in told]
        copier, found = Copier(device, num_bytes), {}
        for number, way in enumerate(("out", "in", "both")):
            rate = copier.rate(rounds, out=way != "in", back=way != "out")
            share = rate / alone[number]
            found[way] = {"doctor": alone[number], "at once": rate, "share": share}
        return of_all(found)


class Copier:
    """Copies between this rank's GPU and pinned memory."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        kind = {"dtype": torch.uint8}
        self._host = torch.zeros(2, num_bytes, pin_memory=GPU, **kind)  # type: ignore[call-overload]
        self._near = torch.zeros(2, num_bytes, device=device, **kind)  # type: ignore[call-overload]
        self._streams = [torch.cuda.Stream() for _ in range(2)] if GPU else [None] * 2

    def rate(self, rounds: int, *, out: bool, back: bool) -> float:
        """GB/s one way, of so many copies that begin on all ranks at once."""
        wait()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(rounds):
            if out:
                self._copy(0, self._host, self._near)
            if back:
                self._copy(1, self._near, self._host)
        seconds = wait() - began
        return rounds * self._host[0].nbytes / seconds / 1e9

    def _copy(self, way: int, there: Tensor, here: Tensor) -> None:
        stream = self._streams[way]
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            there[way].copy_(here[way], non_blocking=True)


def train_row(row: Row, tiny: bool, peaks: tuple[float, ...]) -> Data:
    """A row of `real_models` on all ranks.

    peaks: GB above the level before the step, that ours has to stay within.
    """
    run = run_of(tiny)
    budget = int(peaks[0] * 1e9) or 1 << 20 if peaks else None
    found = real_row.trained(row, replace(run, budget_bytes=budget))
    names = ("step_ms", "peak_gb", "settled", "predicted_ms", "predicted_gb")
    return of_all({name: found[name] for name in names if name in found})


def run_of(tiny: bool) -> real_row.Run:
    """What rows share."""
    device, warm_up_s = ("cpu", 2.0) if tiny else ("cuda", WARM_UP_S)
    return real_row.Run(3 if tiny else 6, device=device, warm_up_s=warm_up_s)


def row_law(row: Row, tiny: bool, peaks: tuple[float, ...]) -> Data:
    """Three steps with and without ssdtrain, compared on every rank. Where they differ:
    in what, and whether another run without ssdtrain differs from the first."""
    device = torch.device(run_of(tiny).device, int(os.environ["LOCAL_RANK"]))
    if GPU:
        torch.cuda.set_device(device)
    exact_products()
    # To warn alone would leave flash attention's gradients as they are.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # it differs from itself
    length = num_tokens(row.tokens)
    report: Data = {}

    def steps(ours: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = build(row, device, length)
        trainer = real_row.Trainer(row, model, device)
        session = ssdtrain.offload(model, **AT_ONCE) if ours else None
        found: dict[str, Tensor] = {}
        for step in range(3):
            found |= {f"{step} {k}": v for k, v in results(trainer, length).items()}
        if session is not None:
            report.update(session.steps[-1].as_dict())
            session.close()
        return found

    def differing(other: dict[str, Tensor]) -> list[str]:
        return [name for name in theirs if not torch.equal(theirs[name], other[name])]

    theirs = steps(False)
    differs = differing(steps(True))
    moved, again = report["bytes_offloaded"], report["bytes_recomputed"]
    found = {"equal": not differs, "moves": moved > 0, "reruns": again > 0}
    equal = of_all(found)
    if not equal["equal"]:
        own = {"differs": differs[:4], "differs_itself": differing(steps(False))[:4]}
        equal |= of_all(own)
    return equal


def exact_products() -> None:
    """cuBLAS's products, where several streams multiply: asked before the first."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def results(trainer: real_row.Trainer, length: int) -> dict[str, Tensor]:
    """Bytes of a step's loss, of its gradients, and of the updated weights."""
    loss = trainer.forward(length)
    loss.backward()
    named = dict(trainer.model.named_parameters())
    found = {"loss": bits(loss)}
    found |= {f"grad {n}": bits(p.grad) for n, p in named.items() if p.grad is not None}
    trainer.update()
    return found | {name: bits(p) for name, p in named.items()}


def bits(tensor: Any) -> Tensor:
    """A copy of the bytes of this rank's part."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    found: Tensor = part.detach().clone().view(-1).view(torch.uint8)
    return found


def train_megatron(name: str, tiny: bool, way: str, peaks: tuple[float, ...]) -> Data:
    """One way to train a Megatron model. peaks: of checkpointing, by rank."""
    ranks = int(os.environ["WORLD_SIZE"])
    cell = megatrons(ranks, tiny)[name]
    if way == "law":
        cell = cell.small(ranks)
        exact_products()
    with joined(cell):
        if way == "law":
            with tempfile.TemporaryDirectory() as folder:
                return of_all(megatron.law(cell, Path(folder)))
        if way == "estimate":
            return of_all(megatron.estimate(cell))
        training = Training(cell)
        num_steps = 5
        if way == "plain":
            return of_all(megatron.measure(training, 2, num_steps))
        if way == "gc":
            with training.recomputing():
                return of_all(megatron.measure(training, 2, num_steps))
        own_bytes = int(peaks[dist.get_rank()] * 1e9) if peaks else 0
        settings = settings_of(way, own_bytes or 1 << 40, torch.device("cpu"))
        found = megatron.ours(training, {**megatron.HOST, **settings}, num_steps)
        if way == "fit":  # within a percent of what the same process takes without it
            found["beside_ms"] = megatron.measure(training, 2, num_steps)["step_ms"]
        return of_all(found)


def megatrons(ranks: int, tiny: bool) -> dict[str, Cell]:
    """Megatron's layouts of so many ranks, by name; `bert WIDTH` are of Table 5.4."""
    wide, deep = Size(8192, 4, 16), Size(8192, 2 * ranks, 2, 1024, 2 * ranks)
    if tiny:
        own: Data = {"heads": 2 * ranks, "vocabulary": 128}
        wide = Size(256, 2, 2, 32, **own)
        deep = Size(256, 2 * ranks, 2, 32, 2 * ranks, **own)
    tensor = Parallel(tensor=ranks)
    berts = {hidden: Size(hidden, layers, 16) for hidden, layers in WIDTHS}
    return {
        "tp": Cell(wide, tensor),
        "pp": Cell(deep, Parallel(pipeline=ranks)),
        **{
            f"bert {hidden}": Cell(wide if tiny else size, tensor, Family.BERT)
            for hidden, size in berts.items()
        },
    }
