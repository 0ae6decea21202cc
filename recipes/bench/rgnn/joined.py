"""An epoch of RGAT with pydirect's rows, by place, against its longest stage.

    python -m recipes.bench rgnn.joined --budget-s 100 --out joined.json

A graph of ogbn-mag's sizes with its edges both ways, 1,024 seeds a batch, fanouts 15
and 10: what `ssdtrain train gnn=rgat features.place=... trainer.batch=1024
trainer.capture=true` does in an epoch, without the test on the whole graph. Stages
alone: draw, gather, step, of the same batches. Losses of all places are compared.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from hector.capture import CapturedBatches, CapturedSampler
from hector.datasets.task import NodeClassification
from hector.sampling import NeighborSampler
from hector.train import (
    ModelConfig,
    NodeClassificationTrainer,
    OptimizerConfig,
    RunConfig,
)
from hector.train.mini_batches import MiniBatches
from hector.train.steps import Steps
from pydirect.features import FeatureRows
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait
from recipes.bench.rgnn.mag import CLASSES, FANOUTS, SEEDS, WIDTH, mag_graph

PLACES = ("direct", "tiered", "device")
EPOCHS, STAGE_BATCHES = 4, 24


def task_of(device: torch.device, shrink: int, num_batches: int) -> NodeClassification:
    """Papers of a graph of ogbn-mag's sizes; so many batches of them are trained on."""
    graph = mag_graph(device, shrink)
    seeds = max(8, SEEDS // shrink) * num_batches
    papers = graph.node_type_offsets[1]
    drawn = torch.randperm(papers, generator=torch.Generator().manual_seed(0))
    nodes = drawn[:seeds].to(device)
    return NodeClassification(
        name="mag",
        graph=graph,
        num_classes=CLASSES,
        train_nodes=nodes,
        train_labels=nodes % CLASSES,
        test_nodes=nodes[:1],
        test_labels=nodes[:1] % CLASSES,
    )


class Joined:
    """One model and its rows, from the trainer's own parts."""

    def __init__(
        self, task: NodeClassification, place: str, share: float, seeds: int
    ) -> None:
        """share: of the rows, in GPU memory where the place is tiered."""
        self.task, self.seeds, self.device = task, seeds, task.graph.device
        cuda = capture = self.device.type == "cuda"
        cache = int(share * task.graph.num_nodes * WIDTH * 4)
        trainer = NodeClassificationTrainer(
            model=ModelConfig(layer="rgat", hidden_channels=WIDTH),
            data=self.task,
            optimizer=OptimizerConfig(),
            run=RunConfig(device=self.device.type, progress=False),
            batch=self.seeds,
            fanouts=FANOUTS,
            capture=capture,
            features=FeatureRows(
                "random",
                place,
                width=WIDTH,
                cache_bytes=cache if place == "tiered" else None,
            ),
        )
        self.model = trainer.build_model(self.task, 0)
        adam = torch.optim.Adam(
            self.model.parameters(), capturable=cuda, fused=cuda or None
        )
        self.steps = Steps(self.model, adam, self.task)
        self.sampler = NeighborSampler(self.task.graph, FANOUTS)
        self._batches = MiniBatches(
            self.steps,
            self.sampler,
            batch=self.seeds,
            ranks=trainer.ranks,
            gathered=self.model.gathered,
            capture=capture,
        )

    def epoch(self, number: int) -> tuple[float, float]:
        """Seconds and the mean loss."""
        torch.manual_seed(number)
        begun = wait(self.device)
        loss = float(self._batches.epoch(lambda: None)[0])
        return wait(self.device) - begun, loss

    def stages(self) -> dict[str, float]:
        """Milliseconds a batch of each stage alone."""
        draws = CapturedSampler(self.sampler, self.seeds)
        batches = CapturedBatches(self.steps.mini_batch, self.task.graph)
        generator = torch.Generator(self.device).manual_seed(0)
        parts = self.task.train_nodes.split(self.seeds)[:STAGE_BATCHES]
        goals = self.task.train_labels.split(self.seeds)[:STAGE_BATCHES]

        def each(calls: list[Callable[[], Any]]) -> tuple[float, list[Any]]:
            found = [call() for call in calls]  # the first time, or captured
            begun = wait(self.device)
            for call in calls:
                call()
            ms = 1e3 * (wait(self.device) - begun) / len(calls)
            return round(ms, 3), found

        draw_ms, found = each([lambda p=p: draws.draw(p, generator) for p in parts])
        gather_ms, rows = each(
            [lambda f=f: self.model.gathered(f.node_ids) for f in found]
        )
        train = zip(found, goals, rows, strict=True)
        step_ms, _ = each(
            [lambda f=f, g=g, r=r: batches(f, g, rows=r) for f, g, r in train]
        )
        return {"draw_ms": draw_ms, "gather_ms": gather_ms, "step_ms": step_ms}


def cell(
    task: NodeClassification, place: str, share: float, seeds: int
) -> dict[str, Any]:
    """Epochs and stages of a place."""
    joined = Joined(task, place, share, seeds)
    runs = [joined.epoch(number) for number in range(EPOCHS)]
    epoch_s = median(seconds for seconds, _ in runs[1:])
    stages = joined.stages()
    num_batches = len(joined.task.train_nodes.split(joined.seeds))
    longest_s = max(stages.values()) * num_batches / 1e3
    return {
        "epoch_s": round(epoch_s, 4),
        "epochs_s": [round(seconds, 4) for seconds, _ in runs],
        "losses": [loss for _, loss in runs],
        "batches": num_batches,
        **stages,
        "over_longest_stage": round(epoch_s / longest_s, 3),
    }


def main(
    bench: Bench,
    *,
    shrink: int = 1,
    batches: int = 96,
    share: float = 0.1,
    places: tuple[str, ...] = tuple(PLACES),
) -> int:
    """A cell for each place; 1 if a loss differs between places.

    Args:
        shrink: divide the sizes: a trial on a CPU
        batches: of an epoch
        share: of rows near, in the tiered cell
    """
    cells = bench.cells({"shrink": shrink, "batches": batches, "share": share})
    task, seeds = task_of(bench.device, shrink, batches), max(8, SEEDS // shrink)
    for place in places:
        cells.run(place, cell, task, place, share, seeds, limit_s=80)
    losses = [c["losses"] for c in cells.data["cells"].values() if "losses" in c]
    return int(any(one != losses[0] for one in losses))
