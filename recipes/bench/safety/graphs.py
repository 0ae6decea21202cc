"""Random graphs by the hundred thousand: gradients byte-equal to plain autograd's.

The generator is the one of the tests (`tests/ssdtrain/graphs`), here with DTensor, and
with a second device where there is a GPU. Every block of graphs runs under other
settings: target, recipes, plan, window, verify. Written down after every block, so a
rerun goes on: how many graphs gave equal gradients, how many both sides refused (an
in-place change of a saved tensor), how often each feature occurred in the former, and
every difference with its seed.

    OMP_NUM_THREADS=1 python -m recipes.bench safety.graphs --graphs 100000 --workers 8
"""

import random
import tempfile
from collections import Counter
from functools import partial
from typing import Any

import torch

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.safety.blocks import one_thread, run_campaign
from tests.ssdtrain.graphs import generator

BLOCK = 500
MOVED = tuple(
    f"bytes_{name}"
    for name in ("offloaded", "reloaded", "recomputed", "written", "verified")
)


def settings_of(block: int, directory: str) -> dict[str, Any]:
    """Drawn from the number of the block."""
    draw = random.Random(block)
    target = draw.choice(["host", "host", "ssd", "tiered"])
    settings: dict[str, Any] = {
        "target": target,
        "min_bytes": draw.choice([0, 0, 0, 64]),
        "plan": draw.choice(["offload-all", "offload-all", "auto", "keep-all"]),
        "recompute": draw.choice(["off", "auto"]),
        "window_bytes": draw.choice([1, 1, 4096]),
        "host_bytes": 64 << 10 if target == "tiered" else 64 << 20,
        "verify": draw.choice(["off", "off", "off", "checksum", "shadow"]),
        "gpu_direct": "off",
    }
    if target != "host":
        settings["directory"] = directory
    return settings


def run_block(block: int, device: str) -> dict[str, Any]:
    """One block of graphs, plain and under a session."""
    holder = generator.Holder().to(device)
    theirs = []
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        met: Counter[str] = Counter()
        theirs.append((seed, generator.outcome(holder, seed, met), met))
    counts: Counter[str] = Counter(graphs=BLOCK, equal=0, refused=0)
    features: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    different = []
    with tempfile.TemporaryDirectory() as directory:
        settings = settings_of(block, directory)
        with ssdtrain.offload(holder, **settings) as session:
            for seed, expected, met in theirs:
                found = generator.outcome(holder, seed, Counter())
                what = generator.difference(found, expected)
                del found
                if what is not None:
                    one = {"seed": seed, "what": what, "settings": settings}
                    different.append(one)
                elif "text" in expected:
                    counts["refused"] += 1
                else:
                    counts["equal"] += 1
                    features += met
            for step in session.steps:
                fallbacks += Counter(step.fallbacks)
                for name in MOVED:
                    moved[name] += getattr(step, name)
    more = {"features": features, "fallbacks": fallbacks, "moved": moved}
    return {**counts, "different": different, **more}


def start() -> None:
    """Let this process run blocks, with DTensor."""
    one_thread()
    rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
    torch.distributed.init_process_group(
        "gloo", init_method=rendezvous, rank=0, world_size=1
    )


def main(bench: Bench, *, graphs: int = 100_000, workers: int = 1) -> None:
    """Blocks until the graphs are done or the time is over.

    Args:
        workers: processes
    """
    device = bench.device.type
    bench.out = bench.out.with_name(bench.out.name.replace("_cpu", f"_{device}"))
    cells = bench.cells({"device": device, "block": BLOCK})
    block = partial(run_block, device=device)
    run_campaign(cells, block, graphs, workers=workers, start=start)
