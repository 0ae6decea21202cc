"""Megatron's models under the schedules of their layouts, with and without ssdtrain."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

import ssdtrain
from recipes.bench.harness import blocks
from recipes.bench.harness.processes import any_rank
from recipes.bench.harness.records import Data
from recipes.bench.harness.timing import Peak, wait
from ssdtrain.engines.megatron import innermost
from ssdtrain.tools.project.cases import TABLE_5_4, bert
from ssdtrain.tools.project.layer import Split, saved_bytes
from ssdtrain.train.data.batches import Batch
from ssdtrain.train.mcore import models, parallel, steps
from ssdtrain.train.mcore.parallel import Parallel
from ssdtrain.train.settings import Family, ModelSettings

GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if GPU else torch.float32
VOCABULARY = {Family.GPT: 50304, Family.BERT: 30592}
DROPOUT = 0.1
GIB = 1024**3
HOST: Data = {"target": "host", "host_bytes": 20 * GIB}
if not GPU:
    HOST = {"target": "host", "host_bytes": GIB, "min_bytes": 0}
SETTLE_S = 20.0
"""A session may take so long until its steps are timed."""


@dataclass(frozen=True)
class Size:
    """One model size and its input."""

    hidden: int
    layers: int
    rows: int
    """Sequences in a micro-batch."""
    sequence: int = 1024
    micro_batches: int = 1
    heads: int = 0
    vocabulary: int = 0


@dataclass(frozen=True)
class Cell:
    """One model in one layout."""

    size: Size
    split: Parallel
    family: Family = Family.GPT

    def small(self, ranks: int) -> "Cell":
        """The same layout, of a model that is quick to compare."""
        layers = self.size.layers if self.split.pipeline > 1 else 2
        size = Size(256, layers, 2, 64, 2 * ranks, heads=2 * ranks, vocabulary=512)
        return replace(self, size=size)


@dataclass
class Trained:
    """What a few steps left."""

    losses: list[list[float]]
    tensors: list[Tensor]
    report: Data
    restored: bool

    def equals(self, other: "Trained") -> bool:
        """Byte for byte."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self.losses == other.losses and all(torch.equal(*p) for p in pairs)


