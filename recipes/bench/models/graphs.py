"""A training step captured into one CUDA graph, with and without ssdtrain in it.

The decoder layers of Qwen3 1.7B's shape (2048 wide, 16 heads over 8, 6144 inside),
bf16, attention by torch, deterministic kernels, loss the mean square of the last hidden
states: nothing in it waits for the host, and 2k tokens a step leave a GPU waiting for
it. `pool` is what the allocator reserves for the graph; parameters and gradients lie
outside. It is more than is in use at once (`peak`), since memory of different segments
is never joined: by up to 0.18 GB of 2.6 here, where a piece as large as attention's
backward wants is missing. So the row that is to need half of the plain graph's pool is
given a budget by which its plan has half of the plain graph's peak. Every replay's
gradients are compared byte by byte with those of the plain graph, on other inputs each
time. Each row is timed in turns with the plain graph, since a GPU that has worked for a
minute is slower than at first. Memory that torch would fill with NaN for the sake of
deterministic kernels is not filled, neither in the plain graph nor in the others. No
profiler may have run in the process: it slows whatever is launched later.

    python -m recipes.bench models.graphs --layers 28 --tokens 2048
"""

import gc
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.bench.harness import cli
from recipes.bench.harness.timing import Clock, wait

HIDDEN, HEADS, GROUPS, HEAD, INSIDE = 2048, 16, 8, 128, 6144
SETTLED_WITHIN_S = 40.0
"""Steps are few, but plain, observed and held ones are among them."""
BUDGET_SHARE = 0.51
"""Of the plain graph's peak, in the row that is given a budget: half, and the 1.9 % of
a budget that plans leave free (`BUDGET_MARGIN`)."""
ROWS: dict[str, dict[str, Any]] = {
    "default": {},
    "budget": {},
    "max_overhead=0.03": {"max_overhead": 0.03},
    "recipes alone": {"plan": "keep-all"},
    "max_overhead=0.1": {"max_overhead": 0.1},
    "all": {"plan": "offload-all"},
}
"""By name: settings of `ssdtrain.offload`."""


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
        before, in_use = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            torch._foreach_zero_(self.grads)
            self.loss = model(x)
            self.loss.backward()
        self.pool_gb = (torch.cuda.memory_reserved() - before) / 1e9
        self.peak_gb = (torch.cuda.max_memory_allocated() - in_use) / 1e9


def eager(model: nn.Module, x: Tensor) -> None:
    """The same, without a graph."""
    torch._foreach_zero_([p.grad for p in model.parameters()])
    model(x).backward()


def ms_of(*runs: Callable[[], None], count: int) -> list[float]:
    """Median device time of a call of each, in turns: first to last, last to first."""
    found: list[list[tuple[Any, Any]]] = [[] for _ in runs]
    clock = Clock(torch.device("cuda"))
    for turn in range(count):
        for number in range(len(runs))[:: -1 if turn % 2 else 1]:
            start = clock.mark()
            runs[number]()
            found[number].append((start, clock.mark()))
    wait()
    return [statistics.median(clock.ms(*marks) for marks in own) for own in found]


def told(plan: Any) -> dict[str, Any] | None:
    """What a plan does, and what it predicts."""
    if plan is None:
        return None
    placed: Counter[str] = Counter()
    for orders in plan.orders.values():
        for order in orders:
            placed[order.placement.name.lower()] += order.num_bytes
    found = {"policy": plan.policy, "placed_bytes": dict(placed)}
    if plan.prediction is None:
        return found
    predicted = vars(plan.prediction)
    names = ("step_ms", "keep_ms", "stall_ms", "recompute_ms", "waits")
    found |= {name: predicted[name] for name in (*names, "peak_bytes")}
    found["keep_peak_bytes"] = predicted["keep_peak_bytes"]
    return found


