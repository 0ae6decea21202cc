"""Layouts of four models on two GPUs: predicted and measured.

    python -m recipes.bench search.layout_regret --budget-s 580

Each layout is a pair of processes: the model in fp32 under FSDP2 (and tensor
parallelism, for the decoder without experts, by the code that the search prints), bf16
in compute, AdamW. Under `ssdtrain` a session may use the predicted memory of the whole
rank. At the end of each model: how the measured order follows the
predicted one, what the predicted best loses, the errors of peaks. A rerun goes on. On a
CPU (gloo): `--device cpu --small`.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import answer_of, any_rank, join_ranks
from recipes.bench.harness.timing import Peak, wait
from recipes.bench.models.real_row import selective_contexts
from recipes.bench.models.stock import checkpoint, shrunk
from ssdtrain.plan.goal import DEVICE_RESERVE
from ssdtrain.regions.find import find_regions
from ssdtrain.tools.foresight.cluster import cluster_of
from ssdtrain.tools.foresight.device import DeviceCosts, load_device
from ssdtrain.tools.foresight.spec import links_of
from ssdtrain.tools.report.build_public import Loss, Shape, Train, public_subject
from ssdtrain.tools.report.estimate import estimate
from ssdtrain.tools.report.fits import CHECKPOINTING, PLAIN, SELECTIVE
from ssdtrain.tools.report.public_models import PUBLIC
from ssdtrain.tools.search.launch import configurations
from ssdtrain.tools.search.layout_search import job_of, keyed_costs
from ssdtrain.tools.search.parallel_layout import Division, Job, ParallelLayout
from ssdtrain.tools.search.pricing import Key, PricedLayout, Pricer
from ssdtrain.tools.search.stage_costs import (
    OURS,
    PerLayer,
    StageCosts,
    activation_cost,
    priced,
    untied_head,
)
from ssdtrain.tools.search.stores import Stores

GPUS = 2
WARM, STEPS = 3, 5
"""Steps before those that are timed, and these."""
SETTLE_S = 40.0
"""A session may take so long until then."""
LIMIT_S = 150.0
PRELOAD = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    "recipes.bench.search.layout_regret",
    *(
        f"transformers.models.{kind}.modeling_{kind}"
        for kind in ("qwen3", "t5", "vit", "mixtral")
    ),
)
"""Imported once, in the process that all ranks are forked from."""


class Subject(NamedTuple):
    """A model that is measured."""

    values: Mapping[str, Any]
    """Of its configuration."""
    sequences: int
    """Of a micro-batch."""
    tokens: int
    """Of a sequence."""
    is_decoder: bool = True

    @property
    def shape(self) -> Shape:
        """As the search knows it."""
        return Shape(self.values, Train.FULL, Loss.STOCK)


MIXTURE = {
    "model_type": "mixtral",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
SUBJECTS = {
    "4B": Subject(PUBLIC["qwen3-4b"], 1, 4096),
    "T5": Subject(PUBLIC["t5-large"], 16, 1024, False),
    "ViT": Subject(PUBLIC["vit-huge"], 64, 257, False),
    "MoE": Subject(MIXTURE, 1, 4096),
}
SMALL = {
    name: Subject({**shrunk(one.values), "vocab_size": 256}, *few, one.is_decoder)
    for (name, one), few in zip(
        SUBJECTS.items(), ((2, 64), (1, 1024), (4, 5), (2, 64)), strict=True
    )
}
"""Tiny models: sequences of a micro-batch, and their tokens."""


def layouts_of(subject: Subject) -> dict[str, ParallelLayout]:
    """Those that are compared, by name."""
    ways = PLAIN, CHECKPOINTING, SELECTIVE, f"{OURS} 3"
    found = {
        f"ZeRO-{zero}, {way}": _layout(subject, way, data=GPUS, zero=zero)
        for zero in (2, 3)
        for way in ways
    }
    if subject.is_decoder and "num_local_experts" not in subject.values:
        for way in (PLAIN, CHECKPOINTING):
            for name, divided in (("tensor", False), ("sequence", True)):
                own = {"data": 1, "tensor": GPUS, "zero": 3, "divided": divided}
                found[f"{name}, {way}"] = _layout(subject, way, **own)
    return found


def _layout(subject: Subject, way: str, **more: Any) -> ParallelLayout:
    plain = {"tensor": 1, "pipeline": 1, "sequences": subject.sequences}
    return ParallelLayout(**{**plain, "way": way, **more})


def job_for(subject: Subject, layers: int = 0) -> Job:
    """What is trained: one micro-batch of each of two data-parallel ranks."""
    batch = GPUS * subject.sequences
    if subject.is_decoder:
        return job_of(subject.shape, subject.tokens, batch, GPUS)
    tokens = subject.tokens
    return Job(layers=layers, hidden=0, tokens=tokens, batch=batch, gpus=GPUS)


def whole_costs(
    shape: Shape, sequences: int, tokens: int, device: DeviceCosts
) -> tuple[int, StageCosts]:
    """Capture and price a model whole, whatever its kind: its layers are its regions,
    and the ends count as layers. Returns the number of layers, and their costs."""
    with torch.device("meta"):
        model, forward = public_subject(shape, sequences * tokens)
        links = links_of(device.spec)
        found = priced(estimate(model, forward, links, device, min_bytes=1))
    regions = find_regions(model)
    count = len(regions)

    def line(total: float) -> PerLayer:
        return PerLayer(layer=total / count, ends=0.0)

    ways = {
        name: activation_cost(own, own, lambda total, _: line(total))
        for name, own in found.items()
    }
    parameters = sum(one.numel() for one in model.parameters())
    inside = sum(p.numel() for one in regions for p in one.module.parameters())
    own = PerLayer(layer=inside / count, ends=parameters - inside)
    return count, StageCosts(ways=ways, parameters=own, head=untied_head(model))


@functools.cache
def predicted(name: str, small: bool, gpu: str) -> dict[str, PricedLayout]:
    """The prices of a model's layouts."""
    subject = (SMALL if small else SUBJECTS)[name]
    device = load_device(gpu)
    layers, sequences = 0, subject.sequences
    costs: dict[Key, StageCosts] = {}
    if subject.is_decoder:
        job = job_for(subject)
        for degree in {one.tensor for one in layouts_of(subject).values()}:
            costs |= keyed_costs(subject.shape, job, degree, sequences, device)
    else:
        shape, tokens = subject.shape, subject.tokens
        layers, whole = whole_costs(shape, sequences, tokens, device)
        costs = {(1, sequences, Division.NONE): whole}
    pricer = Pricer(
        job=job_for(subject, layers),
        spec=device.spec,
        cluster=cluster_of(f"nvlink:{GPUS}", device.spec),
        capacity_bytes=device.spec.memory_bytes - device.context_bytes,
        stores=Stores(host_bytes=1e12),
        costs=costs,
    )
    return {at: pricer.price(own) for at, own in layouts_of(subject).items()}