class Training:
    """One model under the schedule of its layout. Groups must be there."""

    def __init__(self, cell: Cell) -> None:
        parallel.seed_everything(7)
        size = cell.size
        settings = ModelSettings(
            family=cell.family,
            hidden_size=size.hidden,
            num_layers=size.layers,
            num_heads=size.heads or size.hidden // 128,
            sequence_length=size.sequence,
            dropout=DROPOUT,
        )
        models.check_layout(settings, cell.split)
        config = models.config_of(settings, cell.split, DTYPE)
        self._vocabulary = size.vocabulary or VOCABULARY[cell.family]
        self.cell = cell
        self.chunks = models.Chunks(settings, config, self._vocabulary, True).build()
        self.device = torch.device("cpu")
        if GPU:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._step = steps.step_of(cell.family, self.device)
        self._run = get_forward_backward_func()
        self._batches = [self._batch(n) for n in range(size.micro_batches)]
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def parameters(self) -> list[nn.Parameter]:
        """Of all chunks."""
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def _batch(self, number: int) -> Batch:
        shape = self.cell.size.rows, self.cell.size.sequence
        draw = torch.Generator().manual_seed(100 * parallel.data_rank() + number)
        ids = torch.randint(0, self._vocabulary, shape, generator=draw)
        text = (torch.ones_like(ids),) if self.cell.family is Family.BERT else ()
        return Batch((ids, *text), ids)

    def schedule(self, step: int) -> Tensor:
        """All micro-batches forward and backward; the losses, on the last stage."""
        parallel.seed_everything(step + 1)
        size = self.cell.size
        out = self._run(
            forward_step_func=self._step,
            data_iterator=[iter(self._batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=size.micro_batches,
            seq_length=size.sequence,
            micro_batch_size=size.rows,
            forward_only=False,
        )
        return torch.stack([one["loss"] for one in out]) if out else torch.zeros(0)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Megatron's full recomputation, every layer by itself."""
        wanted = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        configs = [innermost(chunk).config for chunk in self.chunks]
        before = [{name: getattr(c, name) for name in wanted} for c in configs]
        for config in configs:
            vars(config).update(wanted)
        try:
            yield
        finally:
            for config, values in zip(configs, before, strict=True):
                vars(config).update(values)

    def train(self, num_steps: int, settings: Data | None = None) -> Trained:
        """A few steps, with or without ssdtrain."""
        before = [sorted(vars(chunk)) for chunk in self.chunks]
        losses, tensors, session = [], [], None
        if settings is not None:
            session = ssdtrain.offload(self.chunks, **settings)
        with nullcontext() if session is None else session:
            for step in range(num_steps):
                losses.append(self.schedule(step).tolist())
                found = [p.grad for p in self.parameters() if p.grad is not None]
                tensors += [gradient.clone() for gradient in found]
                blocks.update(self.parameters(), 0.1)
            tensors += [parameter.detach().clone() for parameter in self.parameters()]
            report = session.steps[-1].as_dict() if session is not None else {}
        restored = before == [sorted(vars(chunk)) for chunk in self.chunks]
        return Trained(losses, tensors, report, restored)


def law(cell: Cell, directory: Path) -> Data:
    """Losses, gradients and weights with ssdtrain, byte for byte as without it, by
    torch's deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it differs from itself
    torch.utils.deterministic.fill_uninitialized_memory = False
    result: Data = {}
    theirs = Training(cell).train(2)
    common = {"plan": "offload-all", "min_bytes": 0, "window_bytes": 1}
    own: dict[str, Data] = {
        "host": {"recompute": "auto"},
        "ssd": {"recompute": "off", "directory": str(directory)},
    }
    for target, more in own.items():
        settings = {**common, "host_bytes": GIB // 2, "gpu_direct": "off", **more}
        ours = Training(cell).train(2, {"target": target, **settings})
        equal = ours.equals(theirs)
        result[f"{target}_equal"] = equal
        if not equal:
            result["equal_to_itself"] = theirs.equals(Training(cell).train(2))
        names = ("offloaded", "recomputed", "reloaded", "written")
        moved = {name: ours.report[f"bytes_{name}"] for name in names}
        result[f"{target}_moved"] = moved
        result[f"{target}_restored"] = ours.restored
    return result


def measure(
    training: Training,
    warm_up: int,
    num_steps: int,
    settles: Callable[[], bool] = bool,
) -> Data:
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
        dist.barrier()
        start = wait(training.device)
        memory = Peak(training.device)
        losses.append(training.schedule(step))
        peak = memory.most
        blocks.update(training.parameters(), 0.0)  # the same weights for every way
        step_ms = (wait(training.device) - start) * 1e3
        if first is None or step < first:
            before.append(round(step_ms, 1))
        else:
            times.append(step_ms)
            peaks.append(peak)
    return {
        "step_ms": statistics.median(times),
        "step_times": times,
        "before_times": before,
        "peak_gb": max(peaks) / 1e9,
        # Of a step that every way has, with the same seed and weights.
        "losses": losses[min(3, len(losses) - 1)].tolist(),
    }


def ours(training: Training, settings: Data, num_steps: int) -> Data:
    """Steps under ssdtrain, once it has settled: what was predicted, and reported."""
    with ssdtrain.offload(training.chunks, **settings) as session:
        own = blocks.settling(session, SETTLE_S)
        # The same for all ranks: the session of one of them settles still.
        result = measure(training, 2, num_steps, lambda: any_rank(own()))
        report, plan = session.last_step, session.plan
        result["settled"] = session.is_settled
    if plan is not None and plan.prediction is not None:
        result["explain"] = session.explain().splitlines()
        result["plan"] = {
            "step_predicted": plan.prediction.step_ms,
            "peak_predicted_gb": plan.prediction.peak_bytes / 1e9,
        }
    if report is not None:
        result["report"] = report.as_dict()
    return result


def estimate(cell: Cell) -> Data:
    """Bytes of the layers alone against the model of ssdtrain.tools.project."""
    training, size = Training(cell), cell.size
    settings = {**HOST, "recompute": "off", "plan": "offload-all"}
    with ssdtrain.offload(innermost(training.chunks[0]).encoder, **settings) as session:
        training.schedule(0)
        blocks.update(training.parameters(), 0.0)
        report = session.last_step
    split = Split(micro_batch=size.rows, tensor=cell.split.tensor)
    expected = size.layers * saved_bytes(bert(size.hidden, size.layers), split)
    source = [r.estimate_gib for r in TABLE_5_4 if r.hidden == size.hidden]
    return {
        "offloaded_gib": 0 if report is None else report.bytes_offloaded / GIB,
        "estimate_gib": expected / GIB,
        "source_gib": source[0] if source else 0.0,
    }