def settle(model: nn.Module, x: Tensor, session: Any) -> int:
    """Eager steps until they are observed; how many."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    end = time.monotonic() + SETTLED_WITHIN_S
    for number in itertools.count():
        if number >= 3 and session.can_capture:
            return number
        if time.monotonic() > end:
            break
        eager(model, x)
        optimizer.step()
    raise RuntimeError(f"nothing is observed after {SETTLED_WITHIN_S:.0f} s")


def inputs_of(x: Tensor, number: int) -> Tensor:
    """Other inputs for every replay."""
    draw = torch.Generator(x.device).manual_seed(number)
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=draw)


class Side:
    """The model, its plain graph, and rows beside it."""

    def __init__(
        self, layers: int, tokens: int, count: int, budget_share: float
    ) -> None:
        self.budget_share = budget_share
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = Model(layers, tokens).bfloat16()
            self.x = torch.zeros(1, tokens, HIDDEN, dtype=torch.bfloat16)
        self.count = count
        self.x.copy_(inputs_of(self.x, 0))
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        for _ in range(3):
            eager(self.model, self.x)
        (self.eager_ms,) = ms_of(lambda: eager(self.model, self.x), count=10)
        self.plain = Captured(self.model, self.x)
        (self.plain_ms,) = ms_of(self.plain.graph.replay, count=count)

    def row(self, name: str) -> dict[str, Any]:
        """One graph with ssdtrain in it."""
        import ssdtrain

        model, x, plain = self.model, self.x, self.plain
        settings = self.settings_of(name)
        with ssdtrain.offload(model, target="host", **settings) as session:
            num_warm_up = settle(model, x, session)
            began = time.perf_counter()
            graph_plan, report = told(session.graph_plan), session.last_step
            planned_s = time.perf_counter() - began
            began = time.perf_counter()
            ours = Captured(model, x)
            capture_s = time.perf_counter() - began
            num_equal = 0
            for number in range(self.count):
                x.copy_(inputs_of(x, number))
                plain.graph.replay()
                ours.graph.replay()
                pairs = zip(ours.grads, plain.grads, strict=True)
                equal = all(torch.equal(a, b) for a, b in pairs)
                num_equal += equal and torch.equal(ours.loss, plain.loss)
            plain_ms, step_ms = ms_of(
                plain.graph.replay, ours.graph.replay, count=self.count
            )
            return {
                "replays": self.count,
                "byte_equal": num_equal,
                "step_ms": step_ms,
                "plain_ms": plain_ms,
                "step_ratio": step_ms / plain_ms,
                "eager_ratio": step_ms / self.eager_ms,
                "pool_gb": ours.pool_gb,
                "pool_ratio": ours.pool_gb / plain.pool_gb,
                "peak_gb": ours.peak_gb,
                "pinned_gb": session.graph_bytes / 1e9,
                "planned_s": round(planned_s, 2),
                "capture_s": round(capture_s, 2),
                "num_warm_up": num_warm_up,
                "graph_plan": graph_plan,
                "eager_report": None if report is None else report.as_dict(),
            }

    def settings_of(self, name: str) -> dict[str, Any]:
        """The settings of a row."""
        if name == "budget":
            budget_bytes = int(self.budget_share * self.plain.peak_gb * 1e9)
            return {"memory_budget": budget_bytes}
        return ROWS[name]


def main(
    bench: cli.Bench,
    *,
    layers: int = 28,
    tokens: int = 2048,
    replays: int = 50,
    rows: tuple[str, ...] = tuple(ROWS),
    budget_share: float = BUDGET_SHARE,
) -> None:
    """Measure and write the results."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    settings = {"layers": layers, "tokens": tokens, "budget_share": budget_share}
    # Ratios are to the plain graph of the same process.
    cells = bench.cells(settings, anew=True)
    side = Side(layers, tokens, replays, budget_share)
    plain = {"step_ms": side.plain_ms, "pool_gb": side.plain.pool_gb}
    cells.run("eager", lambda: {"step_ms": side.eager_ms})
    cells.run("graph", lambda: {**plain, "peak_gb": side.plain.peak_gb})
    for name in rows:
        cells.run(name, side.row, name, limit_s=SETTLED_WITHIN_S + 25)
        torch.cuda.synchronize()
