"""Sampled edges a second, by who samples and where the graph lies; GraphSAGE epochs.

    python -m recipes.bench sampling.rates --out OUT.json

One JSON file with a cell a measurement, rewritten after each. The graph has the
statistics of ogbn-products; every system samples the same seeds. The baseline is PyG's
NeighborSampler in one worker where one of its compiled backends is installed, and said
to be missing where none is; our own CPU threads are measured beside it.
"""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pydirect.datasets import fill_features
from pydirect.loader import LoaderConfig, Sampling
from pydirect.memory import empty_table, reach, to_table
from pydirect.sampling import (
    DeviceSampler,
    Graph,
    GraphStatistics,
    NeighborSampler,
    generate_graph,
    settle,
)
from pydirect.sampling.hop import CpuHopper
from pydirect.train import NodeClassificationTrainer
from recipes.bench.gnn.sides import dataset, epochs
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait


@dataclass(frozen=True)
class Settings:
    """Of a run.

    small: toy sizes, for a CPU
    """

    fanouts: tuple[int, ...] = (12, 12, 12)
    train_fanouts: tuple[int, ...] = (15, 10)
    features: int = 100
    batch_size: int = 1024
    batches: int = 20
    epochs: int = 3
    small: bool = False


class Rates:
    """Measurements of one run."""

    def __init__(self, cells: Cells, device: torch.device) -> None:
        self._cells = cells
        self.device = device

    def note(self, name: str, **record: Any) -> None:
        """Keep one record."""
        self._cells.record(name, record)

    def wait(self) -> float:
        """Wall seconds, after the device's work."""
        return wait(self.device)

    def rate(
        self, name: str, sample: Callable[[int], int], num_batches: int, **more: Any
    ) -> None:
        """Edges a second of ``sample(batch)``, which returns the edges it drew."""
        sample(0)
        seconds, edges = [], 0
        for batch in range(num_batches):
            begun = self.wait()
            edges += sample(batch)
            seconds.append(self.wait() - begun)
        self.note(
            name,
            edges_per_s=round(edges / sum(seconds)),
            ms_a_batch=round(statistics.median(seconds) * 1e3, 3),
            edges_a_batch=edges // num_batches,
            **more,
        )


def rates(run: Rates, graph: Graph, settings: Settings) -> None:
    """All systems on one graph."""
    generator = torch.Generator().manual_seed(0)
    seeds = [
        torch.randperm(graph.num_nodes, generator=generator)[: settings.batch_size]
        for _ in range(settings.batches)
    ]
    fanouts = settings.fanouts
    own = NeighborSampler(graph, fanouts)
    few = max(1, min(3, settings.batches))
    torch.set_num_threads(1)
    run.rate(
        "one CPU thread",
        lambda b: int(own.sample(seeds[b], b).edge_index.shape[1]),
        few,
    )
    cores = len(os.sched_getaffinity(0))
    samplers = [NeighborSampler(graph, fanouts) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:

        def together(_: int) -> int:
            parts = [
                pool.submit(s.sample, seeds[i % len(seeds)], i)
                for i, s in enumerate(samplers)
            ]
            return sum(int(p.result().edge_index.shape[1]) for p in parts)

        run.rate("all CPU threads", together, few)
    torch.set_num_threads(cores)
    pyg_worker(run, graph, seeds, fanouts, few)
    weights = torch.rand(graph.num_edges, generator=generator)
    heavy = Graph(offsets=graph.offsets, neighbors=graph.neighbors, weights=weights)
    table = Graph(offsets=graph.offsets, neighbors=to_table(graph.neighbors))
    for name, which, residence in (
        ("device", graph, "device"),
        ("host, pinned", graph, "host"),
        ("host, large pages", table, "host"),
    ):
        there = settle(which, run.device, residence)
        sampler = DeviceSampler(there, fanouts)
        run.rate(
            name,
            lambda b, s=sampler: int(s.sample(seeds[b], 0, b).edge_index.shape[1]),
            settings.batches,
            memory=reach(which.neighbors).value,
        )
        same(run, graph, sampler, seeds[0], fanouts, name)
    for name, again, weighted in (
        ("device, replace", True, False),
        ("device, weighted", False, True),
        ("device, weighted, replace", True, True),
    ):
        there = settle(heavy, run.device, "device", weighted=weighted)
        sampler = DeviceSampler(there, fanouts, replace=again, weighted=weighted)
        run.rate(
            name,
            lambda b, s=sampler: int(s.sample(seeds[b], 0, b).edge_index.shape[1]),
            settings.batches,
        )


def same(
    run: Rates,
    graph: Graph,
    sampler: DeviceSampler,
    seeds: torch.Tensor,
    fanouts: tuple[int, ...],
    name: str,
) -> None:
    """The device's sample is the CPU's."""
    here = DeviceSampler(settle(graph, "cpu"), fanouts, hopper=CpuHopper())
    want = here.sample(seeds[:128], 3, 1)
    got = sampler.sample(seeds[:128], 3, 1)
    equal = torch.equal(got.node_ids.cpu(), want.node_ids) and torch.equal(
        got.edge_index.cpu(), want.edge_index
    )
    run.note(f"{name} equals the CPU's sample", equal=equal)


def pyg_worker(
    run: Rates,
    graph: Graph,
    seeds: list[torch.Tensor],
    fanouts: tuple[int, ...],
    num_batches: int,
) -> None:
    """PyG's own sampler in this process: one worker."""
    try:
        from torch_geometric.data import Data
        from torch_geometric.sampler import NeighborSampler as PygSampler
        from torch_geometric.sampler import NodeSamplerInput

        data = Data(edge_index=graph.to_edge_index(), num_nodes=graph.num_nodes)
        sampler = PygSampler(data, list(fanouts), is_sorted=True)
        sampler.sample_from_nodes(NodeSamplerInput(None, seeds[0][:8]))
    except ImportError as error:
        run.note("one PyG worker", missing=str(error))
        return

    def one(batch: int) -> int:
        out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds[batch]))
        return int(out.row.numel())

    run.rate("one PyG worker", one, num_batches)
    # All of them: what they draw stays with them, and only its size comes here.
    cores = len(os.sched_getaffinity(0))
    loader = torch.utils.data.DataLoader(
        [i % len(seeds) for i in range(2 * cores)],
        batch_size=None,
        num_workers=cores,
        collate_fn=one,
        persistent_workers=True,
    )
    begun = 0.0
    for _ in range(2):  # the first time they start
        begun = time.perf_counter()
        edges = sum(loader)
    seconds = time.perf_counter() - begun
    run.note(
        "all PyG workers",
        edges_per_s=round(edges / seconds),
        ms_a_batch=round(1e3 * seconds / (2 * cores), 3),
        edges_a_batch=edges // (2 * cores),
        workers=cores,
    )


