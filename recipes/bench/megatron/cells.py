"""What `megatron.core` trains: models, sizes and layouts, and how they are trained."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

import ssdtrain
from ssdtrain.engines.megatron import innermost
from ssdtrain.train.data.batches import Batch
from ssdtrain.train.mcore import models, parallel, steps
from ssdtrain.train.mcore.parallel import Parallel
from ssdtrain.train.settings import Family, ModelSettings

GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if GPU else torch.float32
DROPOUT = 0.1
VOCABULARY = {Family.GPT: 50304, Family.BERT: 30592, Family.T5: 32128}
LAYOUTS = {
    "dp2": Parallel(),
    "tp2": Parallel(tensor=2),
    "1f1b": Parallel(pipeline=2),
    "interleaved": Parallel(pipeline=2, virtual_pipeline=2),
}
LAYOUTS_OF_4 = {
    "tp4": Parallel(tensor=4),
    "tp2 1f1b": Parallel(tensor=2, pipeline=2),
    "tp2 interleaved": Parallel(tensor=2, pipeline=2, virtual_pipeline=2),
    "pp4": Parallel(pipeline=4),
    "tp2 sequence dp2": Parallel(tensor=2, sequence=True),
}


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

    family: Family
    size: Size
    layout: str
    fused: bool = True
    """torch's attention, or Megatron's own."""
    padded: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""
    split: Parallel | None = None
    """Instead of what is known of the layout's name."""
    experts: int = 1
    """Ranks that share a layer's experts."""

    @property
    def name(self) -> str:
        """Such as bert/tp2/8192x4."""
        return (
            f"{self.family.value}/{self.layout}/{self.size.hidden}x{self.size.layers}"
        )

    @property
    def parallel(self) -> Parallel:
        """The layout's settings."""
        return self.split or {**LAYOUTS, **LAYOUTS_OF_4}[self.layout]

    def resized(self, size: Size) -> "Cell":
        """The same of another size."""
        return dataclasses.replace(self, size=size)

    def offloading(self) -> "Cell":
        """The same with Megatron's fine-grained activation offloading."""
        parts = ["qkv_linear", "core_attn", "attn_proj", "attn_norm", "mlp_norm"]
        more = {"fine_grained_activation_offloading": True, "offload_modules": parts}
        return dataclasses.replace(self, more=more)


def law_cells(num_ranks: int) -> list[Cell]:
    """GPT, BERT and T5 in every layout that exists for them and so many ranks."""
    found = []
    size = Size(256, 4, 2, 128, 4, heads=4, vocabulary=512)
    if not GPU:
        size = Size(32, 4, 2, 16, 4, heads=4, vocabulary=64)
    for layout, split in (LAYOUTS if num_ranks == 2 else LAYOUTS_OF_4).items():
        for family in Family:
            deep = split.pipeline > 2 or split.virtual_pipeline
            # What megatron-core has no model for: ssdtrain.train.mcore.models.check.
            if (family is Family.T5 and deep) or (
                family is Family.BERT and split.sequence
            ):
                continue
            # torch's attention with a mask has no deterministic backward on a GPU.
            own = family is Family.BERT and layout in ("tp2", "1f1b", "tp4", "pp4")
            found.append(Cell(family, size, layout, not own, own))
    return found


def tensor_cells() -> dict[str, list[Cell]]:
    """Figure 5.11's sizes, the largest share of the time; one micro-batch of 16."""
    sizes = [Size(8192, 4, 16), Size(12288, 3, 16), Size(16384, 2, 16)]
    if not GPU:
        sizes = [Size(256, 2, 2, 32, vocabulary=128)]
    return {f.value: [Cell(f, size, "tp2") for size in sizes] for f in Family}


def pipeline_cells() -> list[Cell]:
    """Eight micro-batches of two sequences."""
    size, wide = Size(8192, 4, 2, 1024, 8), Size(16384, 2, 2, 1024, 8)
    if not GPU:
        size = wide = Size(256, 2, 2, 32, 8, vocabulary=128)
    return [
        Cell(Family.GPT, size, "1f1b"),
        Cell(Family.BERT, size, "1f1b"),
        Cell(Family.T5, size, "1f1b"),
        Cell(Family.GPT, wide, "1f1b"),
    ]


@dataclass
class Trained:
    """What a few steps left."""

    losses: list[list[float]]
    tensors: list[Tensor]
    reports: list[dict[str, Any]]
    restored: bool


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
        models.check(settings, cell.parallel)
        config = models.config_of(settings, cell.parallel, DTYPE, **cell.more)
        vocabulary = size.vocabulary or VOCABULARY[cell.family]
        build = models.Chunks(settings, config, vocabulary, cell.fused)
        self.cell, self.chunks = cell, build.build()
        self._vocabulary = vocabulary
        device = torch.device("cuda", torch.cuda.current_device()) if GPU else "cpu"
        self._step = steps.step_of(cell.family, torch.device(device))
        self._run = get_forward_backward_func()
        self._batches = [self._batch(n) for n in range(size.micro_batches)]
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def parameters(self) -> list[nn.Parameter]:
        """Of all chunks."""
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def _batch(self, number: int) -> Batch:
        rows, length = self.cell.size.rows, self.cell.size.sequence
        seed = 100 * parallel.data_rank() + number
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self._vocabulary, (rows, length), generator=generator)
        text = torch.ones_like(ids)
        if self.cell.padded:
            text[0, length // 2 :] = 0
        inputs = {
            Family.GPT: (ids,),
            Family.BERT: (ids, text),
            Family.T5: (ids, ids.flip(1)),
        }[self.cell.family]
        return Batch(inputs, ids)

    def schedule(self, step: int) -> Tensor:
        """All micro-batches forward and backward; the losses, on the last stage."""
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

    @torch.no_grad()
    def sgd(self, rate: float) -> None:
        """SGD; gradients stay allocated, so they never count as activations."""
        parameters = self.parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_add_(parameters, gradients, alpha=-rate)
        torch._foreach_zero_(gradients)

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

    def train(self, num_steps: int, settings: dict[str, Any] | None = None) -> Trained:
        """A few steps, with or without ssdtrain."""
        before = [sorted(vars(chunk)) for chunk in self.chunks]
        losses, tensors = [], []
        reports: list[dict[str, Any]] = []
        session = None
        if settings is not None:
            session = ssdtrain.offload(self.chunks, **settings)
        with nullcontext() if session is None else session:
            for step in range(num_steps):
                parallel.seed_everything(step + 1)
                losses.append(self.schedule(step).tolist())
                found = [p.grad for p in self.parameters() if p.grad is not None]
                tensors += [gradient.clone() for gradient in found]
                self.sgd(0.1)
            tensors += [parameter.detach().clone() for parameter in self.parameters()]
            if session is not None:
                reports = [report.as_dict() for report in session.steps]
        restored = before == [sorted(vars(chunk)) for chunk in self.chunks]
        return Trained(losses, tensors, reports, restored)
