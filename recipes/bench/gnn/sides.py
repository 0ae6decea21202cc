"""How a trainer is measured: part by part, in whole overlapped runs, and in epochs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pydirect.datasets import NodeDataset
from pydirect.sampling import Graph
from pydirect.train import NodeClassificationTrainer
from recipes.bench.harness.timing import Clock, wait

STAGE_BATCHES = 12
TRIALS = 14
"""The gather's own, which the calling thread has not had."""


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
    clock = Clock(trainer.target)
    marks: list[Any] = []
    wall, cpu = 0.0, 0.0
    for number, batch in enumerate(loader):
        if number == warm:
            wall, cpu = wait(), time.process_time()
        if number >= warm:
            marks.append(clock.mark())
        trainer.step(batch)
        if number >= warm:
            marks.append(clock.mark())
        if number + 1 == warm + num:
            break
    wall = wait() - wall
    cpu = time.process_time() - cpu
    steps = [clock.ms(*pair) for pair in zip(marks[::2], marks[1::2], strict=True)]
    busy = sum(steps) / 1e3 if torch.cuda.is_available() else None
    return {
        "wall_s": round(wall, 5),
        "batches": len(steps),
        "cpu_percent": round(100 * cpu / wall, 1),
        "gpu_idle_share": None if busy is None else round(max(0, 1 - busy / wall), 4),
    }


def epochs(
    trainer: NodeClassificationTrainer, num_epochs: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Seconds of an epoch, and of drawing, copying and training alone, scaled to one.

    clock: seconds, once all work is done.
    """
    seconds = []
    for epoch in range(1 + num_epochs):
        begun = clock()
        trainer.train_epoch(epoch)
        seconds.append(clock() - begun)
    loader = trainer.batches
    begun = clock()
    drawn = [b for _, b in zip(range(STAGE_BATCHES), loader.sampled(), strict=False)]
    drew = clock()
    for turn in range(TRIALS):
        there = loader.fetch(drawn[turn % len(drawn)], 0)
    start = clock()
    for batch in drawn:
        there = loader.fetch(batch, 0)
    copied = clock()
    trainer.step(there)
    warm = clock()
    for _ in drawn:
        trainer.step(there)
    trained = clock()
    scale = len(loader) / len(drawn)
    return {
        "epoch_s": round(statistics.median(seconds[1:]), 4),
        "epochs_s": [round(s, 4) for s in seconds],
        "batches": len(loader),
        "drawing_alone_s": round((drew - begun) * scale, 4),
        "copying_alone_s": round((copied - start) * scale, 4),
        "training_alone_s": round((trained - warm) * scale, 4),
        "rows_a_batch": int(there.x.shape[0]),
    }
