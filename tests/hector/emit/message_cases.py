"""Message passing through generated kernels against the same calls in float64.

Run by test_kernels.py in a process of its own, like kernel_cases.py.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hector.message import (
    GATConv,
    GatedGCNConv,
    GINConv,
    GMMConv,
    Graph,
    GraphConv,
    HeteroGraph,
    SAGEConv,
    batch,
)
from hector.message import functions as fn
from hector.message.dataloading import MultiLayerFullNeighborSampler
from hector.message.programs import Programs
from hector.runtime import Backend, Options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, E = 24, 90
MUL, SUB, DOT = (getattr(fn, f"u_{n}") for n in ("mul_e", "sub_v", "dot_v"))
KERNELS = Programs(Options(backend=Backend.TRITON))
ORACLE = Programs(Options(backend=Backend.REFERENCE))


def both(seed: int) -> tuple[Graph, Graph]:
    """One graph for generated kernels, and for the oracle in float64."""
    made = torch.Generator().manual_seed(seed)
    ends = torch.randint(N, (2, E), generator=made).to(DEVICE)
    return tuple(  # type: ignore[return-value]
        Graph(ends[0], ends[1], num_nodes=N, programs=p) for p in (KERNELS, ORACLE)
    )


def rows(*shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(shape, device=DEVICE)
    return x.requires_grad_(), x.detach().double().requires_grad_()


def same(found: Tensor, wanted: Tensor, inputs: tuple[Any, Any]) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)
    weight = torch.randn_like(found)
    mine, other = (
        torch.autograd.grad((v * weight.to(v.dtype)).sum(), i)
        for v, i in zip((found, wanted), inputs, strict=True)
    )
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4)


CASES: list[tuple[Any, Any, str]] = [
    (fn.copy_u("h", "m"), ((20,), (1,)), "sum"),
    (fn.copy_e("w", "m"), ((20,), (3, 4)), "min"),
    (MUL("h", "w", "m"), ((2, 9), (2, 1)), "max"),
    (SUB("h", "h", "m"), ((17,), (1,)), "std"),
    (DOT("h", "h", "m"), ((17,), (1,)), "softmax"),
    (MUL("h", "w", "m"), ((17,), (1,)), "mean"),
]


@pytest.mark.parametrize(("message", "shapes", "kind"), CASES)
def test_built_in_functions(message: Any, shapes: Any, kind: str) -> None:
    torch.manual_seed(0)
    h, w = rows(N, *shapes[0]), rows(E, *shapes[1])
    used = [s[1] for s in (message.left, message.right) if s is not None]
    found, inputs = [], []
    for i, g in enumerate(both(1)):
        g.ndata["h"], g.edata["w"] = h[i], w[i]
        g.update_all(message, getattr(fn, kind)("m", "out"))
        assert dict(g.counts) == {"compiled": 1}
        found.append(g.ndata["out"])
        inputs.append([x[i] for n, x in (("h", h), ("w", w)) if n in used])
    same(found[0], found[1], (inputs[0], inputs[1]))


def test_user_functions_and_edges() -> None:
    torch.manual_seed(0)
    h, w, b = rows(N, 20), rows(E, 20), rows(20)
    found = []
    for i, g in enumerate(both(2)):
        g.ndata["h"], g.edata["w"] = h[i], w[i]
        bias = b[i]

        def message(e: Any, bias: Tensor = bias) -> dict[str, Tensor]:
            return {"m": torch.sigmoid(e.src["h"] + e.dst["h"] + bias) * e.data["w"]}

        def reduce(n: Any) -> dict[str, Tensor]:
            soft = F.softmax(n.mailbox["m"], dim=1) * n.mailbox["m"]
            return {"s": soft.sum(1) + n.mailbox["m"].amax(1)}

        g.update_all(message, reduce, lambda n: {"out": n.data["s"] - n.data["h"]})
        g.apply_edges(message)
        assert dict(g.counts) == {"compiled": 2}
        src = g.edges()[0]
        found.append(
            g.ndata["out"]
            + g.edata["m"].new_zeros(N, 20).index_add(0, src, g.edata["m"])
        )
    same(found[0], found[1], ((h[0], w[0], b[0]), (h[1], w[1], b[1])))


LAYERS: dict[str, Any] = {
    "gcn": lambda: GraphConv(12, 8),
    "sage": lambda: SAGEConv(12, 8),
    "sage std": lambda: SAGEConv(12, 8, "std"),
    "gin": lambda: GINConv(torch.nn.Linear(12, 8), 0.2),
    "gat": lambda: GATConv(12, 8, 2),
    "gated": lambda: GatedGCNConv(12),
    "gmm": lambda: GMMConv(12, 8, 3, 4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().to(DEVICE)
    double = LAYERS[name]().to(DEVICE, torch.float64)
    double.load_state_dict(layer.state_dict())
    extra = {"gated": rows(E, 12), "gmm": rows(E, 3)}.get(name)
    x = rows(N, 12)
    found, inputs = [], []
    for i, (g, m) in enumerate(zip(both(3), (layer, double), strict=True)):
        out = m(g, x[i]) if extra is None else m(g, x[i], extra[i])
        found.append(out[0] if isinstance(out, tuple) else out)
        inputs.append([x[i], *m.parameters()])
    same(found[0], found[1], (inputs[0], inputs[1]))


def test_batches_and_parts_share_kernels() -> None:
    """Bounded arrays: the second batch of other sizes is right, and not compiled."""
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        found = []
        for programs, dtype in ((KERNELS, torch.float32), (ORACLE, torch.float64)):
            made = torch.Generator().manual_seed(seed)
            graphs = []
            for _ in range(seed + 1):
                ends = torch.randint(6, (2, 11), generator=made).to(DEVICE)
                g = Graph(ends[0], ends[1], num_nodes=6, programs=programs)
                g.ndata["h"] = torch.randn(6, 5, generator=made).to(DEVICE, dtype)
                graphs.append(g)
            whole = batch(graphs)
            whole.pull([0, 3], fn.copy_u("h", "m"), fn.mean("m", "out"))
            whole.update_all(fn.copy_u("h", "m"), fn.max("m", "far"))
            found.append(torch.cat((whole.ndata["out"], whole.ndata["far"])).double())
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [5, 64])
def test_levels_of_trees(width: int) -> None:
    """The level's kernels against PyTorch's operations."""
    from hector.message.tree_kernels import TritonCell
    from hector.message.trees import Levels, TorchCell, run_levels

    made = torch.Generator().manual_seed(1)
    trees = []
    for nodes in (1, 6, 9):
        parents = [int(torch.randint(i, (1,), generator=made)) for i in range(1, nodes)]
        src = torch.arange(1, nodes, device=DEVICE)
        dst = torch.tensor(parents, dtype=torch.int64, device=DEVICE)
        trees.append(Graph(src, dst, num_nodes=nodes))
    levels = Levels(batch(trees))
    assert levels.forest
    x, u = rows(16, 4 * width), rows(width, 4 * width)
    found = [
        torch.cat(run_levels(x[i], u[i], levels, cell), 1)
        for i, cell in enumerate((TritonCell, TorchCell))
    ]
    same(found[0], found[1], ((x[0], u[0]), (x[1], u[1])))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("message", "shapes", "kind"), CASES)
def test_two_kinds_of_nodes(
    message: Any, shapes: Any, kind: str, sampled: bool
) -> None:
    """Relations, and blocks: sources and destinations under one name, unequally
    many."""
    made = torch.Generator().manual_seed(len(kind))
    seeds = torch.randperm(N, generator=made).to(DEVICE)[:7]
    typed = ("a", "r", "b")
    src = torch.randint(N, (E,), generator=made).to(DEVICE)
    dst = torch.randint(9, (E,), generator=made).to(DEVICE)
    found, inputs = [], []
    x, y, w = rows(N, *shapes[0]), rows(9, *shapes[0]), rows(E, *shapes[1])
    for programs, h, v, e in zip((KERNELS, ORACLE), x, y, w, strict=True):
        g = HeteroGraph({typed: (src, dst)}, {"a": N, "b": 9}, programs=programs)
        g.nodes["a"].data["h"], g.nodes["b"].data["h"] = h, v
        g.edata["w"] = e
        leaves = [t for t in (h, v, e) if reads(message, t, (h, v, e))]
        if sampled:
            ids = {"b": seeds[seeds < 9]}
            g = MultiLayerFullNeighborSampler(1).sample(g, ids)[2][0]
        g.update_all(message, getattr(fn, kind)("m", "o"), etype=typed)
        assert set(g[typed].counts) == {"compiled"}
        found.append(g.dstnodes["b"].data["o"])
        inputs.append(leaves)
    same(found[0], found[1], (inputs[0], inputs[1]))


def reads(message: Any, t: Tensor, columns: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether a message function reads the feature of a side."""
    sides = [message.left[0], *([] if message.right is None else [message.right[0]])]
    order = (fn.Side.SOURCE, fn.Side.DESTINATION, fn.Side.EDGE)
    return any(t is c and s in sides for c, s in zip(columns, order, strict=True))
