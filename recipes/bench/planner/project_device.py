#!/usr/bin/env python3
"""Activation bytes and step times of plain GPT blocks, to judge `ssdtrain project`.

    python -m recipes.bench planner.project_device --budget-s 60
    python -m recipes.bench planner.project_device --errors project_device.json

No offloading: pre-LN blocks (SDPA, GELU, dropout 0.1) in plain torch, one cell for
each (hidden, layers). Recorded for each cell: bytes of the distinct storages that
autograd saves, parameters left out; what the allocator holds at the end of forward;
times of forward, backward and the SGD update. Backward starts from a given
gradient, so that no loss adds to either. The file is rewritten after every cell.
`--errors` prints the model's estimates for a record, and their errors.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.records import read
from recipes.bench.harness.timing import Clock, Peak

CELLS = ("12288x3", "8192x4", "16384x2")
HEAD_SIZE = 128
DROPOUT = 0.1


class Block(torch.nn.Module):
    """A pre-LN transformer block: [batch, sequence, hidden] to the same shape.

    No dropout inside attention: on a CPU that would turn the fused kernel off.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // HEAD_SIZE
        self.norm_attention = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.projection = torch.nn.Linear(hidden, hidden)
        self.norm_mlp = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each behind a layer norm and before a dropout."""
        batch, sequence, hidden = x.shape
        parts = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        q, k, v = (
            part.view(batch, sequence, self.heads, HEAD_SIZE).transpose(1, 2)
            for part in parts
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, sequence, hidden)
        x = x + F.dropout(self.projection(mixed), DROPOUT, self.training)
        inner = F.gelu(self.up(self.norm_mlp(x)))
        return x + F.dropout(self.down(inner), DROPOUT, self.training)


@contextmanager
def saved_bytes(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of each distinct storage saved for backward (key: its address)."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # Everything saved stays alive in the graph, so addresses are distinct.
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def measure(
    hidden: int,
    layers: int,
    device: torch.device,
    *,
    batch: int,
    sequence: int,
    steps: int,
) -> dict[str, Any]:
    """One cell: bytes saved, allocator level, and the median times."""
    gpu = device.type == "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        model = torch.nn.Sequential(*(Block(hidden) for _ in range(layers)))
        model = model.to(torch.bfloat16)
        shape = (batch, sequence, hidden)
        x = torch.randn(shape, dtype=torch.bfloat16)
        gradient = torch.randn(shape, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    times: list[list[float]] = []
    clock = Clock(device)
    with saved_bytes(model) as found:
        level = torch.cuda.memory_allocated() if gpu else 0
        out = model(x)
        held = torch.cuda.memory_allocated() - level if gpu else None
    saved = sum(found.values())
    out.backward(gradient)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    del out
    memory = Peak(device)
    for _ in range(steps + 1):
        marks = [clock.mark()]
        out = model(x)
        marks.append(clock.mark())
        out.backward(gradient)
        marks.append(clock.mark())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        marks.append(clock.mark())
        times.append(clock.between(marks))
    medians = [statistics.median(column) for column in zip(*times[1:], strict=True)]
    return {
        "hidden": hidden,
        "layers": layers,
        "batch": batch,
        "sequence": sequence,
        "saved_bytes": saved,
        "allocated_after_forward_bytes": held,
        "peak_bytes": memory.most if gpu else None,
        "forward_ms": medians[0],
        "backward_ms": medians[1],
        "update_ms": medians[2],
        "all_ms": times,
    }


def matmul_tflops(device: torch.device, seconds: float = 3.0) -> dict[str, float]:
    """bf16 8192^3 product (256^3 without a GPU), in TFLOP/s: of the best burst, and
    sustained after some seconds, when power and heat have lowered the clock."""
    size = 8192 if device.type == "cuda" else 256
    a = torch.randn(size, size, device=device).to(torch.bfloat16)
    runs, clock = [], Clock(device)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(runs) < 4:
        start = clock.mark()
        for _ in range(20):
            a @ a
        runs.append(clock.ms(start, clock.mark()) / 20)
    late = statistics.median(runs[-max(1, len(runs) // 4) :])
    flops = 2 * size**3
    return {"burst": flops / min(runs) / 1e9, "sustained": flops / late / 1e9}


def compare(record: dict[str, Any], gpu_name: str) -> str:
    """The table of docs/project.md: measured, estimated, error."""
    from ssdtrain.tools.project.assumptions import Assumptions
    from ssdtrain.tools.project.cases import bert
    from ssdtrain.tools.project.layer import saved_bytes as estimated_bytes
    from ssdtrain.tools.project.model import Case, layer_seconds
    from ssdtrain.tools.project.tables import GPUS, find

    head = "| H, L | saved GB | estimate | forward ms | burst | sustained | back/fwd |"
    lines = [head, "|--" * 7 + "|"]
    for cell in record["cells"].values():
        model = bert(cell["hidden"], cell["layers"])
        case = Case(
            name="device",
            model=dataclasses.replace(model, sequence=cell["sequence"]),
            gpu=find(GPUS, gpu_name, "GPU"),
            gpus=1,
            batch=cell["batch"],
            micro_batch=cell["batch"],
        )
        saved = model.layers * estimated_bytes(case.model, case.split())
        error = saved / cell["saved_bytes"] - 1
        row = [f"{cell['saved_bytes'] / 1e9:.2f}", f"{saved / 1e9:.2f} ({error:+.1%})"]
        row.append(f"{cell['forward_ms']:.1f}")
        for rate in ("burst", "sustained"):
            timed = dataclasses.replace(case, tflops=record["matmul_tflops"][rate])
            forward = 1e3 * model.layers * layer_seconds(timed, Assumptions())
            row.append(f"{forward:.1f} ({forward / cell['forward_ms'] - 1:+.1%})")
        row.append(f"{cell['backward_ms'] / cell['forward_ms']:.2f}")
        lines.append(f"| {model.hidden}, {model.layers} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(
    bench: Bench,
    *,
    batch: int = 16,
    sequence: int = 1024,
    steps: int = 5,
    shapes: tuple[str, ...] = CELLS,
    errors: Path | None = None,
    gpu: str = "h200-sxm",
) -> None:
    """Run the cells that fit the time budget, most valuable first.

    Args:
        shapes: hidden x layers
        errors: of this record: print them, run nothing
        gpu: its name in the GPU table
    """
    if errors:
        print(compare(read(errors), gpu))
        return
    cells, device = bench.cells(), bench.device
    cells.fact("matmul_tflops", matmul_tflops(device))
    for name in shapes:
        hidden, layers = map(int, name.split("x"))
        own = {"batch": batch, "sequence": sequence, "steps": steps}
        cells.run(name, partial(measure, hidden, layers, device, **own))
