"""Mini-batch epochs with features in host memory, ours against PyG's loaders.

    python -m recipes.bench rgnn.epochs --budget-s 100 --out epochs.json

A graph of ogbn-mag's sizes with its edges both ways, two layers behind a linear one,
1,024 seeds a batch, fanouts 15 and 10, Adam. Ours is what the trainer does with
`trainer.batch` and `trainer.capture`: draws and gathers run ahead of captured steps,
features lie in host memory and the GPU reads them in place. PyG's is `NeighborLoader`
with workers, behind its `PrefetchLoader`, pinned, with its own layers as they are and
compiled; how many workers, and who gathers the rows, is tried on RGCN and the best
serves all. Of HGT its loader draws from each relation, as many edges in all.

Cells run in a process of their own. A cell that breaks the device, kills its process or
outlasts its limit is recorded as such, and a new process goes on behind it.

Cells: an epoch and its stages alone; `losses`: of the same samples, both ways, in
float32 and float64, largest difference over PyG's. The ratio is PyG's best epoch over
ours, for as many batches of one run.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hector.capture import CapturedBatches, CapturedSampler
from hector.graph import HeteroGraph, subgraph
from hector.sampling import Drawn, NeighborSampler, SampledBatch
from hector.train.model import compiled_layer
from hector.train.stages import Ahead
from pydirect.gather import index_select
from pydirect.memory import HostTable
from recipes.bench.harness import records
from recipes.bench.harness.cells import NOT_ENDED, Cells
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import guarded
from recipes.bench.harness.timing import wait
from recipes.bench.rgnn.batches import KINDS
from recipes.bench.rgnn.mag import (
    FANOUTS,
    SEEDS,
    WIDTH,
    Data,
    Model,
    end_workers,
    loaders,
    pyg_way,
    pygs,
    specs,
)
from recipes.bench.rgnn.pyg import wrap

ABOUT = {"width": WIDTH, "seeds": SEEDS, "fanouts": FANOUTS}


def ours(kind: str, graph: HeteroGraph, device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model([compiled_layer(s, graph) for s in specs(kind)]).to(device)


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
    cuda = device.type == "cuda"
    adam = torch.optim.Adam(model.parameters(), capturable=cuda, fused=cuda or None)

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
        float(functional.cross_entropy(m(rows, made)[drawn.seeds], goal).detach())
        for m in (mine, theirs)
    ]
    return abs(values[0] - values[1]) / abs(values[1])


class BrokenDeviceError(RuntimeError):
    """Nothing runs on the device any more in this process."""


class Campaign:
    """Cells of one run, until its time is over."""

    def __init__(self, data: Data, cells: Cells) -> None:
        self._cells = cells
        self.kept = cells.data["cells"]
        self.data = data

    def take(
        self, name: str, run: Callable[[], dict[str, Any]], limit_s: float
    ) -> dict[str, Any]:
        """One cell; empty when the time is over.

        Raises:
            BrokenDeviceError: the cell's kernels left no usable device.
        """
        cells = self._cells
        if name not in cells and cells.left_s() > 0:
            cells.note(name, {})
            cells.run(name, run, limit_s=limit_s)
            try:
                wait(self.data.device)
            except RuntimeError as wrong:
                raise BrokenDeviceError(f"{name} broke the device") from wrong
        found: dict[str, Any] = self.kept.get(name, {})
        return found

    def pyg(self, kind: str, layers: str, workers: int, inside: bool) -> float:
        """Seconds of an epoch; no end of them where there is none."""
        name = f"{layers}, {workers} workers{'' if inside else ', rows here'}"

        def way() -> dict[str, Any]:
            with ExitStack() as stack:
                loader = loaders(kind, self.data, workers, inside)
                stack.callback(end_workers, loader)
                return pyg_way(kind, self.data, loader, layers)

        limit_s = 75 if layers == "compiled" else 45
        cell = self.take(f"{kind}/pyg, {name}", way, limit_s)
        ratios(kind, self.kept)
        self._cells.save()
        return float(cell.get("epoch_s", "inf"))

    def run(self, kinds: Sequence[str], workers: Sequence[int]) -> None:
        """All cells: each kind's ratio first, then what may better PyG's."""
        for kind in kinds:
            self.take(f"{kind}/ours", lambda k=kind: our_epochs(k, self.data), 60)
        ways = [(w, True) for w in workers] + [(workers[-1], False)]
        for kind in kinds:
            times = {way: self.pyg(kind, "as they are", *way) for way in ways}
            ways = [min(times, key=lambda w: times[w])]
        for kind in kinds:
            self.take(f"{kind}/losses", lambda k=kind: losses(k, self.data), 60)
        others = (("rgcn", "fast"), ("rgat", "compiled"), ("rgcn", "compiled"))
        for kind, layers in others:
            if kind in kinds:
                self.pyg(kind, layers, *ways[0])


def main(
    bench: Bench,
    *,
    shrink: int = 1,
    batches: int = 96,
    kinds: tuple[str, ...] = tuple(KINDS),
    workers: tuple[int, ...] = (),
) -> int:
    """Cells until the time is over.

    Args:
        shrink: divide the sizes: a trial on a CPU
        batches: of an epoch; 3 or more
        workers: tried on the first kind
    """
    bench.cells({**ABOUT, "shrink": shrink}).save()
    bench.again = ()  # forgotten; of what follows nothing is
    cores = len(os.sched_getaffinity(0))
    tried = workers or tuple(sorted({min(8, cores), max(1, min(16, cores - 2))}))
    end = time.monotonic() + bench.budget_s
    ended = "not begun"
    while ended and (left_s := end - time.monotonic()) > 0:
        own = bench, left_s, shrink, batches, kinds, tried
        # What a cell may take beyond the end is its own limit's.
        limit_s = left_s + 80
        found, died = guarded(run_cells, *own, limit_s=limit_s, method="spawn")
        ended = died or found
        if ended:
            print(f"a new process goes on: {ended}", file=sys.stderr, flush=True)
        if died and not blamed(bench.out, died):
            return 1
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


def run_cells(
    bench: Bench,
    budget_s: float,
    shrink: int,
    batches: int,
    kinds: tuple[str, ...],
    workers: tuple[int, ...],
) -> str:
    """The cells that the file does not hold yet; empty, or what ended them."""
    # A spawned process spawns in turn: loaders' workers would be sent the graph.
    multiprocessing.set_start_method("fork", force=True)
    bench.budget_s = budget_s
    data = Data(bench.device, shrink, batches)
    try:
        Campaign(data, bench.cells({**ABOUT, "shrink": shrink})).run(kinds, workers)
    except BrokenDeviceError as broken:
        return str(broken)
    return ""


def blamed(out: Path, died: str) -> bool:
    """Whether a cell was under way when its process died; it is not run again."""
    if not out.exists():
        return False
    data = records.read(out)
    cut = [c for c in data["cells"].values() if c.get("error") == NOT_ENDED]
    for cell in cut:
        cell["error"] = died
    records.write(out, data)
    return bool(cut)
