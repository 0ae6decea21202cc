"""Mini-batches of ogbn-mag's sizes, and PyG's way of training on them.

[Note: PyG's prefetched batches] `PrefetchLoader` copies a batch on a stream of its own
and drops the batch before while kernels that read it wait on another: a step that never
synchronizes runs ahead, and copies land in memory that is still read (RGAT died of
indices out of range; RGCN's loop over relations synchronizes). `Prefetched` tells the
allocator which stream reads.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.graph import HeteroGraph
from hector.train import LayerSpec
from recipes.bench.harness.timing import wait
from recipes.bench.rgnn.pyg import layer_spec, pyg_conv, relations

WIDTH, SEEDS, FANOUTS, CLASSES = 64, 1024, (15, 10), 16
MAG_NODES = (736_389, 1_134_649, 8_740, 59_965)
MAG_EDGES = ((1, 2, 1_043_998), (1, 0, 7_145_660), (0, 0, 5_416_271), (0, 3, 7_505_078))
"""ogbn-mag's: source type, target type, edges."""


def mag_graph(device: torch.device, shrink: int = 1) -> HeteroGraph:
    """A graph of ogbn-mag's sizes with its edges both ways, uniform ends; `shrink`
    divides the published sizes: a trial on a CPU."""
    nodes = [max(n // shrink, 64) for n in MAG_NODES]
    gen = torch.Generator(device).manual_seed(0)
    first = [sum(nodes[:t]) for t in range(5)]
    src, dst, kind, names = [], [], [], []
    for i, (a, b, num) in enumerate(MAG_EDGES):
        size = (max(num // shrink, 64),)
        ends = [
            torch.randint(nodes[t], size, generator=gen, device=device) + first[t]
            for t in (a, b)
        ]
        for turn in range(2):
            src.append(ends[turn])
            dst.append(ends[1 - turn])
            kind.append(torch.full(size, 2 * i + turn, device=device))
        names += [(f"n{a}", f"r{2 * i}", f"n{b}"), (f"n{b}", f"r{2 * i + 1}", f"n{a}")]
    types = torch.arange(4).repeat_interleave(torch.tensor(nodes)).to(device)
    graph = HeteroGraph.from_arrays(
        torch.cat(src), torch.cat(dst), torch.cat(kind), node_type=types
    )
    return graph.replace(edge_type_names=tuple(names))


class Data:
    """The graph, and rows in host memory."""

    def __init__(self, device: torch.device, shrink: int, num_batches: int) -> None:
        self.device, self.num_batches = device, num_batches
        self.seeds = max(8, SEEDS // shrink)
        self.graph = mag_graph(device, shrink)
        order = torch.argsort(self.graph.dst, stable=True)
        self.edges = torch.stack((self.graph.src[order], self.graph.dst[order])).cpu()
        """By destination: PyG's loaders need not sort them."""
        self.kinds = self.graph.edge_type[order].cpu()
        made, num = torch.Generator().manual_seed(0), self.graph.num_nodes
        self.rows = torch.randn(num, WIDTH, generator=made)
        self.goal = torch.arange(num) % CLASSES
        papers = self.graph.node_type_offsets[1]
        self.train = torch.randperm(papers, generator=made)
        self.train = self.train[: self.seeds * num_batches]

    def epochs(self, number: int) -> list[Tensor]:
        """Seeds of an epoch's batches, on the device."""
        gen = torch.Generator().manual_seed(number)
        order = torch.randperm(self.train.numel(), generator=gen)
        return list(self.train[order].to(self.device).split(self.seeds))


class Model(nn.Module):
    """A linear layer and two relational ones."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, rows: Tensor, *graph: Any) -> Tensor:
        x = self.inputs(rows)
        found: Tensor = self.layers[1](self.layers[0](x, *graph).relu(), *graph)
        return found


def specs(kind: str) -> list[LayerSpec]:
    return [layer_spec(kind, WIDTH, outs) for outs in (WIDTH, CLASSES)]


def loaders(kind: str, data: Data, workers: int, in_worker: bool) -> Any:
    """PyG's loader, its batches on the device."""
    from torch_geometric import data as pyg
    from torch_geometric.loader import NeighborLoader

    graph = data.graph
    options: dict[str, Any] = {
        "batch_size": data.seeds,
        "shuffle": True,
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "filter_per_worker": in_worker,
        "is_sorted": True,
        "pin_memory": data.device.type == "cuda",
    }
    if kind == "hgt":
        whole = pyg.HeteroData()
        first = graph.node_type_offsets
        for t, name in enumerate(graph.node_type_names):
            whole[name].x = data.rows[first[t] : first[t + 1]]
            whole[name].y = data.goal[first[t] : first[t + 1]]
        for names, ends in relations(graph).items():
            whole[names].edge_index = ends.cpu()
        # Papers have edges of four relations: as many edges of a node in all.
        each = [max(1, f // 4) for f in FANOUTS]
        papers = graph.node_type_names[0]
        loader = NeighborLoader(whole, each, (papers, data.train), **options)
    else:
        whole = pyg.Data(
            x=data.rows,
            y=data.goal,
            edge_index=data.edges,
            edge_type=data.kinds,
        )
        loader = NeighborLoader(whole, list(FANOUTS), data.train, **options)
    return Prefetched(loader, data.device)


class Prefetched:
    """PyG's `PrefetchLoader`, without its race.

    See [Note: PyG's prefetched batches].
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        from torch_geometric.loader import PrefetchLoader

        self.loader, self._device = loader, device
        self._ahead = PrefetchLoader(loader, device)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._ahead:
            if self._device.type == "cuda":
                batch.record_stream(torch.cuda.current_stream(self._device))
            yield batch


def pygs(kind: str, graph: HeteroGraph, fast: bool) -> list[nn.Module]:
    return [pyg_conv(s, graph, fast=fast) for s in specs(kind)]


class PygHgt(nn.Module):
    """Linear and two HGTConv on dictionaries."""

    def __init__(self, graph: HeteroGraph) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(pygs("hgt", graph, False))
        self.seen = graph.node_type_names[0]

    def forward(self, rows: dict[str, Tensor], edges: dict[Any, Tensor]) -> Tensor:
        x = {name: self.inputs(r) for name, r in rows.items()}
        found = self.layers[0](x, edges)
        x = {n: found[n].relu() if n in found else x[n] for n in x}
        out: Tensor = self.layers[1](x, edges)[self.seen]
        return out


def pyg_epoch(
    kind: str, data: Data, loader: Any, model: nn.Module, adam: Any
) -> Iterator[float]:
    """Seconds of epochs, one after another."""
    while True:
        begun = wait(data.device)
        total = torch.zeros((), device=data.device)
        for batch in loader:
            adam.zero_grad(set_to_none=True)
            if kind == "hgt":
                papers = batch[data.graph.node_type_names[0]]
                out = model(batch.x_dict, batch.edge_index_dict)
                goal = papers.y[: papers.batch_size]
            else:
                papers = batch
                out = model(batch.x, batch.edge_index, batch.edge_type)
                goal = batch.y[: batch.batch_size]
            loss = functional.cross_entropy(out[: papers.batch_size], goal)
            loss.backward()
            adam.step()
            total += loss.detach()
        float(total)
        yield wait(data.device) - begun


def pyg_way(
    kind: str,
    data: Data,
    loader: Any,
    layers: str,
) -> dict[str, Any]:
    """One way of PyG's: the second epoch; its workers start in the first."""
    torch.manual_seed(0)
    if kind == "hgt":
        model: nn.Module = PygHgt(data.graph)
    else:
        model = Model(pygs(kind, data.graph, layers == "fast"))
    model = model.to(data.device)
    adam = torch.optim.Adam(model.parameters(), fused=data.device.type == "cuda")
    called: Any = model
    if layers == "compiled":
        called = torch.compile(model, dynamic=True)
    epochs = pyg_epoch(kind, data, loader, called, adam)
    begun = time.perf_counter()
    first = next(epochs)
    second = next(epochs)
    return {
        "epoch_s": round(second, 4),
        "first_s": round(first, 3),
        "took_s": round(time.perf_counter() - begun, 2),
    }


def end_workers(loader: Any) -> None:
    """Persistent workers live as long as their iterator."""
    inner = loader.loader
    held = getattr(inner, "_iterator", None)
    if held is not None:
        getattr(held, "iterator", held)._shutdown_workers()
        inner._iterator = None
