"""Figure 4.8: GNN training epochs, PyG's way of fetching features against pydirect.

Both sides run the same sampler, the same model and the same seeds. `pyg` samples in
background threads, then gathers on the CPU, pins, copies and trains in turn, which is
what PyG's loader does; `pyg_overlapped` gives it our pipeline; `pydirect` gathers on
the GPU from host memory, overlapped with training.

    python -m recipes.bench gnn.epochs --budget-s 150
    python -m recipes.bench gnn.epochs --budget-s 60 --small  # without a GPU: shapes

The JSON file is rewritten after every side of every case, a rerun goes on, and a side
that fails is recorded as such.
"""

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch_geometric

from pydirect.datasets import NodeDataset, fill_features
from pydirect.loader import LoaderConfig
from pydirect.memory import empty_table, reach
from pydirect.sampling import Graph, GraphStatistics, generate_graph
from pydirect.train import FetchMode, NodeClassificationTrainer
from recipes.bench.gnn.sides import bars, dataset, overlapped
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import Peak


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pair of bars."""

    name: str
    model: str
    num_features: int
    fanouts: tuple[int, ...]
    hidden: int
    num_nodes: int
    num_edges: int


PRODUCTS: dict[str, Any] = {"num_nodes": 2_449_029, "num_edges": 61_859_140}
SAGE: dict[str, Any] = {"model": "GraphSAGE", "hidden": 256, "fanouts": (15, 10)}
GAT: dict[str, Any] = {"model": "GAT", "hidden": 256, "fanouts": (15, 10)}
CASES = (
    Case(name="feature-bound", num_features=1024, **SAGE, **PRODUCTS),
    Case(name="products GAT", num_features=100, **GAT, **PRODUCTS),
    Case(name="products", num_features=100, **SAGE, **PRODUCTS),
    Case(name="feature-bound GAT", num_features=1024, **GAT, **PRODUCTS),
)
SIDES = {
    "pyg": (FetchMode.STAGED, 1),
    "pydirect": (FetchMode.DIRECT, 2),
    "pyg_overlapped": (FetchMode.STAGED, 2),
}


class Tables:
    """Graphs and host memory, made once and shown to every case in its width."""

    def __init__(self, device: torch.device) -> None:
        self._device = str(device)
        self._graphs: dict[tuple[int, int], tuple[Graph, torch.Tensor]] = {}
        self._memory = torch.empty(0)

    def dataset(self, case: Case) -> NodeDataset:
        """Features in host memory: class centre + noise."""
        sizes = (case.num_nodes, case.num_edges)
        statistics = GraphStatistics(num_nodes=sizes[0], num_edges=sizes[1])
        if sizes not in self._graphs:
            self._graphs.clear()
            self._graphs[sizes] = generate_graph(
                statistics, seed=0, device=self._device
            )
            if self._device != "cpu":
                torch.cuda.empty_cache()
        graph, labels = self._graphs[sizes]
        features = self._table(case.num_nodes, case.num_features)
        fill_features(features, labels, seed=0, device=self._device, noise=3.0)
        num_train = round(statistics.train_share * case.num_nodes)
        about = statistics.num_classes, num_train
        return dataset(case.name, graph, features, labels, *about)

    def _table(self, rows: int, width: int) -> torch.Tensor:
        if self._memory.numel() < rows * width:
            self._memory = torch.empty(0)
            self._memory = empty_table((rows * width,), torch.float32)
        return self._memory[: rows * width].view(rows, width)


@dataclass(frozen=True)
class Settings:
    """Of batches, and how many of them.

    batches: timed, a bar
    small: toy sizes, for a CPU
    """

    batches: int = 20
    warm: int = 4
    batch_size: int = 1024
    samplers: int = max(1, min(6, (os.cpu_count() or 1) - 3))
    max_sms: int = LoaderConfig().max_sms
    small: bool = False


def trainer_of(
    case: Case, data: NodeDataset, loader: LoaderConfig, fetch: FetchMode
) -> NodeClassificationTrainer:
    """A fresh trainer: same seed, so both sides start from the same weights."""
    kind = getattr(torch_geometric.nn, case.model)
    extra = {"heads": 4} if case.model == "GAT" else {}

    def model(in_channels: int, out_channels: int) -> torch.nn.Module:
        return kind(
            in_channels,
            hidden_channels=case.hidden,
            num_layers=len(case.fanouts),
            out_channels=out_channels,
            **extra,
        )

    return NodeClassificationTrainer(
        dataset=data,
        model=model,
        loader=loader,
        fetch=fetch,
        progress=False,
    )


def side(
    case: Case, data: NodeDataset, name: str, settings: Settings
) -> dict[str, Any]:
    """One side of a case: its bars, then a run as a user sees it."""
    mode, buffers = SIDES[name]
    loader = LoaderConfig(
        batch_size=settings.batch_size,
        fanouts=case.fanouts,
        num_samplers=settings.samplers,
        max_sms=settings.max_sms,
    )
    trainer = trainer_of(case, data, loader, mode)
    found: dict[str, Any] = {
        "case": asdict(case),
        "feature_gib": round(data.features.nbytes / 2**30, 3),
        "memory": reach(data.features).value,
        "batches_an_epoch": round(len(data.train_nodes) / settings.batch_size, 2),
    }
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    memory = Peak(trainer.target)
    if name != "pyg_overlapped":
        found["bars"] = bars(trainer, settings.batches, settings.warm)
    found["run"] = overlapped(trainer, buffers, 2 * settings.batches, settings.warm)
    found["peak_gib"] = round((memory.base + memory.most) / 2**30, 3)
    return found


def main(bench: Bench, settings: Settings) -> None:
    """Run the cases that are missing; `--only` takes their names."""
    cases = [c for c in CASES if not bench.only or c.name in bench.only]
    bench.only = ()  # of cases, not of cells
    if settings.small:
        few = {"num_nodes": 5000, "num_edges": 40_000, "hidden": 16}
        cases = [replace(case, **few) for case in cases]
        rows = min(settings.batch_size, 64)
        settings = replace(settings, batch_size=rows, batches=2, warm=1)
    cells = bench.cells(asdict(settings))
    tables = Tables(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for case in cases:
        missing = [name for name in SIDES if cells.is_wanted(f"{case.name}/{name}")]
        if not missing:
            continue
        data = tables.dataset(case)
        for name in missing:
            cells.run(f"{case.name}/{name}", side, case, data, name, settings)
