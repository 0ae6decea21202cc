"""Random models that train and then change their ways: gradients byte-equal to plain's.

The generator is `tests/ssdtrain/graphs/surprises.py`; every model runs under three
plans with recipes. Written down after every block, so a rerun goes on: how many graphs
(steps of models) there were, how many runs of a model under a plan were equal, in how
many plain autograd raised as well, in how many ssdtrain raised alone (it may, and says
so), how often each operator and surprise occurred, and every difference with its seed.

    OMP_NUM_THREADS=1 python -m recipes.bench.safety.surprises --models 100000

Several processes take ranges of their own (`--first-block`), and their files are added
up afterwards (`--add`).
"""

import json
import logging
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from recipes.bench.common.cells import Cells, arguments
from tests.ssdtrain.graphs.surprises import (
    PLANS,
    difference,
    plain,
    raised_alone,
    train,
)

BLOCK = 50


def run_block(block: int) -> dict[str, Any]:
    """One block of models, plain and under every plan."""
    features: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    different = []
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        theirs = plain(seed, features)
        counts["graphs"] += len(theirs)
        for settings in PLANS:
            met: Counter[str] = Counter()
            ours = train(seed, settings, met)
            features["planned"] += met["planned"]
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


def merge(data: dict[str, Any], found: dict[str, Any], num_blocks: int = 1) -> None:
    """Add blocks to the sums."""
    for name in ("counts", "features"):
        sums = Counter(data.get(name, {})) + Counter(found[name])
        data[name] = dict(sorted(sums.items()))
    data["different"] = data.get("different", []) + found["different"]
    data["blocks"] += num_blocks
    data["models"] = data["blocks"] * BLOCK


def add_up(data: dict[str, Any], path: Path) -> None:
    """Add another process's campaign to the sums."""
    theirs = json.loads(path.read_text())["cells"]["campaign"]
    merge(data, theirs, theirs["blocks"])
    data["seconds"] = round(data.get("seconds", 0) + theirs["seconds"], 1)


def main() -> None:
    """Blocks until the models are done or the time is over."""
    parser = arguments(__doc__, 36_000, "safety/surprises_cpu")
    parser.add_argument("--models", type=int, default=100_000)
    parser.add_argument("--first-block", type=int, default=0)
    parser.add_argument("--add", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # refusals are counted, and raised ones compared
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
    cells = Cells(options.out, options.budget_s, {"device": "cpu", "block": BLOCK})
    sums = cells.data["cells"].setdefault("campaign", {"blocks": 0})
    deadline = time.monotonic() + options.budget_s
    for path in options.add:
        add_up(sums, path)
        cells.save()
    while sums["blocks"] * BLOCK < options.models and time.monotonic() < deadline:
        start = time.monotonic()
        merge(sums, run_block(options.first_block + sums["blocks"]))
        sums["seconds"] = round(sums.get("seconds", 0) + time.monotonic() - start, 1)
        cells.save()
        print(
            f"{sums['models']} models, {sums['counts']}, "
            f"{len(sums['different'])} different; {sums['seconds']:.0f} s",
            flush=True,
        )
    if sums.get("different"):
        sys.exit(f"{len(sums['different'])} runs differ: see {options.out}")


if __name__ == "__main__":
    main()
