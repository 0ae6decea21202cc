"""Mini-batch epochs with features in host memory, ours against PyG's loaders.

    python -m recipes.bench.rgnn.epochs --budget-s 100 --out epochs.json

A graph of ogbn-mag's sizes with its edges both ways, two layers behind a linear one,
1,024 seeds a batch, fanouts 15 and 10, Adam. Ours is what the trainer does with
`trainer.batch` and `trainer.capture`: draws and gathers run ahead of captured steps,
features lie in host memory and the GPU reads them in place. PyG's is `NeighborLoader`
with workers, behind its `PrefetchLoader`, pinned, with its own layers as they are and
compiled; how many workers, and who gathers the rows, is tried on RGCN and the best
serves all. Of HGT its loader draws from each relation, as many edges in all.

Cells: an epoch and its stages alone; `losses`: of the same samples, both ways, in
float32 and float64, largest difference over PyG's. The ratio is PyG's best epoch over
ours, for as many batches of one run.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.capture import CapturedBatches, CapturedSampler
from hector.graph import HeteroGraph, subgraph
from hector.sampling import Drawn, NeighborSampler, SampledBatch
from hector.train import LayerKind, LayerSpec
from hector.train.model import compiled_layer
from hector.train.stages import Ahead
from pydirect.gather import index_select
from pydirect.memory import HostTable
from recipes.bench.common.cells import Cells, arguments
from recipes.bench.rgnn.batches import CLASSES, FANOUTS, KINDS, MAG_EDGES, MAG_NODES
from recipes.bench.rgnn.pyg import pyg_conv, wrap

WIDTH, SEEDS = 64, 1024


class Data:
    """The graph, and rows in host memory."""

    def __init__(self, device: torch.device, shrink: int, num_batches: int) -> None:
        """`shrink` divides the published sizes: a trial on a CPU."""
        self.device, self.num_batches = device, num_batches
        self.seeds = max(8, SEEDS // shrink)
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
            names += [
                (f"n{a}", f"r{2 * i}", f"n{b}"),
                (f"n{b}", f"r{2 * i + 1}", f"n{a}"),
            ]
        types = torch.arange(4).repeat_interleave(torch.tensor(nodes)).to(device)
        self.graph = HeteroGraph.from_arrays(
            torch.cat(src), torch.cat(dst), torch.cat(kind), node_type=types
        ).replace(edge_type_names=tuple(names))
        order = torch.argsort(self.graph.dst, stable=True)
        self.edges = torch.stack((self.graph.src[order], self.graph.dst[order])).cpu()
        """By destination: PyG's loaders need not sort them."""
        self.kinds = self.graph.edge_type[order].cpu()
        made = torch.Generator().manual_seed(0)
        self.rows = torch.randn(first[-1], WIDTH, generator=made)
        self.goal = torch.arange(first[-1]) % CLASSES
        self.train = torch.randperm(nodes[0], generator=made)
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
    return [
        LayerSpec(
            kind=LayerKind(kind),
            in_channels=WIDTH,
            out_channels=CLASSES if last else WIDTH,
            heads=1,
            num_bases=None,
        )
        for last in (False, True)
    ]


