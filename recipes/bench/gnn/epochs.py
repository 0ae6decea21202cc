#!/usr/bin/env python
"""Figure 4.8: GNN training epochs, PyG's way of fetching features against pydirect.

Both sides run the same sampler, the same model and the same seeds. `pyg` samples in
background threads, then gathers on the CPU, pins, copies and trains in turn, which is
what PyG's loader does; `pyg_overlapped` gives it our pipeline; `pydirect` gathers on
the GPU from host memory, overlapped with training.

    python -m recipes.bench gnn.epochs --budget-s 150
    python -m recipes.bench gnn.epochs --budget-s 60 --small  # without a GPU: shapes

The JSON file is rewritten after every side of every case, a rerun goes on, and a side
that fails is recorded as such. `gnn_table.py` prints it.
"""

import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch_geometric

import pydirect
from pydirect.datasets import NodeDataset, fill_features
from pydirect.loader import LoaderConfig
from pydirect.memory import empty_table, reach
from pydirect.sampling import Graph, GraphStatistics, generate_graph
from pydirect.train import FetchMode, NodeClassificationTrainer
from recipes.bench.gnn.sides import bars, dataset, overlapped, peak_bytes, plain_loop
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait


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
    memory_given_gib: float | None = None
    """What the GPU's allocator may take; None: all of it."""


PRODUCTS: dict[str, Any] = {"num_nodes": 2_449_029, "num_edges": 61_859_140}
SAGE: dict[str, Any] = {"model": "GraphSAGE", "hidden": 256, "fanouts": (15, 10)}
GAT: dict[str, Any] = {"model": "GAT", "hidden": 256, "fanouts": (15, 10)}
CASES = (
    Case(name="feature-bound", num_features=1024, **SAGE, **PRODUCTS),
    Case(name="products GAT", num_features=100, **GAT, **PRODUCTS),
    Case(name="products", num_features=100, **SAGE, **PRODUCTS),
    Case(name="feature-bound GAT", num_features=1024, **GAT, **PRODUCTS),
    Case(name="wiki width", num_features=800, **SAGE, **PRODUCTS),
    Case(name="reddit width", num_features=602, **SAGE, **PRODUCTS),
    Case(name="paper width", num_features=128, **SAGE, **PRODUCTS),
    Case(
        name="beyond GPU memory",
        num_features=1024,
        num_nodes=6_000_000,
        num_edges=60_000_000,
        memory_given_gib=16.0,
        **SAGE,
    ),
    Case(name="twit width", num_features=343, **SAGE, **PRODUCTS),
    Case(name="sk width", num_features=293, **SAGE, **PRODUCTS),
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
        self.seconds: dict[str, float] = {}
        """What making the last data set took."""

    def dataset(self, case: Case) -> NodeDataset:
        """Features in host memory: class centre + noise."""
        begun = time.monotonic()
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
        made = time.monotonic()
        features = self._table(case.num_nodes, case.num_features)
        fill_features(features, labels, seed=0, device=self._device, noise=3.0)
        self.seconds = {
            "graph_s": round(made - begun, 2),
            "features_s": round(time.monotonic() - made, 2),
        }
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
    case: Case, data: NodeDataset, mode: FetchMode, settings: Settings
) -> NodeClassificationTrainer:
    """A fresh trainer: same seed, so both sides start from the same weights."""
    kind = getattr(torch_geometric.nn, case.model)
    given, cuda = case.memory_given_gib, torch.cuda.is_available()
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
        loader=LoaderConfig(
            batch_size=settings.batch_size,
            fanouts=case.fanouts,
            num_samplers=settings.samplers,
            max_sms=settings.max_sms,
        ),
        device_bytes=int(given * 2**30) if given and cuda else None,
        fetch=mode,
        progress=False,
    )