def built(
    subject: Subject, own: ParallelLayout, on: str, rank: int
) -> tuple[Any, Callable[[], Any]]:
    """The model as the layout splits it, and its loss."""
    torch.manual_seed(0)
    with torch.device(on):
        model, forward = public_subject(
            subject.shape, subject.sequences * subject.tokens
        )
        model.float()
        torch.manual_seed(rank if own.data > 1 else 0)
        if subject.is_decoder:
            size = (subject.sequences, subject.tokens)
            ids = torch.randint(subject.values["vocab_size"], size)
            forward = functools.partial(_loss, model, ids)
    options: dict[str, Any] = {"use_reentrant": False}
    if own.way == SELECTIVE:
        options["context_fn"] = selective_contexts
    if own.way in (CHECKPOINTING, SELECTIVE):
        checkpoint(model, options)
    if subject.is_decoder:
        names: dict[str, Any] = {}
        exec(configurations(own, job_for(subject))["fsdp2"], names)
        names["parallelize"](model, on)
    else:
        shard(model, own.zero == 3)
    return model, forward


def measured(
    name: str, at: str, small: bool, on: str, limit: int, settle_s: float
) -> dict[str, Any]:
    """Step and peak of one layout, on every rank."""
    device, rank = join_ranks(on), distributed.get_rank()
    subject = (SMALL if small else SUBJECTS)[name]
    own = layouts_of(subject)[at]
    model, forward = built(subject, own, on, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    session = None
    if own.way.startswith(OURS):
        least = 1 if small else 1 << 20
        whole = int(limit / (1 - DEVICE_RESERVE))  # plans leave that part free
        session = ssdtrain.offload(
            model, target="host", device_memory=whole, min_bytes=least
        )
    count = own.micro_batches(job_for(subject).batch)

    def step() -> None:
        for _ in range(count):
            forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    until = time.monotonic() + settle_s
    for taken in itertools.count():
        settles = session is not None and not session.is_settled
        if not any_rank(taken < WARM or (settles and time.monotonic() < until)):
            break
        step()
    wait(device)
    distributed.barrier()
    memory, began = Peak(device), time.perf_counter()
    for _ in range(STEPS):
        step()
    wait(device)
    distributed.barrier()
    ms = (time.perf_counter() - began) / STEPS * 1e3
    row = {"ms": ms, "bytes": memory.base + memory.most, "steps_before": taken}
    if session is not None:
        row["settled"] = session.is_settled
        row["explain"] = session.explain().splitlines()[:20]
        session.close()
    return row


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def shard(model: Any, reshard: bool) -> None:
    """FSDP2 over the layers of any model."""
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for region in find_regions(model):
        fully_shard(region.module, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=precision, reshard_after_forward=reshard)


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; equal values share the mean of their ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(v) + (order.count(v) - 1) / 2 for v in values]

    return statistics.correlation(ranks(one), ranks(other))


