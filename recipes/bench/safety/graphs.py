"""Random graphs by the hundred thousand: gradients byte-equal to plain autograd's.

The generator is the one of the tests (`tests/ssdtrain/graphs`), here with DTensor, and
with a second device where there is a GPU. Every block of graphs runs under other
settings: target, recipes, plan, window, verify. Written down after every block, so a
rerun goes on: how many graphs gave equal gradients, how many both sides refused (an
in-place change of a saved tensor), how often each feature occurred in the former, and
every difference with its seed.

    OMP_NUM_THREADS=1 python -m recipes.bench.safety.graphs --graphs 100000 --workers 8
"""

import logging
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from typing import Any

import torch

import ssdtrain
from recipes.bench.common.cells import RESULTS, Cells, arguments
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


def merge(data: dict[str, Any], found: dict[str, Any]) -> None:
    """Add a block to the sums."""
    for name in ("equal", "refused"):
        data[name] = data.get(name, 0) + found[name]
    data["different"] = data.get("different", []) + found["different"]
    for name in ("features", "fallbacks", "moved"):
        sums = Counter(data.get(name, {})) + Counter(found[name])
        data[name] = dict(sorted(sums.items()))


def start() -> None:
    """Let this process run blocks: its threads, log and process group."""
    torch.set_num_threads(1)
    # A refused recipe of one graph in thousands is no news here: it is counted.
    logging.disable(logging.WARNING)
    store = tempfile.mkdtemp()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}/rendezvous", rank=0, world_size=1
    )


def timed_block(block: int, device: str) -> tuple[dict[str, Any], float]:
    """`run_block`, and its seconds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = run_block(block, device, directory)
    return found, time.monotonic() - begin


def main() -> None:
    """Blocks until the graphs are done or the time is over."""
    parser = arguments(__doc__, 36_000)
    parser.add_argument("--graphs", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out or RESULTS / "safety" / f"graphs_{device}.json"
    cells = Cells(out, options.budget_s, {"device": device, "block": BLOCK})
    sums = cells.data["cells"].setdefault("campaign", {"blocks": 0})
    deadline = time.monotonic() + options.budget_s
    blocks = range(sums["blocks"], -(-options.graphs // BLOCK))
    with multiprocessing.get_context("spawn").Pool(options.workers, start) as pool:
        # In their order, so that a rerun knows which are done.
        for found, seconds in pool.imap(partial(timed_block, device=device), blocks):
            merge(sums, found)
            sums["blocks"] += 1
            sums["graphs"] = sums["blocks"] * BLOCK
            sums["seconds"] = round(sums.get("seconds", 0) + seconds, 1)
            sums["rarest"] = min(sums["features"].items(), key=lambda pair: pair[1])
            cells.save()
            if sums["blocks"] % 10 == 1:
                print(
                    f"{sums['graphs']} graphs, {sums['equal']} equal, "
                    f"{sums['refused']} refused by both, {len(sums['different'])} "
                    f"different; rarest {sums['rarest']}; {sums['seconds']:.0f} s",
                    flush=True,
                )
            if time.monotonic() > deadline:
                break
    if sums["different"]:
        sys.exit(f"{len(sums['different'])} graphs differ: see {out}")


if __name__ == "__main__":
    main()
