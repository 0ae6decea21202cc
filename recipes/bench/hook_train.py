"""One short deterministic training run; prints losses, step time and hook counters.

Started by `gds.py` with and without the malloc hook preloaded. Activations leave for
pinned host memory, so that the run is ssdtrain's own.
"""

import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ssdtrain
from ssdtrain.storage import shim


def model_of(width: int, depth: int) -> nn.Module:
    """Residual-free MLP blocks: every activation is saved, and leaves."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        layers.append(nn.LayerNorm(width))
    return nn.Sequential(*layers)


def segments() -> list[dict[str, Any]] | None:
    """The caching allocator's segments; None where the allocator has none."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    return list(torch.cuda.memory_snapshot())


def main() -> None:
    """Train for as many steps as the argument says; print one line of JSON."""
    num_steps = int(sys.argv[1])
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda")
    model = model_of(2048, 6).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(4096, 2048, device=device, dtype=torch.bfloat16)
    losses, times = [], []
    with ssdtrain.offload(model, target="host", host_bytes=4 << 30):
        for _ in range(num_steps):
            torch.cuda.synchronize()
            begin = time.monotonic()
            loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times.append(time.monotonic() - begin)
            losses.append(loss.item().hex())
        result: dict[str, Any] = {
            "losses": losses,
            "step_ms": round(1e3 * statistics.median(times[num_steps // 4 :]), 4),
            "allocated_bytes": torch.cuda.memory_allocated(),
            "segments": None,
            "counters": None,
            "coverage": None,
            "recorded_lines": 0,
        }
        hook, held = shim.loaded(), segments()
        if held is not None:
            result["segments"] = len(held)
        if hook is not None:
            result["counters"] = asdict(hook.counters())
            recording = os.environ.get("SSDTRAIN_HOOK_RECORD")
            if recording is not None and Path(recording).exists():
                lines = Path(recording).read_text().splitlines()
                result["recorded_lines"] = len(lines)
            if held is not None:
                coverage = hook.coverage(held)
                result["coverage"] = {
                    **asdict(coverage),
                    "num_unexplained": coverage.num_unexplained,
                }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
