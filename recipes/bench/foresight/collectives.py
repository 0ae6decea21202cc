"""Collectives of two or more GPUs of one host, and steps trained over them.

    python -m recipes.bench foresight.collectives --out ranks.json --budget-s 60

Times of all-reduce, all-gather, reduce-scatter, all-to-all and point to point over
sizes, in rounds, each in an order of its own: every time is kept, so that what they
differ by is known. Then tensor parallel steps (split as `tensor_ranks.py` says), a 1F1B
pipeline, `fully_shard` and DistributedDataParallel, with what each phase takes the
host; every rank's graph is captured beside RANKS.json, behind the times. Needs two
GPUs; `--ranks 2 --shapes tiny` runs the same over gloo on a CPU. `assemble` makes
curves of the times of collectives, `held_ranks` predicts the steps.
"""

import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.bench.foresight import subjects
from recipes.bench.foresight.tensor_ranks import PLANS, split
from recipes.bench.harness.cli import UsageError
from recipes.bench.harness.timing import Clock, wait
from ssdtrain.tools.foresight.graph import write_graph
from ssdtrain.tools.foresight.steps import capture_step

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
SMALLEST, LARGEST = 1 << 12, 1 << 29
TINY_LARGEST = 1 << 16
IN_A_ROW = 10
SLEEP_CYCLES = 4_000_000
"""Some two milliseconds, in which the host enqueues them all."""
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Settings:
    """Of a run.

    links_s: of the budget
    rounds: of six steps
    shapes: of foresight.subjects.SHAPES
    """

    out: Path
    ranks: int = torch.cuda.device_count()
    budget_s: float = 60.0
    links_s: float = 20.0
    rounds_of_links: int = 7
    rounds: int = 3
    port: int = 29561
    shapes: str = "ranks"


class Plan(NamedTuple):
    """A step that is measured."""

    how: str
    model: str
    at: int
    """Which of the shape's batches."""


PLANNED = (
    Plan("tp", "llama", 2),
    Plan("tp", "bert", 2),
    Plan("pipeline", "llama", 0),
    Plan("fsdp", "gpt", 1),
    Plan("fsdp", "llama", 1),
    Plan("ddp", "gpt", 1),
    Plan("ddp", "llama", 1),
)
VOCABULARIES = {"bert": 30522, "gpt": 50257, "llama": 32000}


def _body(kind: str, num_bytes: int, device: torch.device) -> Any:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    count = max(ranks, num_bytes // 2 // ranks * ranks)
    whole = torch.zeros(count, device=device, dtype=torch.bfloat16)
    part = torch.zeros(count // ranks, device=device, dtype=torch.bfloat16)
    other = torch.zeros_like(whole)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole)

    def send() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    return send


def _timed(body: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of one of several in a row: the slowest rank's."""
    for _ in range(3):
        body()
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            body()
        us = (time.perf_counter() - began) / IN_A_ROW * 1e6
    else:
        wait()
        clock = Clock(device)
        dist.barrier()
        torch.cuda._sleep(SLEEP_CYCLES)
        body()  # the ranks meet here: none of them waits for another in what is timed
        start = clock.mark()
        for _ in range(IN_A_ROW):
            body()
        us = clock.ms(start, clock.mark()) / IN_A_ROW * 1e3
    slowest = torch.tensor([us], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())


def sizes(largest: int) -> Iterator[int]:
    """Powers of two and what lies half-way between them."""
    size = SMALLEST
    while size <= largest:
        yield size
        if 3 * size // 2 <= largest:
            yield 3 * size // 2
        size *= 2


def links(
    device: torch.device, largest: int, num_rounds: int, end: float
) -> list[dict[str, Any]]:
    """Every kind and size: the median of rounds, and each round's time."""
    cells = [(kind, size) for kind in KINDS for size in sizes(largest)]
    times: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    for number in range(num_rounds):
        left = torch.tensor([end - time.monotonic()], device=device)
        dist.broadcast(left, 0)
        if left.item() < 0:
            break
        order = list(cells)
        random.Random(number).shuffle(order)  # the same one on every rank
        for kind, size in order:
            us = _timed(_body(kind, size, device), device)
            times[kind, size].append(round(us, 2))
    return [
        {
            **{"kind": kind, "bytes": size, "us": statistics.median(us)},
            "times_us": us,
        }
        for (kind, size), us in times.items()
        if us
    ]


class _Stage(nn.Module):
    """One rank's layers of a Llama."""

    def __init__(self, model: Any, first: bool, last: bool) -> None:
        super().__init__()
        layers = model.model.layers
        half = len(layers) // 2
        self.layers = nn.ModuleList(layers[:half] if first else layers[half:])
        self.embed = model.model.embed_tokens if first else None
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if last else None
        self.head = model.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence) of ids, or (batch, sequence, hidden), to the next stage's
        or to logits."""
        if self.embed is not None:
            x = self.embed(x)
        places = torch.arange(x.shape[1], device=x.device)[None]
        turned = self.rotary(x, places)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=turned)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class _Pipeline:
    """A step of 1F1B over two ranks, as torch schedules it."""

    def __init__(self, subject: subjects.Subject, ids: Tensor, labels: Tensor) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.model = _Stage(subject.model, rank == 0, rank == ranks - 1)
        stage = PipelineStage(self.model, rank, ranks, ids.device)
        self._schedule: Any = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_loss)
        self._given = (ids,) if rank == 0 else ()
        self._target = labels if rank == ranks - 1 else None
        own = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(own, lr=1e-5, fused=True)

    def __call__(self) -> None:
        """Run one step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step(*self._given, target=self._target)
        self._optimizer.step()

    def host_us(self, num_steps: int) -> dict[str, float]:
        """Microseconds until the host has launched a step: the median of some."""
        found = []
        for _ in range(num_steps):
            began = wait()
            self()
            found.append((time.perf_counter() - began) * 1e6)
        return {"all": round(statistics.median(found), 1)}


def _made(plan: Plan, shapes: str, device: torch.device) -> tuple[Any, Any]:
    """The step, and this rank's module."""
    shape, batches = subjects.SHAPES[shapes][plan.model]
    batch = batches[min(plan.at, len(batches) - 1)]
    with device:
        subject = subjects.MAKERS[plan.model](batch, **shape)
    model: Any = subject.model
    whole = batch * (MICRO_BATCHES if plan.how == "pipeline" else 1)
    size = (whole, shape["sequence"])
    vocabulary = VOCABULARIES[plan.model]
    ids = torch.randint(0, vocabulary, size, device=device)
    labels = torch.randint(0, vocabulary, size, device=device)
    if plan.how == "pipeline":
        pipeline = _Pipeline(subject, ids, labels)
        return pipeline, pipeline.model
    if plan.how == "ddp":
        own = [device.index] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=own)
    elif plan.how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in subjects.layers(plan.model, model):
            fully_shard(layer)
        fully_shard(model)
    else:
        for layer in subjects.layers(plan.model, model):
            split(layer, PLANS[plan.model], device.type)

    def forward() -> Tensor:
        more = {} if plan.model == "bert" else {"use_cache": False}
        return _loss(model(input_ids=ids, **more).logits, labels)

    step = subjects.TrainingStep(subject._replace(model=model, forward=forward))
    return step, model