def all_epochs(
    run: Rates, graph: Graph, labels: torch.Tensor, settings: Settings
) -> None:
    """GraphSAGE epochs with each sampler, and the stages alone."""
    import torch_geometric

    statistic = GraphStatistics()
    num_nodes = graph.num_nodes
    features = empty_table((num_nodes, settings.features), torch.float32)
    fill_features(features, labels, seed=0, device=str(run.device), noise=3.0)
    about = statistic.num_classes, round(statistic.train_share * num_nodes)
    data = dataset("products", graph, features, labels, *about)

    def model(in_channels: int, out_channels: int) -> torch.nn.Module:
        return torch_geometric.nn.GraphSAGE(
            in_channels,
            hidden_channels=256,
            num_layers=len(settings.train_fanouts),
            out_channels=out_channels,
        )

    sms = LoaderConfig().max_sms
    ways: list[tuple[Sampling, bool, int | str | None, int]]
    ways = [(Sampling.DEVICE, True, sms, 2), (Sampling.HOST, True, sms, 2)]
    ways += [(Sampling.DEVICE, True, sms, 4), (Sampling.DEVICE, True, 4, 2)]
    ways += [(Sampling.DEVICE, False, sms, 2), (Sampling.THREADS, False, sms, 2)]
    for sampling, capture, max_sms, buffers in ways:
        trainer = NodeClassificationTrainer(
            dataset=data,
            model=model,
            loader=LoaderConfig(
                batch_size=settings.batch_size,
                fanouts=settings.train_fanouts,
                num_samplers=max(1, min(6, (os.cpu_count() or 1) - 3)),
                sampling=sampling,
                max_sms=max_sms,
                num_buffers=buffers,
            ),
            capture=capture,
            progress=False,
            device=str(run.device),
        )
        run.note(
            f"epoch, {sampling.value}{', captured' if capture else ''}"
            f"{'' if max_sms == sms else f', SMs {max_sms}'}"
            f"{'' if buffers == 2 else f', {buffers} buffers'}",
            **epochs(trainer, settings.epochs, run.wait),
        )


def main(bench: Bench, settings: Settings) -> None:
    """Measure all anew."""
    device = bench.device
    sizes = {"num_nodes": 3000, "num_edges": 30_000} if settings.small else {}
    graph, labels = generate_graph(GraphStatistics(**sizes), seed=0, device=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    run = Rates(bench.cells(asdict(settings), anew=True), device)
    run.note("graph", num_nodes=graph.num_nodes, num_edges=graph.num_edges)
    rates(run, graph, settings)
    all_epochs(run, graph, labels, settings)
