"""The direct path to SSDs next to the staged one, over two directories.

    python -m recipes.bench storage.paths --directory /mnt/nvme0 --budget-s 60

A model trains with all its activations on the SSDs (`ssd`), and with little host memory
in front of them (`tiered`): plain, on the path that a session chooses, and staged
(`gpu_direct=off`), in turns. Losses and weights are compared bit by bit. Host memory
holds a few activations: what is still there when backward asks for it is not read, and
more of it is there in a quick step, so that steps stay as quick or slow as the first.
"""

import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait

TARGETS = ("ssd", "tiered")
SIDES = ("auto", "off")
"""Of `gpu_direct`."""
LAYERS, STEPS, TURNS = 8, 7, 2


def train(
    device: torch.device, width: int, settings: dict[str, Any] | None
) -> tuple[list[Tensor], dict[str, Any]]:
    """Losses and weights; milliseconds of steps, and what the session says."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(device)
    session = None if settings is None else ssdtrain.offload(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(4 * width, width, device=device)
    found, times = [], []
    for _ in range(STEPS):
        begun = wait(device)
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e3 * (wait(device) - begun))
        found.append(loss.detach())
    told: dict[str, Any] = {"step_ms": times[2:]}
    if session is not None:
        told["path"] = session.path
        told["written_bytes"] = sum(step.bytes_written for step in session.steps)
        session.close()
    return [*found, *(p.detach() for p in model.parameters())], told


def cell(bench: Bench, target: str, width: int, places: list[str]) -> dict[str, Any]:
    """Steps on the chosen path and staged.

    Raises:
        RuntimeError: a bit differs, or nothing was written.
    """
    settings = {"target": target, "directory": places, "plan": "offload-all"}
    settings |= {"recompute": "off", "min_bytes": 0}
    settings["host_bytes"] = 48 * width * width  # three activations
    plain, told = train(bench.device, width, None)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    written = dict.fromkeys(SIDES, 0)
    found: dict[str, Any] = {"plain_ms": statistics.median(told["step_ms"])}
    for _, side in itertools.product(range(TURNS), SIDES):
        moved, told = train(bench.device, width, {**settings, "gpu_direct": side})
        if not all(map(torch.equal, plain, moved)):
            raise RuntimeError(f"gpu_direct={side}: losses or weights differ")
        if not told["written_bytes"]:
            raise RuntimeError(f"gpu_direct={side}: nothing was written")
        times[side] += told["step_ms"]
        found[f"{side}_path"] = told["path"]
        written[side] += told["written_bytes"]
    for side in SIDES:
        found[f"{side}_ms"] = round(statistics.median(times[side]), 2)
        found[f"{side}_written_bytes"] = written[side]
    found["equal"] = True
    # What comes too fast for a drive stays: a side may have written less.
    per_byte = [found[f"{side}_ms"] / written[side] for side in SIDES]
    found["auto_over_staged"] = round(per_byte[0] / per_byte[1], 3)
    return found


def main(bench: Bench, *, directory: Path = Path("."), width: int = 2048) -> None:
    """A cell for each target.

    Args:
        width: of a layer; an activation has 16 * width * width bytes
    """
    cells = bench.cells({"width": width})
    with tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as place:
        places = [f"{place}/{name}" for name in ("a", "b")]
        for each in places:
            Path(each).mkdir(mode=0o700)
        for target in TARGETS:
            cells.run(target, cell, bench, target, width, places)
