#!/usr/bin/env python
"""Figure 4.8: GNN training epochs, PyG's way of fetching features against pydirect.

Both sides run the same sampler, the same model and the same seeds. `pyg` samples in
background threads, then gathers on the CPU, pins, copies and trains in turn, which is
what PyG's loader does; `pyg_overlapped` gives it our pipeline; `pydirect` gathers on
the GPU from host memory, overlapped with training.

    recipes/bench/gnn.py --budget-s 420
    recipes/bench/gnn.py --budget-s 60 --small      # without a GPU: shapes only

The JSON file is rewritten after every case; cases that do not fit the budget are left
out and named in it.
"""

import argparse
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from bench_record import Record
from gnn_sides import bars, has_gpu, limit_memory, overlapped, plain_loop, ratios, sync

import pydirect
from pydirect.datasets import NodeDataset, fill_features
from pydirect.loader import LoaderConfig
from pydirect.memory import empty_table
from pydirect.sampling import Graph, GraphStatistics, generate_graph
from pydirect.train import FetchMode, NodeClassificationTrainer

RESULTS = Path(__file__).parent / "results" / "gnn.json"


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


PRODUCTS = {"num_nodes": 2_449_029, "num_edges": 61_859_140}
SAGE = {"model": "GraphSAGE", "hidden": 256, "fanouts": (15, 10)}
GAT = {"model": "GAT", "hidden": 256, "fanouts": (15, 10)}
CASES = (
    Case(name="feature-bound", num_features=1024, **SAGE, **PRODUCTS),
    Case(name="products", num_features=100, **SAGE, **PRODUCTS),
    Case(name="wiki width", num_features=800, **SAGE, **PRODUCTS),
    Case(name="products GAT", num_features=100, **GAT, **PRODUCTS),
    Case(name="feature-bound GAT", num_features=1024, **GAT, **PRODUCTS),
    Case(
        name="beyond GPU memory",
        num_features=1024,
        num_nodes=6_000_000,
        num_edges=60_000_000,
        memory_given_gib=16.0,
        **SAGE,
    ),
    Case(name="reddit width", num_features=602, **SAGE, **PRODUCTS),
    Case(name="paper width", num_features=128, **SAGE, **PRODUCTS),
    Case(name="twit width", num_features=343, **SAGE, **PRODUCTS),
    Case(name="sk width", num_features=293, **SAGE, **PRODUCTS),
    Case(name="paper width GAT", num_features=128, **GAT, **PRODUCTS),
)


class Tables:
    """Graphs and host memory, made once and shown to every case in its width."""

    def __init__(self, device: torch.device) -> None:
        self._device = str(device)
        self._graphs: dict[tuple[int, int], tuple[Graph, torch.Tensor]] = {}
        self._memory = torch.empty(0)

    def dataset(self, case: Case) -> NodeDataset:
        """Features in pinned host memory: class centre + noise."""
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
        order = torch.randperm(
            case.num_nodes, generator=torch.Generator().manual_seed(1)
        )
        num_train = round(statistics.train_share * case.num_nodes)
        return NodeDataset(
            name=case.name,
            graph=graph,
            features=features,
            labels=labels,
            num_classes=statistics.num_classes,
            train_nodes=order[:num_train],
            valid_nodes=order[num_train : num_train + 1024],
            test_nodes=order[num_train + 1024 : num_train + 2048],
        )

    def _table(self, rows: int, width: int) -> torch.Tensor:
        if self._memory.numel() < rows * width:
            self._memory = torch.empty(0)
            self._memory = empty_table((rows * width,), torch.float32)
        return self._memory[: rows * width].view(rows, width)


def trainer_of(
    case: Case, data: NodeDataset, mode: FetchMode, args: argparse.Namespace
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
        loader=LoaderConfig(
            batch_size=args.batch_size,
            fanouts=case.fanouts,
            num_samplers=args.samplers,
            max_sms=args.max_sms,
        ),
        fetch=mode,
        progress=False,
    )