def ours(kind: str, graph: HeteroGraph, device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model([compiled_layer(s, graph) for s in specs(kind)]).to(device)


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(call: Callable[[], Any], device: torch.device, rounds: int = 20) -> float:
    """Milliseconds of a call, of many in a row."""
    call()
    found = []
    for _ in range(3):
        begun = wait(device)
        for _ in range(rounds):
            call()
        found.append(1e3 * (wait(device) - begun) / rounds)
    return round(median(found), 3)


def our_epochs(kind: str, data: Data) -> dict[str, Any]:
    """Epochs as the trainer runs them, and each stage alone."""
    device, graph = data.device, data.graph
    # A copy: PyG's workers share the other with this process.
    table = HostTable(data.rows.clone()) if device.type == "cuda" else data.rows
    goal = data.goal.to(device)
    model = ours(kind, graph, device)
    adam = torch.optim.Adam(model.parameters(), capturable=device.type == "cuda")

    def step(found: SampledBatch, goal: Tensor, rows: Tensor) -> Tensor:
        adam.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(rows, found.graph)[found.seeds], goal)
        loss.backward()
        adam.step()
        return loss.detach()

    batches = CapturedBatches(step, graph)
    sampler = NeighborSampler(graph, FANOUTS)
    draws = CapturedSampler(sampler, data.seeds)
    generator = torch.Generator(device).manual_seed(0)

    def draw(seeds: Tensor) -> Drawn:
        return draws.draw(seeds, generator)

    def gather(found: Drawn) -> tuple[Drawn, Tensor]:
        return found, index_select(table, found.node_ids)

    def train(found: Drawn, rows: Tensor, seeds: Tensor) -> Tensor:
        loss: Tensor = batches(found, goal[seeds], rows=[rows])
        return loss

    def epoch(number: int) -> float:
        parts = data.epochs(number)
        begun = wait(device)
        total = torch.zeros((), device=device)
        with (
            Ahead(draw, parts, device) as drawn,
            Ahead(gather, drawn, device) as gathered,
        ):
            for seeds, (found, rows) in zip(parts, gathered, strict=True):
                total += train(found, rows, seeds)
        float(total)
        return wait(device) - begun

    seconds = [epoch(n) for n in range(4)]
    parts = data.epochs(9)
    one = draw(parts[0])
    rows = gather(one)[1]
    stages = {
        "draw_ms": timed(lambda: draw(parts[1]), device),
        "gather_ms": timed(lambda: gather(one), device),
        "step_ms": timed(lambda: train(one, rows, parts[0]), device),
    }
    made = [torch.Generator(device).manual_seed(5) for _ in range(2)]
    plain, fixed = sampler.draw(parts[2], made[0]), draws.draw(parts[2], made[1])
    epoch_s = median(seconds[2:])
    longest = max(stages.values()) * len(parts) / 1e3
    return {
        "epoch_s": round(epoch_s, 4),
        "epochs_s": [round(s, 4) for s in seconds],
        "batches": len(parts),
        "nodes": one.node_ids.numel(),
        "edges": one.edge_ids.numel(),
        "sizes": len(batches),
        "draws_equal": torch.equal(plain.node_ids, fixed.node_ids)
        and torch.equal(plain.edge_ids.sort()[0], fixed.edge_ids.sort()[0]),
        **stages,
        "over_longest_stage": round(epoch_s / longest, 3),
    }


def loaders(kind: str, data: Data, workers: int, in_worker: bool) -> Any:
    """PyG's loader, its batches on the device."""
    from torch_geometric import data as pyg
    from torch_geometric.loader import NeighborLoader, PrefetchLoader

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
        start = dict(zip(graph.node_type_names, first, strict=False))
        bounds = graph.etype_offsets
        for i, names in enumerate(graph.edge_type_metadata()):
            part = slice(bounds[i], bounds[i + 1])
            ends = (
                graph.src[part] - start[names[0]],
                graph.dst[part] - start[names[2]],
            )
            whole[names].edge_index = torch.stack(ends).cpu()
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
    return PrefetchLoader(loader, data.device)


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


def losses(kind: str, data: Data) -> dict[str, float | str]:
    """Of the same samples through both, a batch at a time: largest differences."""
    found: dict[str, float | str] = {}
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        try:
            found[name] = max(
                _loss_error(kind, data, seeds, dtype) for seeds in data.epochs(0)[:3]
            )
        except Exception as wrong:
            found[f"{name}_error"] = f"{type(wrong).__name__}: {wrong}"[:300]
    return found


def _loss_error(kind: str, data: Data, seeds: Tensor, dtype: torch.dtype) -> float:
    graph, device = data.graph, data.device
    drawn = NeighborSampler(graph, FANOUTS).draw(
        seeds, torch.Generator(device).manual_seed(1)
    )
    made = subgraph(graph, drawn.node_ids, drawn.edge_ids)
    if dtype is torch.float64:
        made = made.replace(sampled=False)
    rows = data.rows[drawn.node_ids.cpu()].to(device, dtype)
    goal = data.goal[seeds.cpu()].to(device)
    mine = ours(kind, graph, device).to(dtype)
    theirs = Model([wrap(c, made) for c in pygs(kind, graph, False)])
    theirs = theirs.to(device, dtype)
    theirs.inputs.load_state_dict(mine.inputs.state_dict())
    for one, other in zip(mine.layers, theirs.layers, strict=True):
        other.conv.load_state_dict(one.state_dict())
    values = [
        float(functional.cross_entropy(m(rows, made)[drawn.seeds], goal))
        for m in (mine, theirs)
    ]
    return abs(values[0] - values[1]) / abs(values[1])


