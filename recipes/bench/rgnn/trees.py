"""TreeLSTM training steps: by levels, batched by hand, and node by node.

    python -m recipes.bench rgnn.trees --out trees.json

Random binary trees of 20 leaves (39 nodes, as Stanford's sentiment treebank has on
average), inputs of 300 and hidden rows of 150 columns (Tai et al., section 5.1). The
levels of a batch are found before on both batched sides. `loop` goes through `LOOP`
trees node by node; its time is scaled to the batch. Medians of CUDA events, forward and
backward to all parameters.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hector.message import Graph, TreeLSTM, batch
from hector.message.trees import Levels
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import times_ms

INS, HIDDEN, LEAVES, LOOP = 300, 150, 20, 8
BATCHES = (256, 1024)


def tree(made: torch.Generator) -> tuple[list[int], list[int]]:
    """Neighbours joined at random until one node is left."""
    left, src, dst, new = list(range(LEAVES)), [], [], LEAVES
    while len(left) > 1:
        i = int(torch.randint(len(left) - 1, (1,), generator=made))
        src += left[i : i + 2]
        dst += [new, new]
        left[i : i + 2] = [new]
        new += 1
    return src, dst


def by_hand(layer: TreeLSTM, lv: Levels, x: Tensor) -> Tensor:
    """What one writes in PyTorch: a level at a time, rows joined."""
    width = HIDDEN
    own = F.linear(x[lv.order], layer.lin.weight, layer.lin.bias)
    h = c = own.new_zeros(0, width)
    for at in lv.levels:
        mine = own[at.first : at.last]
        gates = mine[:, : 3 * width]
        kept = mine.new_zeros(at.last - at.first, width)
        if at.last_edge > at.first_edge:
            child = lv.child[at.first_edge : at.last_edge]
            parent = lv.parent[at.first_edge : at.last_edge] - at.first
            below = h[child]
            total = torch.zeros_like(kept).index_add(0, parent, below)
            gates = gates + total @ layer.hidden[:, : 3 * width]
            f = mine[:, 3 * width :][parent] + below @ layer.hidden[:, 3 * width :]
            kept = kept.index_add(0, parent, torch.sigmoid(f) * c[child])
        i, o, u = gates.chunk(3, 1)
        new = torch.sigmoid(i) * torch.tanh(u) + kept
        h = torch.cat((h, torch.sigmoid(o) * torch.tanh(new)))
        c = torch.cat((c, new))
    return h[lv.position]


def loop(layer: TreeLSTM, edges: tuple[list[int], list[int]], x: Tensor) -> Tensor:
    """One tree, node by node; nodes are numbered children first."""
    width = HIDDEN
    below: dict[int, list[int]] = {}
    for s, d in zip(*edges, strict=True):
        below.setdefault(d, []).append(s)
    own = layer.lin(x)
    h: list[Tensor] = []
    c: list[Tensor] = []
    for n in range(len(x)):
        gates, kept = own[n, : 3 * width], 0
        if n in below:
            total = sum(h[b] for b in below[n])
            gates = gates + total @ layer.hidden[:, : 3 * width]
            for b in below[n]:
                f = own[n, 3 * width :] + h[b] @ layer.hidden[:, 3 * width :]
                kept = kept + torch.sigmoid(f) * c[b]
        i, o, u = gates.chunk(3)
        c.append(torch.sigmoid(i) * torch.tanh(u) + kept)
        h.append(torch.sigmoid(o) * torch.tanh(c[-1]))
    return torch.stack(h)


def cell(size: int, device: torch.device) -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    trees = [tree(made) for _ in range(size)]
    nodes = 2 * LEAVES - 1
    graph = batch(
        [Graph(torch.tensor(s), torch.tensor(d), num_nodes=nodes) for s, d in trees]
    ).to(device)
    torch.manual_seed(0)
    layer = TreeLSTM(INS, HIDDEN).to(device)
    x = torch.randn(size * nodes, INS, device=device)
    seed = torch.randn(size * nodes, HIDDEN, device=device)
    levels = graph.derived(Levels)
    some = min(LOOP, size)

    def stepped(call: Callable[[], Tensor], seed: Tensor) -> Callable[[], Tensor]:
        def step() -> Tensor:
            for p in layer.parameters():
                p.grad = None
            out = call()
            out.backward(seed)
            return out

        return step

    sides = {
        "hector": stepped(lambda: layer(graph, x)[0], seed),
        "by_hand": stepped(lambda: by_hand(layer, levels, x), seed),
        "loop": stepped(
            lambda: torch.cat(
                [
                    loop(layer, trees[i], x[i * nodes : (i + 1) * nodes])
                    for i in range(some)
                ]
            ),
            seed[: some * nodes],
        ),
    }
    found: dict[str, Any] = {"levels": len(levels.levels)}
    outs: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}
    for name, step in sides.items():
        outs[name] = step().detach()
        assert layer.hidden.grad is not None
        grads[name] = layer.hidden.grad.clone()
        count = 3 if name == "loop" else 20
        times = sorted(times_ms(step, device, count))
        scale = size / some if name == "loop" else 1
        found[f"{name}_ms"] = round(times[len(times) // 2] * scale, 4)
    for name in ("by_hand", "loop"):
        part = outs["hector"][: len(outs[name])]
        found[f"error_{name}"] = float((part - outs[name]).abs().max())
        found[f"over_{name}"] = round(found[f"{name}_ms"] / found["hector_ms"], 2)
    difference = (grads["hector"] - grads["by_hand"]).abs().max()
    found["gradient_error"] = float(difference / grads["by_hand"].abs().max())
    return found


def main(bench: Bench, *, batches: tuple[int, ...] = tuple(BATCHES)) -> None:
    """Measure what is missing."""
    about = {"in": INS, "hidden": HIDDEN, "leaves": LEAVES, "loop_trees": LOOP}
    cells = bench.cells(about)
    for size in batches:
        cells.run(f"batch {size}", cell, size, bench.device)
