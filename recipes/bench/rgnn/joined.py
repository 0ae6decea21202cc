"""An epoch of RGAT with pydirect's rows, by place, against its longest stage.

    python -m recipes.bench rgnn.joined --budget-s 100 --out joined.json

A graph of ogbn-mag's sizes with its edges both ways, 1,024 seeds a batch, fanouts 15
and 10: what `ssdtrain train gnn=rgat features.place=... trainer.batch=1024
trainer.capture=true` does in an epoch, without the test on the whole graph. Stages
alone: draw, gather, step, of the same batches. Losses of all places are compared.
`pyg` and `pyg captured`: PyG's layers with our draws and rows, `direct`.
"""

import itertools
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hector.capture import CapturedBatches, CapturedSampler
from hector.datasets.task import NodeClassification
from hector.graph import HeteroGraph, sampled_subgraph
from hector.sampling import Drawn, NeighborSampler, SampledBatch
from hector.train import (
    LayerSpec,
    ModelConfig,
    NodeClassificationTrainer,
    OptimizerConfig,
    RunConfig,
)
from hector.train.mini_batches import MiniBatches
from hector.train.model import compiled_layer
from hector.train.steps import Steps
from pydirect.features import FeatureRows
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait
from recipes.bench.rgnn.mag import CLASSES, FANOUTS, SEEDS, WIDTH, mag_graph
from recipes.bench.rgnn.pyg import pyg_conv

PLACES = ("direct", "tiered", "device")
PYG = ("pyg", "pyg captured")
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


class PygLayer(nn.Module):
    """PyG's layer, on whatever graph it is called with."""

    def __init__(self, spec: LayerSpec, graph: HeteroGraph) -> None:
        super().__init__()
        self.conv = pyg_conv(spec, graph)

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        ends = torch.stack([graph.src, graph.dst])
        out: Tensor = self.conv(x, ends, graph.edge_type)
        return out


class Joined:
    """One model and its rows, from the trainer's own parts."""

    def __init__(
        self,
        task: NodeClassification,
        side: str,
        share: float,
        seeds: int,
        max_sms: int | None,
    ) -> None:
        """side: a place, or one of `PYG`; share: of the rows, in GPU memory where the
        place is tiered."""
        self.task, self.seeds, self.device = task, seeds, task.graph.device
        cuda = self.device.type == "cuda"
        # What a captured step needs of PyG's layers it may not have.
        self.capture = capture = cuda and side != "pyg"
        place = "direct" if side in PYG else side
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
                max_sms=max_sms,
            ),
            make_layer=PygLayer if side in PYG else compiled_layer,
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
        graph = self.task.graph
        batches = CapturedBatches(self.steps.mini_batch, graph)
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

        def step(f: Drawn, goal: Tensor, r: tuple[Tensor, ...]) -> object:
            if self.capture or graph.device.type != "cuda":
                return batches(f, goal, rows=r)
            made = sampled_subgraph(graph, f.node_ids, f.edge_ids)
            batch = SampledBatch(made, f.node_ids, f.seeds, f.edge_ids)
            return self.steps.mini_batch(batch, goal, *r)

        train = zip(found, goals, rows, strict=True)
        step_ms, _ = each([partial(step, *each) for each in train])
        return {"draw_ms": draw_ms, "gather_ms": gather_ms, "step_ms": step_ms}


def cell(
    task: NodeClassification, side: str, share: float, seeds: int, max_sms: int | None
) -> dict[str, Any]:
    """Epochs and stages of a place, or of PyG's layers."""
    joined = Joined(task, side, share, seeds, max_sms)
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
    places: tuple[str, ...] = (*PLACES, *PYG),
    max_sms: tuple[int, ...] = (16,),
) -> int:
    """A cell for each place and budget; 1 if a loss differs between places.

    Args:
        shrink: divide the sizes: a trial on a CPU
        batches: of an epoch
        share: of rows near, in the tiered cell
        max_sms: multiprocessors of a gather; 0: the gather decides
    """
    cells = bench.cells({"shrink": shrink, "batches": batches, "share": share})
    task, seeds = task_of(bench.device, shrink, batches), max(8, SEEDS // shrink)
    for place, sms in itertools.product(places, max_sms):
        first = sms == max_sms[0]
        if not first and place not in ("direct", "tiered"):
            continue  # no rows of host memory, or PyG's
        name = place if first else f"{place}, {sms} SMs"
        cells.run(name, cell, task, place, share, seeds, sms or None, limit_s=80)
    found = {n: c["losses"] for n, c in cells.data["cells"].items() if "losses" in c}
    ours = [losses for name, losses in found.items() if not name.startswith("pyg")]
    return int(any(one != ours[0] for one in ours))
