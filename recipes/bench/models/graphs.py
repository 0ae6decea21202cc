"""A training step captured into one CUDA graph, with and without ssdtrain in it.

Decoder layers of Qwen3 1.7B's shape (2048 wide, 16 heads over 8, 6144 inside), bf16,
attention by torch, loss the mean square of the last hidden states: nothing in it waits
for the host, and 2k tokens a step leave a GPU waiting for it. `pool` is what the
allocator reserves for the graph; parameters and gradients lie outside. Every replay's
gradients are compared byte by byte with those of the plain graph.

    python -m recipes.bench.models.graphs --layers 12 --tokens 2048
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.bench.common import results
from recipes.bench.common.cells import RESULTS

HIDDEN, HEADS, GROUPS, HEAD, INSIDE = 2048, 16, 8, 128, 6144
SETTLED_WITHIN_S = 40.0
"""A plan is searched for beside training, whose steps here take milliseconds."""


class Layer(nn.Module):
    """A decoder layer: grouped queries, rotary positions, gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.query_norm, self.key_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.query = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.key = nn.Linear(HIDDEN, GROUPS * HEAD, bias=False)
        self.value = nn.Linear(HIDDEN, GROUPS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INSIDE, bias=False)
        self.up = nn.Linear(HIDDEN, INSIDE, bias=False)
        self.down = nn.Linear(INSIDE, HIDDEN, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """(1, tokens, HIDDEN) to the same."""
        tokens, y = x.shape[1], self.norm(x)
        query = self.query_norm(self.query(y).view(1, tokens, HEADS, HEAD))
        key = self.key_norm(self.key(y).view(1, tokens, GROUPS, HEAD))
        value = self.value(y).view(1, tokens, GROUPS, HEAD)
        query, key = (turned(z.transpose(1, 2), *turn) for z in (query, key))
        found = F.scaled_dot_product_attention(
            query, key, value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + self.out(found.transpose(1, 2).reshape(1, tokens, HEADS * HEAD))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions; x is (1, heads, tokens, HEAD)."""
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat((-right, left), -1) * sine


class Model(nn.Module):
    """Layers and a norm."""

    def __init__(self, layers: int, tokens: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN)
        rate = 1e6 ** (-torch.arange(0, HEAD, 2) / HEAD)
        angle = torch.outer(torch.arange(tokens), rate).repeat(1, 2)
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())

    def forward(self, x: Tensor) -> Tensor:
        """(1, tokens, HIDDEN) to the loss."""
        for layer in self.layers:
            x = layer(x, (self.cosine, self.sine))
        return self.norm(x).float().square().mean()


class Captured:
    """Forward and backward in one graph, on gradients of its own."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.grads = [torch.zeros_like(p) for p in model.parameters()]
        for p, grad in zip(model.parameters(), self.grads, strict=True):
            p.grad = grad
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            torch._foreach_zero_(self.grads)
            self.loss = model(x)
            self.loss.backward()
        self.pool_gb = (torch.cuda.memory_reserved() - before) / 1e9


def eager(model: nn.Module, x: Tensor) -> None:
    """The same, without a graph."""
    torch._foreach_zero_([p.grad for p in model.parameters()])
    model(x).backward()


def ms_of(run: Callable[[], None], count: int) -> float:
    """Median device time of a call."""
    found = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        found.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in found)


def settle(model: nn.Module, x: Tensor, session: Any) -> int:
    """Eager steps until the plan is made; how many."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    end = time.monotonic() + SETTLED_WITHIN_S
    for number in itertools.count():
        if number >= 3 and session.is_settled:
            return number
        if time.monotonic() > end:
            break
        eager(model, x)
        optimizer.step()
    raise RuntimeError(f"the plan is not made after {SETTLED_WITHIN_S:.0f} s")


def row(
    model: nn.Module, x: Tensor, plain: Captured, settings: dict[str, Any], count: int
) -> dict[str, Any]:
    """One graph with ssdtrain in it."""
    import ssdtrain

    with ssdtrain.offload(model, target="host", **settings) as session:
        num_warm_up = settle(model, x, session)
        plan = session.plan
        ours = Captured(model, x)
        num_equal = 0
        for number in range(count):
            x.copy_(inputs_of(x, number))
            plain.graph.replay()
            ours.graph.replay()
            pairs = zip(ours.grads, plain.grads, strict=True)
            equal = all(torch.equal(a, b) for a, b in pairs)
            num_equal += equal and torch.equal(ours.loss, plain.loss)
        return {
            "replays": count,
            "byte_equal": num_equal,
            "step_ms": ms_of(ours.graph.replay, count),
            "pool_gb": ours.pool_gb,
            "pinned_gb": session.graph_bytes / 1e9,
            "num_warm_up": num_warm_up,
            "plan": None if plan is None else plan.policy,
        }


def inputs_of(x: Tensor, number: int) -> Tensor:
    """Other inputs for every replay."""
    draw = torch.Generator(x.device).manual_seed(number)
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=draw)


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS / "models" / "graphs.json")
    options = parser.parse_args(argv)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(options.layers, options.tokens).bfloat16()
        x = torch.zeros(1, options.tokens, HIDDEN, dtype=torch.bfloat16)
    x.copy_(inputs_of(x, 0))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        eager(model, x)
    eager_ms = ms_of(lambda: eager(model, x), 10)
    plain = Captured(model, x)
    plain_ms = ms_of(plain.graph.replay, options.replays)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "layers": options.layers,
        "tokens": options.tokens,
        "rows": {
            "eager": {"step_ms": eager_ms},
            "graph": {"step_ms": plain_ms, "pool_gb": plain.pool_gb},
        },
    }
    budget_bytes = int(0.45 * plain.pool_gb * 1e9)
    rows = {
        "recipes alone": {"plan": "keep-all"},
        "default": {},
        "0.1": {"max_overhead": 0.1},
        "budget": {"memory_budget_bytes": budget_bytes},
        "all": {"plan": "offload-all"},
    }
    for name, settings in rows.items():
        began = time.perf_counter()
        try:
            cell = row(model, x, plain, settings, options.replays)
            cell["step_ratio"] = cell["step_ms"] / plain_ms
            cell["eager_ratio"] = cell["step_ms"] / eager_ms
            cell["pool_ratio"] = cell["pool_gb"] / plain.pool_gb
        except Exception as error:
            cell = {"error": f"{type(error).__name__}: {error}"[:600]}
            torch.cuda.synchronize()
        cell["cell_s"] = round(time.perf_counter() - began, 1)
        found["rows"][name] = cell
        print(name, json.dumps(cell), flush=True)
        results.write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
