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


def num_calls(hook: Any) -> int:
    """Calls that went through the hook so far."""
    counted = asdict(hook.counters())
    return sum(count for name, count in counted.items() if name.endswith("_calls"))


def main() -> None:
    """Train for as many steps as the argument says; print one line of JSON."""
    num_steps = int(sys.argv[1])
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda")
    # Steps of some 60 ms, of products that fill the GPU: a step of a few milliseconds
    # differs by more than the hook's target between two processes without it.
    model = model_of(4096, 6).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(8192, 4096, device=device, dtype=torch.bfloat16)
    losses, times = [], []
    hook = shim.loaded()
    calls_before = 0
    with ssdtrain.offload(model, target="host", host_bytes=8 << 30):
        for number in range(num_steps):
            if hook is not None and number == num_steps // 4:
                calls_before = num_calls(hook)
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
        held = segments()
        if held is not None:
            result["segments"] = len(held)
        if hook is not None:
            result["counters"] = asdict(hook.counters())
            result["calls_in_timed_steps"] = num_calls(hook) - calls_before
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
