"""A hundred thousand steps: resident memory's slope, with reports unread.

Steps of a small model under `plan="auto"`, forwards of changing length among them, and
the same steps without ssdtrain, each in a process of its own. The slope is a
least-squares line through resident memory after the first thousand steps. Next to it,
how much more is in use at the end than after those steps: blocks of Python's allocator
and bytes of the C library's. Resident memory can grow where these do not: a page of the
heap that is touched for the first time stays.

    OMP_NUM_THREADS=1 python -m recipes.bench safety.leaks --steps 100000
"""

import ctypes
import gc
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import nn

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import answer_of
from recipes.bench.safety.blocks import one_thread

WIDTH = 32
WARM_STEPS = 1_000
EVERY = 500
LIMIT_BYTES_A_STEP = 10.0
SPARE_S = 120.0
"""Imports, and the end of a process."""
TARGETS = ("ssd", "host", "plain")
MALLINFO = (
    "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
).split()


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


class Level(NamedTuple):
    """What the process holds before a step, after a collection."""

    step: int
    num_bytes: int
    """Resident."""
    num_blocks: int
    """Of Python's allocator."""
    malloc_bytes: int
    """That the C library has handed out, in all its arenas."""

    @classmethod
    def at(cls, step: int) -> "Level":
        """Now."""
        gc.collect()
        tell = ctypes.CDLL(None).mallinfo2
        tell.restype = _Mallinfo
        found = tell()
        resident = int(psutil.Process().memory_info().rss)
        used = int(found.uordblks + found.hblkhd)
        return cls(step, resident, sys.getallocatedblocks(), used)


def slope(levels: list[Level]) -> float:
    """Bytes a step."""
    if len(levels) < 3:
        return float("nan")
    steps, sizes, *_ = np.array(levels, dtype=np.float64).T
    return round(float(np.polyfit(steps, sizes, 1)[0]), 2)


def train(num_steps: int, budget_s: float, target: str) -> dict[str, Any]:
    """Steps until they are done or the time is over."""
    one_thread()
    torch.manual_seed(0)
    deadline = time.monotonic() + budget_s
    net = nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    levels: list[Level] = []
    gc.collect()
    gc.freeze()  # imports' objects: collections take a tenth of the time
    with ExitStack() as stack:
        if target != "plain":
            settings: dict[str, Any] = {"target": target, "min_bytes": 0}
            if target == "ssd":
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                settings["directory"] = folder
            session = ssdtrain.offload(net, plan="auto", max_overhead=1.0, **settings)
            stack.enter_context(session)
        for number in range(num_steps + 1):
            rows = 16 if number % 97 else 24
            x = torch.randn(rows, WIDTH, requires_grad=True)
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % EVERY == 0:
                levels.append(Level.at(number))
                if time.monotonic() > deadline:
                    break
    warm = [one for one in levels if one.step >= WARM_STEPS]
    first, last = (warm[0], warm[-1]) if warm else (levels[-1], levels[-1])
    return {
        "steps": levels[-1].step,
        "bytes_a_step": slope(warm),
        "bytes_a_step_second_half": slope(warm[len(warm) // 2 :]),
        "more_blocks": last.num_blocks - first.num_blocks,
        "more_malloc_bytes": last.malloc_bytes - first.malloc_bytes,
        "levels": levels[:: max(1, len(levels) // 40)],
    }


def main(
    bench: Bench, *, steps: int = 100_000, targets: tuple[str, ...] = TARGETS
) -> None:
    """One run each; exits with an error if memory grows.

    Args:
        targets: what is watched
    """
    cells = bench.cells({"steps": steps})
    grown = []
    for target in targets:
        name = target if target == "plain" else f"{target}, reports unread"
        given = steps, cells.left_s(), target
        cells.run(name, answer_of, train, given, cells.left_s() + SPARE_S)
        found = cells[name] if name in cells else {}
        if not found.get("bytes_a_step", float("nan")) < LIMIT_BYTES_A_STEP:
            grown.append(name)
    if grown:
        sys.exit(f"memory grows, or was not measured: {grown}; see {bench.out}")
