"""How `gnn.epochs` measures one side: bars part by part, and whole overlapped runs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import torch

# The checkout's packages, installed or not.
from pydirect.datasets import NodeDataset
from pydirect.loader import MiniBatch
from pydirect.sampling import Graph
from pydirect.train import NodeClassificationTrainer
from recipes.bench.harness.timing import Clock, wait


def dataset(
    name: str,
    graph: Graph,
    features: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    num_train: int,
) -> NodeDataset:
    """Random nodes to train on; the same ones every time."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    return NodeDataset(
        name=name,
        graph=graph,
        features=features,
        labels=labels,
        num_classes=num_classes,
        train_nodes=order[:num_train],
        valid_nodes=order[num_train : num_train + 1024],
        test_nodes=order[num_train + 1024 : num_train + 2048],
    )


def bars(trainer: NodeClassificationTrainer, num: int, warm: int) -> dict[str, Any]:
    """One part after the other, each with the machine for itself: other (sampling, by
    all sampling threads), copy (features, edges and labels on the GPU) and train."""
    loader = trainer.batches
    loader.epoch = 0
    begun = wait()
    sampled = loader.sampled()
    batches = [batch for _, batch in zip(range(num + warm), sampled, strict=False)]
    sampled.close()
    spent = {"other_s": (wait() - begun) * num / len(batches)}
    spent |= {"copy_s": 0.0, "train_s": 0.0}
    losses, nodes = [], 0
    for number, batch in enumerate(batches):
        got = wait()
        there = loader.fetch(batch)
        fetched = wait()
        loss = trainer.step(there)
        done = wait()
        losses.append(float(loss.detach()))
        if number >= warm:
            spent["copy_s"] += fetched - got
            spent["train_s"] += done - fetched
            nodes += len(batch.node_ids)
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
    clock = Clock(trainer.target)
    marks: list[Any] = []
    wall, cpu = 0.0, 0.0
    for number, batch in enumerate(loader):
        if number == warm:
            wall, cpu = wait(), cpu_seconds(process)
        if number >= warm:
            marks.append(clock.mark())
        trainer.step(batch)
        if number >= warm:
            marks.append(clock.mark())
        if number + 1 == warm + num:
            break
    wall = wait() - wall
    cpu = cpu_seconds(process) - cpu
    steps = [clock.ms(*pair) for pair in zip(marks[::2], marks[1::2], strict=True)]
    busy = sum(steps) / 1e3 if torch.cuda.is_available() else None
    return {
        "wall_s": round(wall, 5),
        "batches": len(steps),
        "cpu_percent": round(100 * cpu / wall, 1),
        "gpu_idle_share": None if busy is None else round(max(0, 1 - busy / wall), 4),
    }


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def peak_bytes(*, reset: bool = False) -> int:
    """Peak of PyTorch's CUDA allocator since the last reset; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    if reset:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def plain_loop(
    trainer: NodeClassificationTrainer,
    features: torch.Tensor,
    device: torch.device,
    num: int,
) -> tuple[list[float], float]:
    """A script without a loader: losses of ``num`` batches, then the accuracy of the
    model on four more."""
    losses = []
    for there in plain_batches(trainer, features, device, num):
        losses.append(float(trainer.step(there).detach()))
    trainer.network.eval()
    right, seen = 0, 0
    with torch.no_grad():
        for there in plain_batches(trainer, features, device, 4):
            right += int((trainer.scores(there).argmax(1) == there.y).sum())
            seen += there.num_seeds
    return losses, right / seen


def plain_batches(
    trainer: NodeClassificationTrainer,
    features: torch.Tensor,
    device: torch.device,
    num: int,
) -> Iterator[MiniBatch]:
    """``features[node_ids]`` and whatever a copy of it to the GPU then costs."""
    sampled = trainer.batches.sampled()
    for _, batch in zip(range(num), sampled, strict=False):
        seeds = batch.node_ids[: batch.num_seeds]
        yield MiniBatch(
            x=features[batch.node_ids].to(device),
            y=trainer.dataset.labels[seeds].to(device),
            edge_index=batch.edge_index.to(device),
            num_seeds=batch.num_seeds,
            num_nodes_per_hop=batch.num_nodes_per_hop,
            num_edges_per_hop=batch.num_edges_per_hop,
        )
    sampled.close()