def _step(plan: Plan, args: Settings, device: torch.device) -> dict[str, Any]:
    """Time a step on every rank, then capture it."""
    shape, batches = subjects.SHAPES[args.shapes][plan.model]
    batch = batches[min(plan.at, len(batches) - 1)]
    began = time.monotonic()
    step, model = _made(plan, args.shapes, device)
    step()
    step()
    row = {
        **{"model": plan.model, "how": plan.how, "batch": batch, "shape": shape},
        "micro_batches": MICRO_BATCHES if plan.how == "pipeline" else 1,
    }
    if plan.how == "tp":
        row["split"] = PLANS[plan.model]
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    wait()
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    times = [_fixed(step) for _ in range(args.rounds)]
    row |= {"step_us": statistics.median(times), "times_us": times}
    row["host_us"] = step.host_us(3)
    graph = capture_step(step, model, num_warm=0)
    name = f"graph_{plan.how}_{plan.model}_{batch}.rank{dist.get_rank()}.json"
    write_graph(args.out.parent / name, graph)
    row["took_s"] = round(time.monotonic() - began, 2)
    return row


def _is_indivisible(plan: Plan, shapes: str) -> bool:
    """A Llama whose heads of keys, or layers, are fewer than ranks."""
    shape, _ = subjects.SHAPES[shapes][plan.model]
    ranks = dist.get_world_size()
    few = {"tp": shape["hidden"] // 512, "pipeline": shape["layers"]}
    return plan.model == "llama" and few.get(plan.how, ranks) < ranks


def _fixed(step: Any, number: int = 6) -> float:
    """Every rank takes the same number of steps."""
    dist.barrier()
    began = wait()
    for _ in range(number):
        step()
    return (wait() - began) / number * 1e6


def _rank(rank: int, args: Settings) -> None:
    cuda = torch.cuda.is_available()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(args.port))
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", rank=rank, world_size=args.ranks
    )
    result: dict[str, Any] = {"ranks": args.ranks, "torch": torch.__version__}
    result["device"] = torch.cuda.get_device_name(device) if cuda else "cpu"
    result |= {"links": [], "steps": []}
    begun = time.monotonic()
    try:
        result["links"] = links(
            device,
            LARGEST if cuda else TINY_LARGEST,
            args.rounds_of_links,
            begun + args.links_s,
        )
        for plan in PLANNED:
            if _is_indivisible(plan, args.shapes):
                continue
            if rank == 0:
                args.out.write_text(json.dumps(result) + "\n")
            left = begun + args.budget_s - time.monotonic()
            soonest = torch.tensor([left], device=device)
            dist.broadcast(soonest, 0)
            if soonest.item() < 0:
                continue
            result["steps"].append(_step(plan, args, device))
            if rank == 0:
                shown = {k: v for k, v in result["steps"][-1].items() if k != "split"}
                print(shown, flush=True)
            if cuda:
                gc.collect()
                torch.cuda.empty_cache()
    finally:
        if rank == 0:
            args.out.write_text(json.dumps(result) + "\n")
        dist.destroy_process_group()


def main(settings: Settings) -> None:
    """Measure them."""
    if settings.ranks < 2:
        raise UsageError("collectives need two GPUs (or --ranks 2 on a CPU)")
    mp.spawn(_rank, args=(settings,), nprocs=settings.ranks)
