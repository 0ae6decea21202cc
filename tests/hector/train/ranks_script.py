"""Two ranks of `test_ranks`: what each finds goes to a file of its own."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hector.capture import CapturedBatches
from hector.graph import HeteroGraph
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.sampling import Drawn, NeighborSampler, SampledBatch, sampled_subgraph
from hector.train import (
    DataConfig,
    ModelConfig,
    NodeClassificationTrainer,
    OptimizerConfig,
    RunConfig,
)
from pydirect.features import FeatureRows
from tests.ranks import leave

SIZES, RELATIONS = (20, 30, 10), 6
NODES = sum(SIZES)
METADATA = (
    ["a", "b", "c"],
    [("a", "r", "b"), ("b", "s", "a"), ("b", "t", "c"), ("c", "u", "c")],
)


def whole() -> HeteroGraph:
    """No edge into the nodes of the first type but from the second: what a seed of the
    last type reaches lacks types and relations."""
    made = torch.Generator().manual_seed(0)
    sizes = dict(zip(METADATA[0], SIZES, strict=True))
    edges = {
        kind: torch.stack(
            [torch.randint(sizes[t], (40,), generator=made) for t in (kind[0], kind[2])]
        )
        for kind in METADATA[1]
    }
    return HeteroGraph.from_dicts(sizes, edges, METADATA)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = (
            HGTConv(4, 4, METADATA, heads=2)
            if kind == "hgt"
            else {"rgcn": RGCNConv, "rgat": RGATConv}[kind](4, 4, len(METADATA[1]))
            for _ in range(2)
        )
        made = torch.Generator().manual_seed(1)
        self.register_buffer("x", torch.randn(NODES, 4, generator=made))

    def forward(self, batch: SampledBatch) -> Tensor:
        x = self.second(self.first(self.x[batch.node_ids], batch.graph), batch.graph)
        return x[batch.seeds].square().sum()  # type: ignore[no-any-return]


def draws(graph: HeteroGraph) -> list[list[Drawn]]:
    """For each step what each rank gets: all types; the last type alone; nothing."""
    made = torch.Generator().manual_seed(2)
    sampler = NeighborSampler(graph, [3, 3])
    seeds = [[[1, 25, 51], [52, 58]], [[3, 30], []], [[55], [2, 40]]]
    return [
        [sampler.draw(torch.tensor(s, dtype=torch.int64), made) for s in step]
        for step in seeds
    ]


def batch_of(graph: HeteroGraph, drawn: Drawn) -> SampledBatch:
    made = sampled_subgraph(graph, drawn.node_ids, drawn.edge_ids)
    return SampledBatch(made, drawn.node_ids, drawn.seeds, drawn.edge_ids)


def steps(kind: str, rank: int | None, captured: bool) -> list[list[float]]:
    """Losses and weights of training on both ranks' batches: by this rank with the
    other (`rank`), or by one process that adds up gradients."""
    torch.manual_seed(3)
    model, graph = Model(kind).double(), whole()
    # RGAT has parameters that its default attention does not use, as PyG's has.
    unused = kind == "rgat"
    parallel: nn.Module = model
    if rank is not None:
        parallel = DistributedDataParallel(model, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: list[float] = []

    def backward(batch: SampledBatch) -> Tensor:
        loss = parallel(batch)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    batches = CapturedBatches(backward, graph)
    for step in draws(graph):
        optimizer.zero_grad()
        for i, drawn in enumerate(step):
            if rank in (None, i):
                batch = batch_of(graph, drawn)
                loss = batches(drawn) if captured else backward(batch)
                losses.append(float(loss))
        if rank is None:
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad / 2
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return [losses, weights.tolist()]


def make(directory: Path, epochs: int = 4, **options: Any) -> NodeClassificationTrainer:
    return NodeClassificationTrainer(
        model=ModelConfig(layer="rgat", hidden_channels=8),
        data=DataConfig(name="aifb", scale=0.02, num_labelled=60),
        optimizer=OptimizerConfig(learning_rate=0.05),
        epochs=epochs,
        run=RunConfig(
            device="cpu",
            progress=False,
            dtype="float64",
            output_directory=str(directory),
            checkpoint_epochs=2,
        ),
        **options,
    )


def stopped(directory: Path) -> NodeClassificationTrainer:
    """A trainer that finds a checkpoint of half of the small batches' epochs."""
    trainer = make(directory, **TRAININGS["small batches"])
    step, calls = trainer.ranks.seed, []

    def seed(*facts: int, own: bool) -> None:
        calls.append(facts)
        if facts[1] == 2:
            raise KeyboardInterrupt
        step(*facts, own=own)

    object.__setattr__(trainer.ranks, "seed", seed)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    distributed.barrier()
    return make(directory, **TRAININGS["small batches"])


TRAININGS: dict[str, dict[str, Any]] = {
    "full": {},
    "one batch": {"batch": 1000, "fanouts": (-1, -1)},
    # The last batch has one node: the second rank has none.
    "small batches": {"batch": 47, "fanouts": (2, 2), "fanouts_of": "relation"},
}
KINDS = ("rgcn", "rgat", "hgt")


def main(directory: Path) -> None:
    distributed.init_process_group("gloo")
    rank, found = distributed.get_rank(), {}
    for kind in KINDS:
        for captured in (False, True):
            found[f"{kind} {captured}"] = steps(kind, rank, captured)
    for name, options in TRAININGS.items():
        out = directory / name
        found[name] = make(out, **options).train().losses
    for place in ("device", "peers"):
        kept = 400 if place == "peers" else None
        rows = FeatureRows("random", place, width=5, cache_bytes=kept)
        found[place] = make(directory / place, features=rows).train().losses
    found["resumed"] = stopped(directory / "resumed").train().losses
    (directory / f"{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
