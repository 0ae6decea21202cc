"""Training steps past host memory: one directory, two, and tiered, against staging.

    python -m recipes.bench storage.direct --directory /mnt/nvme0 --out direct.json

Each cell trains the same layers twice, with `gpu_direct="off"` and "auto"; losses are
compared bit by bit, and the path that was taken is recorded with its reason. A second
directory beside the first shares its disk: it shows that the path works over several.
"""

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import ssdtrain
from recipes.bench.harness.cli import Bench

STEPS, SKIPPED = 6, 2


def steps(width: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Losses, the median step and the path of one run."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4 * width, width, device=device)
    session = ssdtrain.offload(
        model, plan="offload-all", recompute="off", min_bytes=0, **settings
    )
    losses, seconds = [], []
    for _ in range(STEPS):
        begun = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - begun)
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "losses": losses,
        "step_ms": round(1e3 * median(seconds[SKIPPED:]), 2),
        "path": session.path,
        "fallbacks": {str(k): v for k, v in session.last_step.fallbacks.items()},
    }
    session.close()
    return found


def cell(width: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Both ways of one target."""
    staged, auto = (
        steps(width, {**settings, "gpu_direct": way}) for way in ("off", "auto")
    )
    return {
        "equal": staged.pop("losses") == auto.pop("losses"),
        "staged": staged,
        "auto": auto,
        "auto_over_staged": round(auto["step_ms"] / staged["step_ms"], 3),
    }


def main(bench: Bench, *, directory: Path, width: int = 2048) -> int:
    """All cells."""
    cells = bench.cells({"width": width})
    places = [directory / name for name in ("first", "second")]
    for place in places:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    one, two = [str(places[0])], [str(place) for place in places]
    little = 8 * width * width * 4
    targets: dict[str, dict[str, Any]] = {
        "ssd, one directory": {"target": "ssd", "directory": one},
        "ssd, two directories": {"target": "ssd", "directory": two},
        "tiered": {"target": "tiered", "directory": one, "host_bytes": little},
    }
    for name, settings in targets.items():
        cells.run(name, cell, width, settings, limit_s=60)
    kept = cells.data["cells"].values()
    return int(not all(found.get("equal") for found in kept))