def compare(case: Case, data: NodeDataset, args: argparse.Namespace) -> dict[str, Any]:
    """Bars and epochs of both sides, and what Figure 4.8 writes on the bars."""
    limit_memory(case.memory_given_gib)
    out: dict[str, Any] = {"case": asdict(case)}
    out["feature_gib"] = round(data.features.nbytes / 2**30, 2)
    plans = (
        ("pyg", FetchMode.STAGED, 1),
        ("pyg_overlapped", FetchMode.STAGED, 2),
        ("pydirect", FetchMode.DIRECT, 2),
    )
    for name, mode, buffers in plans:
        trainer = trainer_of(case, data, mode, args)
        side: dict[str, Any] = {}
        if name != "pyg_overlapped":
            side["bars"] = bars(trainer, args.batches, args.warm)
        if has_gpu():
            torch.cuda.reset_peak_memory_stats()
        side["run"] = overlapped(trainer, buffers, 2 * args.batches, args.warm)
        if has_gpu():
            side["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        out[name] = side
        del trainer
    out["ratios"] = ratios(out, len(data.train_nodes) / args.batch_size)
    limit_memory(None)
    return out


def listing_4_2(data: NodeDataset, args: argparse.Namespace) -> dict[str, Any]:
    """The two changed lines of Listing 4.2 on a plain loop, against Listing 4.1."""
    case = replace(CASES[0], hidden=64)
    device = torch.device("cuda" if has_gpu() else "cpu")
    out: dict[str, Any] = {"feature_gib": round(data.features.nbytes / 2**30, 2)}
    for name in ("listing_4_1", "listing_4_2"):
        trainer = trainer_of(case, data, FetchMode.STAGED, args)
        features = data.features
        if name == "listing_4_2":
            # In place: a copy (`.to("unified")`) would hold the table twice.
            features = pydirect.unify(data.features)
        if has_gpu():
            torch.cuda.reset_peak_memory_stats()
        begun = sync()
        out[name] = {"losses": list(plain_loop(trainer, features, device, 10))}
        out[name]["seconds"] = round(sync() - begun, 4)
        if has_gpu():
            out[name]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    out["gathers"] = pydirect.counters().gathers
    pairs = zip(out["listing_4_1"]["losses"], out["listing_4_2"]["losses"], strict=True)
    out["largest_loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return out


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=420.0)
    parser.add_argument("--batches", type=int, default=30, help="timed, a bar")
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1024)
    cores = os.cpu_count() or 1
    parser.add_argument("--samplers", type=int, default=max(1, min(12, cores - 3)))
    parser.add_argument("--max-sms", type=int, default=None)
    parser.add_argument("--small", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def shrink(case: Case) -> Case:
    return replace(case, num_nodes=5000, num_edges=40_000, hidden=16)


def main() -> None:
    args = parse()
    cases = [c for c in CASES if not args.only or c.name in args.only]
    if args.small:
        cases = [shrink(case) for case in cases]
        args.batch_size = min(args.batch_size, 64)
        args.batches, args.warm = 2, 1
    tables = Tables(torch.device("cuda" if has_gpu() else "cpu"))
    record = Record(args.out, args.budget_s)
    record.note("torch_geometric", torch_geometric.__version__)
    record.note("arguments", {k: str(v) for k, v in vars(args).items()})
    longest = 0.0
    for number, case in enumerate(cases):
        if record.left_s() < 1.3 * longest:
            record.note("left_out", [c.name for c in cases[number:]])
            break
        started = record.left_s()
        data = tables.dataset(case)
        if number == 0:
            record.note("listing_4_2", listing_4_2(data, args))
        record.add(compare(case, data, args))
        if number > 0:
            # The first builds the graph and pins the memory: the others are shorter.
            longest = max(longest, started - record.left_s())


if __name__ == "__main__":
    main()