def side(
    case: Case, data: NodeDataset, name: str, settings: Settings
) -> dict[str, Any]:
    """One side of a case: its bars, then a run as a user sees it."""
    mode, buffers = SIDES[name]
    trainer = trainer_of(case, data, mode, settings)
    found: dict[str, Any] = {
        "case": asdict(case),
        "feature_gib": round(data.features.nbytes / 2**30, 3),
        "memory": reach(data.features).value,
        "batches_an_epoch": round(len(data.train_nodes) / settings.batch_size, 2),
    }
    peak_bytes(reset=True)
    if name != "pyg_overlapped":
        found["bars"] = bars(trainer, settings.batches, settings.warm)
    found["run"] = overlapped(trainer, buffers, 2 * settings.batches, settings.warm)
    found["peak_gib"] = round(peak_bytes() / 2**30, 3)
    return found


def listing_4_2(data: NodeDataset, settings: Settings) -> dict[str, Any]:
    """The two changed lines of Listing 4.2 on a plain loop, against Listing 4.1; twice,
    since the GPU's atomics make even the same script differ from run to run."""
    case = replace(CASES[0], hidden=64)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out: dict[str, Any] = {"feature_gib": round(data.features.nbytes / 2**30, 3)}
    pydirect.enable()
    before = pydirect.counters().gathers
    for name in ("listing_4_1", "listing_4_1_again", "listing_4_2"):
        trainer = trainer_of(case, data, FetchMode.STAGED, settings)
        features = data.features
        if name == "listing_4_2":
            # In place: a copy (`.to("unified")`) would hold the table twice.
            features = pydirect.unify(data.features)
        peak_bytes(reset=True)
        begun = wait()
        losses, accuracy = plain_loop(trainer, features, device, settings.batches)
        out[name] = {
            "losses": losses,
            "accuracy": accuracy,
            "seconds": round(wait() - begun, 4),
            "peak_gib": round(peak_bytes() / 2**30, 3),
        }
    out["gathers"] = pydirect.counters().gathers - before
    for name in ("listing_4_1_again", "listing_4_2"):
        pairs = zip(out["listing_4_1"]["losses"], out[name]["losses"], strict=True)
        out[name]["largest_loss_difference"] = max(
            abs(a - b) / abs(b) for a, b in pairs
        )
    return out


def shrink(case: Case) -> Case:
    return replace(case, num_nodes=5000, num_edges=40_000, hidden=16)


def run_case(
    cells: Cells,
    tables: Tables,
    case: Case,
    settings: Settings,
    *,
    with_listing: bool,
) -> None:
    """All sides of one case; what goes wrong with its data is a cell too."""
    made: list[NodeDataset] = []

    def prepare() -> dict[str, Any]:
        made.append(tables.dataset(case))
        return dict(tables.seconds)

    cells.data["cells"].pop(f"{case.name}/data", None)
    cells.run(f"{case.name}/data", prepare)
    if not made:
        return
    for name in SIDES:
        cells.run(f"{case.name}/{name}", side, case, made[0], name, settings)
        if torch.cuda.is_available():  # the next case may have all of it
            torch.cuda.set_per_process_memory_fraction(1.0)
    if with_listing:
        cells.run("listing 4.2", lambda: listing_4_2(made[0], settings))


def main(bench: Bench, settings: Settings) -> None:
    """Run the cases that are missing; `--only` takes their names."""
    cases = [c for c in CASES if not bench.only or c.name in bench.only]
    bench.only = ()  # of cases, not of cells
    if settings.small:
        cases = [shrink(case) for case in cases]
        few = min(settings.batch_size, 64)
        settings = replace(settings, batch_size=few, batches=2, warm=1)
    cells = bench.cells(asdict(settings))
    cells.data["environment"]["versions"]["torch-geometric"] = (
        torch_geometric.__version__
    )
    deadline = time.monotonic() + bench.budget_s
    tables = Tables(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    longest = 0.0
    for number, case in enumerate(cases):
        names = [f"{case.name}/{name}" for name in SIDES]
        begun = time.monotonic()
        if all(name in cells for name in names):
            continue
        if begun + 1.2 * longest > deadline:
            break
        run_case(cells, tables, case, settings, with_listing=number == 0)
        if number > 0:
            # The first builds the graph and its memory: the others are shorter.
            longest = max(longest, time.monotonic() - begun)
    cells.data["left_out"] = [
        c.name for c in cases if f"{c.name}/pydirect" not in cells
    ]
    cells.save()
