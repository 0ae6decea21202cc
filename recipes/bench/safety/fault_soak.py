"""Thousands of steps under random faults: nothing wrong, nothing lost, nothing grows.

One session on the SSD target with verify="checksum". Its storage fails at random:
full, EIO on write and read, short and torn transfers, flipped bits, stalls, a worker
that dies. At random the user's forward or backward raises, runs out of memory, or a
loss is dropped. Every step must give the gradients of plain autograd, or stop with an
error that says what was lost; then the next one must work. Memory, threads, files,
slots and staging are written down on the way, always when nothing is in flight.

    OMP_NUM_THREADS=1 python -m recipes.bench safety.fault_soak --steps 2000
"""

import gc
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.safety.blocks import one_thread
from ssdtrain.errors import ActivationChangedError, ActivationLostError
from ssdtrain.storage import open as opening
from tests.ssdtrain.faulty import Fault, FaultKind, FaultyStorage, Operation

WIDTH, NUM_LAYERS = 64, 6
MOVES: dict[str, Any] = {
    **{"target": "ssd", "min_bytes": 0, "plan": "offload-all", "recompute": "off"},
    **{"window_bytes": 1, "host_bytes": 2 << 20, "verify": "checksum"},
}
BOTH = (
    *(FaultKind.IO_ERROR, FaultKind.SHORT, FaultKind.BIT_FLIP),
    *(FaultKind.STALL, FaultKind.WORKER_DEATH),
)
FAULTS = {
    Operation.ALLOCATE: (FaultKind.NO_SPACE,),
    Operation.WRITE: (FaultKind.NO_SPACE, FaultKind.TORN, *BOTH),
    Operation.READ: BOTH,
}


class RandomFaults(FaultyStorage):
    """Draws at every call, with a probability for each kind."""

    probability = 0.0007

    def _before(self, operation: Operation) -> Fault | None:
        with self._lock:
            kinds = FAULTS.get(operation, ())
            drawn = [k for k in kinds if self._random.random() < self.probability]
            about = {"operation": operation, "at": self._calls[operation]}
            self._faults = tuple(
                Fault(kind=kind, seconds=0.05, **about) for kind in drawn[:1]
            )
        return super()._before(operation)


class Trouble(Exception):
    """What a user's own code raises."""


class Stumble(torch.autograd.Function):
    """Raises in forward or backward when asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        if place == "forward":
            raise Trouble(place)
        if place == "out of memory":
            raise torch.OutOfMemoryError("planted")
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.place == "backward":
            raise Trouble(ctx.place)
        return gradient * 1, None


class Net(nn.Module):
    """Residual MLP that stumbles in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(NUM_LAYERS)
        )

    def forward(self, x: Tensor, place: str) -> Tensor:
        """Scalar."""
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            if number == NUM_LAYERS // 2:
                x = Stumble.apply(x, place)
        return x.square().sum()


def step(net: Net, rows: int, place: str) -> list[Tensor]:
    """Gradients of one step; a dropped loss gives none."""
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    net.zero_grad()
    loss = net(x, place)
    if place == "dropped":
        return []
    loss.backward()
    return [x.grad, *(p.grad.clone() for p in net.parameters())]


def level(session: ssdtrain.Session) -> dict[str, Any]:
    """What must not grow; taken when nothing is in flight."""
    gc.collect()
    cache, process = session.cache, psutil.Process()
    cache.offloader.wait_io()
    storage = cache.offloader.storage
    if storage is None:
        raise RuntimeError("no storage")
    return {
        "idle": cache.is_idle,
        "resident_mib": round(process.memory_info().rss / 2**20, 1),
        "threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "file_bytes": storage.stats().allocated_bytes,
        "slots_used_bytes": storage.stats().used_bytes,
        "staging_used_bytes": cache.offloader.pool.used_bytes,
        "saved_live_bytes": session.live_bytes,
    }


def attempt(net: Net, rows: int, place: str, expected: list[Tensor]) -> str:
    """How one step ended. In a frame of its own: an error's frames hold the graph."""
    try:
        found = step(net, rows, place)
    except ActivationChangedError:
        return "changed, found by verify"
    except ActivationLostError as lost:
        named = "the saved tensor of" in str(lost) and "bytes)" in str(lost)
        return "lost, and named" if named else f"lost without a name: {lost}"
    except (Trouble, torch.OutOfMemoryError) as error:
        return f"the user's own: {error}"
    if place == "dropped":
        return "dropped"
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return "equal" if same else "WRONG"


def soak(num_steps: int, budget_s: float, directory: Path) -> dict[str, Any]:
    """The whole run."""
    real = opening.open_storage

    def open_faulty(*args: Any, **kwargs: Any) -> RandomFaults:
        storage = RandomFaults(real(*args, **kwargs), seed=1)
        storages.append(storage)
        return storage

    storages: list[RandomFaults] = []
    net, draw = Net(), random.Random(0)
    sizes = (24, 32, 48)
    expected = {rows: step(net, rows, "") for rows in sizes}
    opening.open_storage = open_faulty
    ends: Counter[str] = Counter()
    levels: list[dict[str, Any]] = []
    deadline = time.monotonic() + budget_s
    try:
        with ssdtrain.offload(net, directory=str(directory), **MOVES) as session:
            done = 0
            while done < num_steps and time.monotonic() < deadline:
                rows = draw.choice(sizes)
                places = ("forward", "backward", "out of memory", "dropped")
                place = draw.choice(places) if draw.random() < 0.05 else ""
                ends[attempt(net, rows, place, expected[rows])] += 1
                done += 1
                if done % max(1, num_steps // 20) == 0:
                    levels.append({"step": done, **level(session)})
                    print(levels[-1], flush=True)
                session.steps.clear()
    finally:
        opening.open_storage = real
    hits = {kind.value: count for kind, count in storages[0].hits.items() if count}
    threads = [t.name for t in threading.enumerate() if t.name.startswith("ssdtrain")]
    return {
        "steps": done,
        "ends": dict(ends),
        "faults": hits,
        "levels": levels,
        "left_on_disk": [str(path) for path in directory.rglob("*")],
        "threads_left": threads,
    }


def main(bench: Bench, *, steps: int = 2500, directory: Path = Path(".")) -> None:
    """One cell."""
    one_thread()
    cells = bench.cells({"steps": steps})
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        place = Path(scratch) / "activations"
        place.mkdir(mode=0o700)
        cells.run("soak", soak, steps, bench.budget_s, place)