def summary(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How predictions of one model hold."""
    ms = {name: row["ms"] for name, row in rows.items()}
    told = {name: row["predicted_ms"] for name, row in rows.items()}
    chosen, best = min(told, key=told.__getitem__), min(ms, key=ms.__getitem__)
    peaks = [r["predicted_bytes"] / r["bytes"] - 1 for r in rows.values() if r["bytes"]]
    return {
        "layouts": len(rows),
        "rank_correlation": correlation(list(told.values()), list(ms.values())),
        "regret": ms[chosen] / ms[best] - 1,
        "worst_peak_error": max(map(abs, peaks), default=0.0),
    }


def main(bench: Bench, *, gpu: str = "h100", small: bool = False) -> int:
    """Measure all layouts; 1 if one failed or is missing.

    Args:
        gpu: whose prices are compared, h100 or h200
        small: tiny models
    """
    cells = bench.cells({"gpu": gpu, "small": small})
    missing = 0
    for name, subject in (SMALL if small else SUBJECTS).items():
        rows = {}
        for at in layouts_of(subject):
            cell = f"{name}: {at}"
            limit_s = min(LIMIT_S, cells.left_s())
            cells.run(cell, _cell, name, at, small, gpu, bench.device.type, limit_s)
            if cell in cells and "error" not in cells[cell]:
                rows[at] = cells[cell]
            else:
                missing += 1
        if len(rows) > 2:
            cells.fact(name, summary(rows))
            print(name, cells.data[name])
    return int(missing > 0)


def _cell(
    name: str, at: str, small: bool, gpu: str, on: str, limit_s: float
) -> dict[str, Any]:
    price = predicted(name, small, gpu)[at]
    limit = int(price.memory_bytes) + load_device(gpu).context_bytes
    given = name, at, small, on, limit, 1.0 if small else SETTLE_S
    row = answer_of(measured, given, limit_s, PRELOAD, ranks=GPUS)
    told = {"predicted_ms": price.step_ms, "predicted_bytes": limit}
    return {**row, **told, "parts_ms": dict(price.parts_ms)}