class Campaign:
    """Cells of one run, until its time is over."""

    def __init__(self, options: Any, device: torch.device) -> None:
        self._end = time.monotonic() + options.budget_s
        about = {
            "width": WIDTH,
            "seeds": SEEDS,
            "fanouts": FANOUTS,
            "shrink": options.shrink,
        }
        self._cells = Cells(options.out, options.budget_s, about)
        self.kept = self._cells.data["cells"]
        self.data = Data(device, options.shrink, options.batches)

    def take(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """One cell; empty when the time is over."""
        if time.monotonic() > self._end:
            return {}
        try:
            found = run()
        except Exception as wrong:
            found = {"error": f"{type(wrong).__name__}: {wrong}"[:500]}
        self.kept[name] = found
        print(name, json.dumps(found), flush=True)
        self._cells.save()
        return found

    def ours(self, kind: str) -> None:
        self.take(f"{kind}/ours", lambda: our_epochs(kind, self.data))

    def losses(self, kind: str) -> None:
        self.take(f"{kind}/losses", lambda: losses(kind, self.data))

    def pyg(self, kind: str, layers: str, workers: int, inside: bool) -> float:
        """Seconds of an epoch; no end of them where there is none."""
        name = f"{layers}, {workers} workers{'' if inside else ', rows here'}"
        with ExitStack() as stack:
            loader = loaders(kind, self.data, workers, inside)
            stack.callback(_end_workers, loader)
            cell = self.take(
                f"{kind}/pyg, {name}", lambda: pyg_way(kind, self.data, loader, layers)
            )
        ratios(kind, self.kept)
        self._cells.save()
        return float(cell.get("epoch_s", "inf"))


def main(argv: list[str] | None = None) -> int:
    """Cells until the time is over."""
    parser = arguments(__doc__, 100, "rgnn/epochs")
    add = parser.add_argument
    add("--shrink", type=int, default=1, help="divide the sizes: a trial on a CPU")
    add("--batches", type=int, default=96, help="of an epoch; 3 or more")
    add("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    add("--workers", nargs="+", type=int, help="tried on the first kind")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    campaign, kinds = Campaign(options, device), options.kinds
    for kind in kinds:
        campaign.ours(kind)
    cores = len(os.sched_getaffinity(0))
    tried = options.workers or sorted({min(8, cores), max(1, min(16, cores - 2))})
    ways = [(w, True) for w in tried] + [(tried[-1], False)]
    for kind in kinds:
        times = {way: campaign.pyg(kind, "as they are", *way) for way in ways}
        ways = [min(times, key=lambda w: times[w])]
    for kind in kinds:
        campaign.losses(kind)
    for kind, layers in (("rgcn", "fast"), ("rgat", "compiled"), ("rgcn", "compiled")):
        if kind in kinds:
            campaign.pyg(kind, layers, *ways[0])
    return 0


def ratios(kind: str, kept: dict[str, Any]) -> None:
    """PyG's fastest epoch over ours."""
    mine = kept.get(f"{kind}/ours", {}).get("epoch_s")
    theirs = {
        name.partition("/pyg, ")[2]: cell["epoch_s"]
        for name, cell in kept.items()
        if name.startswith(f"{kind}/pyg") and "epoch_s" in cell
    }
    if mine and theirs:
        best = min(theirs, key=lambda n: theirs[n])
        found = {"ratio": round(theirs[best] / mine, 2), "best": best}
        kept[f"{kind}/ratio"] = found


def _end_workers(loader: Any) -> None:
    """Persistent workers live as long as their iterator."""
    inner = loader.loader
    held = getattr(inner, "_iterator", None)
    if held is not None:
        getattr(held, "iterator", held)._shutdown_workers()
        inner._iterator = None


if __name__ == "__main__":
    sys.exit(main())
