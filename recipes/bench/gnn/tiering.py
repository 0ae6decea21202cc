"""Epochs with hot rows in GPU memory against epochs without, on one GPU and on several.

    python -m recipes.bench gnn.tiering --out OUT.json
    torchrun --nproc-per-node 2 -m recipes.bench gnn.tiering --out OUT.json

Row widths and fan-outs of the dissertation's papers100M and MAG240M (Table 4.1), rows
scaled to the machine. One JSON file; a run adds cells to it: a case, a number of GPUs
and a share of the rows each GPU holds. The stages are timed alone beside the epochs,
and the hit rate beside the best that any choice of as many rows could have had.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pydirect.datasets import NodeDataset, share_dataset
from pydirect.loader import LoaderConfig
from pydirect.memory import pin
from pydirect.ranks import Ranks
from pydirect.sampling import Graph, GraphStatistics, generate_graph
from pydirect.tiering import Score, hit_ratio, score_nodes
from pydirect.train import NodeClassificationTrainer
from recipes.bench.gnn.sides import dataset, epochs
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait

SHARES = (0.0, 0.05, 0.10, 0.25)


@dataclass(frozen=True)
class Case:
    """Rows and a model."""

    name: str
    width: int
    dtype: torch.dtype
    hidden: int
    projected: bool = False
    """A first linear layer in the rows' own precision: wide rows are narrowed before
    neighbours are added up."""


CASES = (
    Case("papers100M, 128 x fp32", 128, torch.float32, hidden=32),
    Case("MAG240M, 768 x fp16", 768, torch.float16, hidden=128, projected=True),
)


class Projected(torch.nn.Module):
    """GraphSAGE behind a linear layer that narrows the rows."""

    def __init__(self, in_channels: int, out_channels: int, hidden: int) -> None:
        super().__init__()
        from torch_geometric.nn import GraphSAGE

        self.narrow = torch.nn.Linear(in_channels, hidden)
        self.rest = GraphSAGE(hidden, hidden, 3, out_channels)

    def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """See `torch_geometric.nn.GraphSAGE`."""
        kind = torch.float16 if x.is_cuda else torch.bfloat16
        with torch.autocast(x.device.type, dtype=kind):
            narrow = self.narrow(x).float()
        out: torch.Tensor = self.rest(narrow, *args, **options)
        return out


def model_of(case: Case) -> Callable[..., torch.nn.Module]:
    """What the trainer calls."""

    def make(in_channels: int, out_channels: int) -> torch.nn.Module:
        if case.projected:
            return Projected(in_channels, out_channels, case.hidden)
        from torch_geometric.nn import GraphSAGE

        net: torch.nn.Module = GraphSAGE(in_channels, case.hidden, 3, out_channels)
        return net

    return make


@dataclass(frozen=True)
class Settings:
    """Of the graph, its batches and the cells.

    cases: by number
    shares: of the rows
    """

    nodes: int = 6_000_000
    edges: int = 90_000_000
    train_nodes: int = 40_000
    fanouts: tuple[int, ...] = (12, 12, 12)
    batch_size: int = 1024
    epochs: int = 3
    max_sms: int = LoaderConfig().max_sms
    cases: tuple[int, ...] = (0, 1)
    shares: tuple[float, ...] = SHARES


class Tiers:
    """Cells of one run."""

    def __init__(self, cells: Cells, settings: Settings, ranks: Ranks) -> None:
        self._cells = cells
        self.settings = settings
        self.ranks = ranks

    def left_s(self) -> float:
        """Seconds of the budget, as the rank that has least."""
        return float(self.ranks.least(int(self._cells.left_s() * 1000)) / 1000)

    def note(self, name: str, **record: Any) -> None:
        """Keep one record; the first rank's."""
        if self.ranks.is_first:
            self._cells.record(name, record)

    def clock(self) -> float:
        """Seconds, when every rank's device has done its work."""
        wait(self.ranks.device)
        self.ranks.wait()
        return time.perf_counter()

    def trainer(
        self, case: Case, data: NodeDataset, share: float
    ) -> NodeClassificationTrainer:
        """A fresh one, with ``share`` of the rows near on each GPU."""
        settings = self.settings
        return NodeClassificationTrainer(
            dataset=data,
            model=model_of(case),
            loader=LoaderConfig(
                batch_size=settings.batch_size,
                fanouts=settings.fanouts,
                sampling="device",
                max_sms=settings.max_sms,
            ),
            fetch="tiered" if share else "direct",
            cache_bytes=int(share * data.features.nbytes) if share else None,
            progress=False,
            device=self.ranks.device.type,
            ranks=self.ranks,
        )

    def epochs(self, case: Case, data: NodeDataset, share: float) -> None:
        """One cell."""
        trainer = self.trainer(case, data, share)
        record = epochs(trainer, self.settings.epochs, self.clock)
        if share:
            table = trainer.tiered_table
            record["near_rows"] = table.num_near
            record["spread_rows"] = table.plan.spread_rows
            record["hit_rate"] = round(table.hit_ratio(), 4)
        self.note(f"{case.name}/{self.ranks.size} GPU/{share}", **record)

    def hit_rates(self, graph: Graph, data: NodeDataset, case: Case) -> None:
        """The scores' hit rates, and the best there are, over one epoch's accesses."""
        trainer = self.trainer(case, data, 0.0)
        counts = torch.zeros(graph.num_nodes, device=self.ranks.device)
        for batch in trainer.batches.sampled():
            counts[batch.node_ids] += 1
        counts = counts.cpu().double()
        found: dict[str, Any] = {}
        for kind in Score:
            begun = time.perf_counter()
            score = score_nodes(
                kind,
                graph,
                data.train_nodes,
                len(self.settings.fanouts),
                device=self.ranks.device,
            )
            found[f"{kind.value}_s"] = round(time.perf_counter() - begun, 3)
            for share in SHARES[1:]:
                rate = hit_ratio(counts, score, share)
                found[f"{kind.value} {share}"] = round(rate, 4)
        for share in SHARES[1:]:
            found[f"best {share}"] = round(hit_ratio(counts, counts, share), 4)
        self.note(f"hit rates/{self.ranks.size} GPU", **found)


def main(bench: Bench, settings: Settings) -> None:
    """Add a case, a number of GPUs, and a share of the rows each holds."""
    warnings.simplefilter("ignore")
    ranks = Ranks.join()
    kept = asdict(settings)
    for name in ("cases", "shares"):
        del kept[name]
    tiers = Tiers(bench.cells(kept), settings, ranks)
    made = None
    if ranks.is_first:
        statistic = GraphStatistics(
            num_nodes=settings.nodes, num_edges=settings.edges, num_classes=20
        )
        made = generate_graph(statistic, seed=0, device=ranks.device)
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    for number in settings.cases:
        case = CASES[number]
        data = None
        if made is not None:
            graph, labels = made
            features = torch.zeros(settings.nodes, case.width, dtype=case.dtype)
            about = 20, settings.train_nodes
            data = dataset(case.name, graph, features, labels, *about)
        shared = share_dataset(ranks, data)
        if ranks.device.type == "cuda":
            # Once for all trainers of the case.
            shared = replace(shared, features=pin(shared.features))
        if number == settings.cases[0]:
            tiers.hit_rates(shared.graph, shared, case)
        for share in settings.shares:
            if tiers.left_s() > 0:
                tiers.epochs(case, shared, share)
        ranks.close()
        del data, shared
