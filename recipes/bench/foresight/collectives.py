"""Collectives of two or more GPUs of one host, and steps trained over them.

    python -m recipes.bench.foresight.collectives --out collectives.json --budget-s 35

Times of all-reduce, all-gather, reduce-scatter, all-to-all and point to point over
sizes, then DistributedDataParallel, `fully_shard` and tensor parallel steps of two
models each, the last split as `tensor_ranks.py` says. Needs two GPUs; `--ranks 2
--shapes tiny` runs the same over gloo on a CPU. `assemble` keeps the times of
collectives, `held_ranks` the steps.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recipes.bench.foresight import subjects
from recipes.bench.foresight.tensor_ranks import PLANS, split
from ssdtrain.foresight.tracing import step_us

SMALLEST, LARGEST = 1 << 12, 1 << 29
TINY_LARGEST = 1 << 16
MODELS = {"ddp": ("gpt", "llama"), "fsdp": ("gpt", "llama"), "tp": ("bert", "llama")}
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


def _timed(body: Any, device: torch.device) -> float:
    """Microseconds of one of several in a row."""
    for _ in range(3):
        body()
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(5):
            body()
        return (time.perf_counter() - began) / 5 * 1e6
    torch.cuda.synchronize()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    dist.barrier()
    torch.cuda._sleep(2_000_000)  # the host enqueues all meanwhile
    start.record()
    for _ in range(10):
        body()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 10 * 1e3


def _links(device: torch.device, largest: int) -> list[dict[str, Any]]:
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    rows = []
    size = SMALLEST
    while size <= largest:
        for kind in kinds:
            us = _timed(_body(kind, size, device), device)
            rows.append({"kind": kind, "bytes": size, "us": round(us, 2)})
        size *= 2
    return rows


def _step(name: str, how: str, shapes: str, device: torch.device) -> dict[str, Any]:
    shape, batches = subjects.SHAPES[shapes][name]
    with device:
        subject = subjects.MAKERS[name](batches[1], **shape)
    model: Any = subject.model
    if how == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    elif how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in subjects.layers(name, model):
            fully_shard(layer)
        fully_shard(model)
    elif how == "tp":
        for layer in subjects.layers(name, model):
            split(layer, PLANS[name], device.type)
    wrapped = subject._replace(model=model)
    vocabulary = VOCABULARIES[name]
    size = (batches[1], shape["sequence"])
    ids_ = torch.randint(0, vocabulary, size, device=device)
    labels = torch.randint(0, vocabulary, size, device=device)

    def forward() -> torch.Tensor:
        more = {} if name == "bert" else {"use_cache": False}
        logits = model(input_ids=ids_, **more).logits
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten()
        )

    step = subjects.training_step(wrapped._replace(forward=forward))
    step()
    step()
    row = {"model": name, "how": how, "batch": batches[1], "shape": shape}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    times = [_fixed(step, device) for _ in range(3)]
    return {**row, "step_us": sorted(times)[1]}


def _is_indivisible(name: str, shapes: str) -> bool:
    """A Llama whose heads of keys are fewer than ranks."""
    shape, _ = subjects.SHAPES[shapes][name]
    return name == "llama" and shape["hidden"] // 512 < dist.get_world_size()


def _fixed(step: Any, device: torch.device, number: int = 6) -> float:
    """Every rank takes the same number of steps."""
    if device.type != "cuda":
        return step_us(step, num_warm=0, seconds=0.0)
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(number):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / number * 1e6


def _rank(rank: int, args: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(args.port))
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", rank=rank, world_size=args.ranks
    )
    result: dict[str, Any] = {"ranks": args.ranks, "steps": []}
    end = time.monotonic() + args.budget_s
    try:
        result["links"] = _links(device, LARGEST if cuda else TINY_LARGEST)
        for how, names in MODELS.items():
            for name in names:
                if how == "tp" and _is_indivisible(name, args.shapes):
                    continue
                left = torch.tensor([end - time.monotonic()], device=device)
                dist.broadcast(left, 0)
                if left.item() < 0:
                    continue
                result["steps"].append(_step(name, how, args.shapes, device))
                if rank == 0:
                    args.out.write_text(json.dumps(result) + "\n")
                    print(result["steps"][-1], flush=True)
                if cuda:
                    torch.cuda.empty_cache()
    finally:
        if rank == 0:
            args.out.write_text(json.dumps(result) + "\n")
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--budget-s", type=float, default=35.0)
    parser.add_argument("--port", type=int, default=29561)
    parser.add_argument("--shapes", default="test", choices=sorted(subjects.SHAPES))
    args = parser.parse_args()
    if args.ranks < 2:
        raise SystemExit("collectives need two GPUs (or --ranks 2 on a CPU)")
    mp.spawn(_rank, args=(args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
