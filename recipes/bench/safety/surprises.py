"""Random models that train and then change their ways: gradients byte-equal to plain's.

The generator is `tests/ssdtrain/graphs/surprises.py`; every model runs under three
plans with recipes. Written down after every block, so a rerun goes on: how many runs
were equal, in how many plain autograd raised as well, in how many ssdtrain raised alone
(it may, and says so), how often each operator and surprise occurred, and every
difference with its seed.

    OMP_NUM_THREADS=1 python -m recipes.bench.safety.surprises --models 100000
"""

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from recipes.bench.common.cells import RESULTS, Cells
from tests.ssdtrain.graphs.surprises import PLANS, difference, raised_alone, train

BLOCK = 50


def run_block(block: int) -> dict[str, Any]:
    """One block of models, plain and under every plan."""
    features: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    different = []
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        theirs = train(seed, None, features)
        for settings in PLANS:
            ours = train(seed, settings, Counter())
            what = difference(ours, theirs)
            if what is not None:
                different.append({"seed": seed, "what": what, "settings": settings})
            elif raised_alone(ours, theirs):
                counts["raised_alone"] += 1
            elif isinstance(theirs[-1], str):
                counts["raised_by_both"] += 1
            else:
                counts["equal"] += 1
    return {"counts": counts, "different": different, "features": features}


def merge(data: dict[str, Any], found: dict[str, Any]) -> None:
    """Add a block to the sums."""
    for name in ("counts", "features"):
        sums = Counter(data.get(name, {})) + found[name]
        data[name] = dict(sorted(sums.items()))
    data["different"] = data.get("different", []) + found["different"]
    data["blocks"] += 1
    data["models"] = data["blocks"] * BLOCK


def main() -> None:
    """Blocks until the models are done or the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=int, default=100_000)
    parser.add_argument("--budget-s", type=float, default=36_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # refusals are counted, and raised ones compared
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
    out = options.out or RESULTS / "safety" / "surprises_cpu.json"
    cells = Cells(out, options.budget_s, {"device": "cpu", "block": BLOCK})
    sums = cells.data["cells"].setdefault("campaign", {"blocks": 0})
    deadline = time.monotonic() + options.budget_s
    while sums["blocks"] * BLOCK < options.models and time.monotonic() < deadline:
        start = time.monotonic()
        merge(sums, run_block(sums["blocks"]))
        sums["seconds"] = round(sums.get("seconds", 0) + time.monotonic() - start, 1)
        cells.save()
        print(
            f"{sums['models']} models, {sums['counts']}, "
            f"{len(sums['different'])} different; {sums['seconds']:.0f} s",
            flush=True,
        )
    if sums["different"]:
        sys.exit(f"{len(sums['different'])} runs differ: see {out}")


if __name__ == "__main__":
    main()
