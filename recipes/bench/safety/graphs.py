"""Random graphs by the hundred thousand: gradients byte-equal to plain autograd's.

The generator is the one of the tests (`tests/ssdtrain/graphs`), here with DTensor, and
with a second device where there is a GPU. Every block of graphs runs under other
settings: target, recipes, plan, window, verify. Written down after every block, so a
rerun goes on: how many graphs gave equal gradients, how many both sides refused (an
in-place change of a saved tensor), how often each feature occurred in the former, and
every difference with its seed.

    OMP_NUM_THREADS=1 python -m recipes.bench safety.graphs --graphs 100000 --workers 8
"""

import logging
import multiprocessing
import random
import tempfile
from collections import Counter
from functools import partial
from typing import Any

import torch

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.safety.blocks import CELL, judge, run_campaign
from tests.ssdtrain.graphs import generator

Holder, difference = generator.Holder, generator.difference
outcome = generator.outcome

BLOCK = 500


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


def run_block(block: int, device: str, directory: str) -> dict[str, Any]:
    """One block of graphs, plain and under a session."""
    holder = Holder().to(device)
    seeds = range(block * BLOCK, (block + 1) * BLOCK)
    met: list[Counter[str]] = []
    theirs = []
    for seed in seeds:
        met.append(Counter())
        theirs.append(outcome(holder, seed, met[-1]))
    settings = settings_of(block, directory)
    features: Counter[str] = Counter()
    equal, refused, different = 0, 0, []
    fallbacks: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    with ssdtrain.offload(holder, **settings) as session:
        for seed, expected, counts in zip(seeds, theirs, met, strict=True):
            found = outcome(holder, seed, Counter())
            what = difference(found, expected)
            if what is not None:
                different.append({"seed": seed, "what": what, "settings": settings})
            elif "text" in expected:
                refused += 1
            else:
                equal += 1
                features += counts
            del found
        for step in session.steps:
            fallbacks += Counter(step.fallbacks)
            for name in ("offloaded", "reloaded", "recomputed", "written", "verified"):
                moved[f"bytes_{name}"] += getattr(step, f"bytes_{name}")
    return {
        "equal": equal,
        "refused": refused,
        "different": different,
        "features": dict(features),
        "fallbacks": dict(fallbacks),
        "moved": dict(moved),
    }


def start() -> None:
    """Let this process run blocks: its threads, log and process group."""
    torch.set_num_threads(1)
    # A refused recipe of one graph in thousands is no news here: it is counted.
    logging.disable(logging.WARNING)
    store = tempfile.mkdtemp()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}/rendezvous", rank=0, world_size=1
    )


def main(bench: Bench, *, graphs: int = 100_000, workers: int = 1) -> None:
    """Blocks until the graphs are done or the time is over.

    Args:
        workers: processes
    """
    device = bench.device.type
    bench.out = bench.out.with_name(bench.out.name.replace("_cpu", f"_{device}"))
    cells = bench.cells({"device": device, "block": BLOCK})
    done = cells.data["cells"].get(CELL, {}).get("blocks", 0)
    blocks = range(done, -(-graphs // BLOCK))
    with multiprocessing.get_context("spawn").Pool(workers, start) as pool:
        # In their order, so that a rerun knows which are done.
        found = pool.imap(partial(block_of, device=device), blocks)
        judge(run_campaign(cells, lambda _: next(found), graphs), bench.out)


def block_of(number: int, device: str) -> dict[str, Any]:
    """`run_block`, in any process."""
    with tempfile.TemporaryDirectory() as directory:
        return {"graphs": BLOCK, **run_block(number, device, directory)}
