"""One side of the malloc hook's benchmark: a training process that is told when to run.

Started by `hook.py` with and without the hook preloaded. Reads `steps N` and `end` from
stdin, one a line; answers each with one line of JSON. Part of the activations leave for
pinned host memory, so that the run is ssdtrain's own; which part does not depend on
time, so that two processes hold the same memory.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ssdtrain
from recipes.bench.harness.timing import wait
from ssdtrain.storage import malloc_hook

NUM_WARM_UPS = 4


def model_of(width: int, depth: int) -> nn.Module:
    """Residual-free MLP blocks: every activation is saved."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        layers.append(nn.LayerNorm(width))
    return nn.Sequential(*layers)


def segments() -> list[dict[str, Any]] | None:
    """The caching allocator's segments; None where the allocator has none."""
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        return None
    return list(torch.cuda.memory_snapshot())


def num_calls(hook: malloc_hook.Hook | None) -> int:
    """Calls that went through the hook so far."""
    counted = {} if hook is None else asdict(hook.counters())
    return sum(count for name, count in counted.items() if name.endswith("_calls"))


def stepper(device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], str]]:
    """The model, and one timed step of it: the loss in hexadecimal.

    Steps of some 60 ms on an H200, of products that fill the GPU: a step of a few
    milliseconds differs by more than the hook's target between two processes without.
    """
    width, rows = (4096, 8192) if device.type == "cuda" else (64, 128)
    model = model_of(width, 6).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(rows, width, device=device, dtype=torch.bfloat16)

    def step(called: nn.Module) -> str:
        loss = called(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item()).hex()

    return model, step


def state(hook: malloc_hook.Hook | None, calls_before: int) -> dict[str, Any]:
    """Counters, the allocator's segments and the lines recorded at this moment."""
    held = segments()
    found: dict[str, Any] = {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "segments": None if held is None else len(held),
        "counters": None,
        "coverage": None,
        "recorded_lines": 0,
        "calls_in_timed_steps": num_calls(hook) - calls_before,
    }
    if hook is None:
        return found
    found["counters"] = asdict(hook.counters())
    recording = os.environ.get("SSDTRAIN_HOOK_RECORD")
    if recording is not None and Path(recording).exists():
        found["recorded_lines"] = len(Path(recording).read_text().splitlines())
    if held is not None:
        coverage = hook.coverage(held)
        unexplained = coverage.num_unexplained
        found["coverage"] = {**asdict(coverage), "num_unexplained": unexplained}
    return found


def main() -> None:
    """Warm up, say so, then do what stdin says."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, step = stepper(device)
    hook = malloc_hook.loaded()
    settings = {"plan": "offload-all", "recompute": "off", "min_bytes": 0}
    room = 1 << (30 if device.type == "cuda" else 18)

    def run(num_steps: int) -> dict[str, Any]:
        times, losses = [], []
        for _ in range(num_steps):
            begin = time.perf_counter()
            losses.append(step(model))  # `item` waits for the device's forward
            times.append(1e3 * (wait(device) - begin))
        return {"losses": losses, "ms": times}

    with ssdtrain.offload(model, target="host", host_bytes=room, **settings) as session:
        print(json.dumps(run(NUM_WARM_UPS)), flush=True)
        calls_before = num_calls(hook)
        for line in sys.stdin:
            word, _, number = line.strip().partition(" ")
            if word == "end":
                break
            print(json.dumps(run(int(number))), flush=True)
        report = session.last_step
        moved = 0 if report is None else report.bytes_reloaded
        print(json.dumps({**state(hook, calls_before), "moved_bytes": moved}))
