"""How `gnn.py` measures one side: bars part by part, and whole overlapped runs."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import torch

from pydirect.loader import MiniBatch
from pydirect.train import NodeClassificationTrainer


def sync() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def bars(trainer: NodeClassificationTrainer, num: int, warm: int) -> dict[str, Any]:
    """One batch after the other, waiting after each part: copy, train, other."""
    loader = trainer.batches
    loader.epoch = 0
    spent = {"copy_s": 0.0, "train_s": 0.0, "other_s": 0.0}
    losses, nodes = [], 0
    sampled = loader.sampled()
    begun = sync()
    for number, batch in zip(range(num + warm), sampled, strict=False):
        got = sync()
        there = loader.fetch(batch)
        fetched = sync()
        loss = trainer.step(there)
        done = sync()
        losses.append(float(loss.detach()))
        if number >= warm:
            spent["other_s"] += got - begun
            spent["copy_s"] += fetched - got
            spent["train_s"] += done - fetched
            nodes += len(batch.node_ids)
        begun = sync()
    sampled.close()
    feature_bytes = nodes * trainer.dataset.features.shape[1] * 4
    return {
        **{name: round(value, 5) for name, value in spent.items()},
        "batches": num,
        "nodes_a_batch": nodes // max(1, num),
        "copy_gb_s": round(feature_bytes / max(1e-9, spent["copy_s"]) / 1e9, 2),
        "first_losses": losses[:5],
    }


def overlapped(
    trainer: NodeClassificationTrainer, buffers: int, num: int, warm: int
) -> dict[str, Any]:
    """A run of ``num`` batches as a user sees it: wall, idle GPU, busy CPU."""
    trainer.loader = replace(trainer.loader, num_buffers=buffers)
    loader = trainer._loader(trainer.dataset.train_nodes, shuffle=True)
    process = psutil.Process()
    marks: list[tuple[Any, Any]] = []
    wall, cpu = 0.0, 0.0
    for number, batch in enumerate(loader):
        if number == warm:
            wall, cpu = sync(), cpu_seconds(process)
        if number >= warm:
            marks.append(timed_step(trainer, batch))
        else:
            trainer.step(batch)
        if number + 1 == warm + num:
            break
    wall = sync() - wall
    cpu = cpu_seconds(process) - cpu
    busy = sum(a.elapsed_time(b) for a, b in marks) / 1e3 if has_gpu() else None
    return {
        "wall_s": round(wall, 5),
        "batches": len(marks),
        "cpu_percent": round(100 * cpu / wall, 1),
        "gpu_idle_share": None if busy is None else round(max(0, 1 - busy / wall), 4),
    }


def has_gpu() -> bool:
    return torch.cuda.is_available()


def timed_step(trainer: NodeClassificationTrainer, batch: MiniBatch) -> tuple[Any, Any]:
    if not has_gpu():
        trainer.step(batch)
        return None, None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    trainer.step(batch)
    end.record()
    return begin, end


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def ratios(out: dict[str, Any], batches_an_epoch: float) -> dict[str, Any]:
    """Ours against theirs."""
    ours, theirs = out["pydirect"], out["pyg"]
    walls = {k: out[k]["run"]["wall_s"] for k in ("pyg", "pyg_overlapped", "pydirect")}
    pairs = zip(
        ours["bars"]["first_losses"], theirs["bars"]["first_losses"], strict=True
    )
    return {
        "copy_time_cut": round(
            1 - ours["bars"]["copy_s"] / max(1e-9, theirs["bars"]["copy_s"]), 4
        ),
        "epoch_speedup": round(walls["pyg"] / walls["pydirect"], 3),
        "epoch_speedup_over_overlapped": round(
            walls["pyg_overlapped"] / walls["pydirect"], 3
        ),
        "epoch_s": {
            k: round(v * batches_an_epoch / max(1, out[k]["run"]["batches"]), 3)
            for k, v in walls.items()
        },
        "largest_loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        "features_over_peak": round(
            out["feature_gib"] / max(1e-9, ours.get("peak_gib", 0)), 2
        )
        if "peak_gib" in ours
        else None,
    }


def limit_memory(gib: float | None) -> None:
    """Let PyTorch's allocator have so much of the GPU."""
    if not has_gpu():
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        1.0 if gib is None else gib * 2**30 / total
    )


def plain_loop(
    trainer: NodeClassificationTrainer,
    features: torch.Tensor,
    device: torch.device,
    num: int,
) -> Iterator[float]:
    sampled = trainer.batches.sampled()
    for _, batch in zip(range(num), sampled, strict=False):
        x = features[batch.node_ids].to(device)
        seeds = batch.node_ids[: batch.num_seeds]
        there = MiniBatch(
            x=x,
            y=trainer.dataset.labels[seeds].to(device),
            edge_index=batch.edge_index.to(device),
            num_seeds=batch.num_seeds,
            num_nodes_per_hop=batch.num_nodes_per_hop,
            num_edges_per_hop=batch.num_edges_per_hop,
        )
        yield float(trainer.step(there).detach())
    sampled.close()
