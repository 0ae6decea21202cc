"""What is kept beside a graph: it notices writes, and belongs to no one call."""

import ast
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hector
from hector import HeteroGraph
from hector.kept import StaleGraphError
from hector.message import Graph, GraphConv, TreeLSTM
from hector.message import functions as fn
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.sampling import NeighborSampler

ENDS, KINDS = (
    torch.tensor([[0, 1, 2, 3, 3, 0], [1, 2, 1, 0, 2, 2]]),
    torch.arange(6) % 2,
)
SUM = (fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"))
GROUPED = ("median", "softmax", "std", "mul")


def made(**columns: Tensor) -> Graph:
    torch.manual_seed(0)
    graph = Graph(ENDS[0].clone(), ENDS[1].clone(), num_nodes=4)
    graph.ndata["h"] = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.rand(6, 1, dtype=torch.float64)
    graph.edata["w"] = columns.get("w", nn.Parameter(w))
    return graph


def result(graph: Graph) -> Tensor:
    graph.update_all(*SUM)
    return graph.ndata["o"]


def expected(graph: Graph) -> Tensor:
    (src, dst), h = graph.edges(), graph.ndata["h"]
    return torch.zeros_like(h).index_add(0, dst, h[src] * graph.edata["w"])


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda t: t.mul_(2),
    ".data": lambda t: t.data.mul_(2),
    "numpy": lambda t: t.detach().numpy().__imul__(2),
}


@pytest.mark.parametrize("how", WRITES)
def test_edge_features_that_are_written_to(how: str) -> None:
    graph = made()
    for _ in range(2):
        assert torch.allclose(result(graph), expected(graph), rtol=1e-12)
        with torch.no_grad():
            WRITES[how](graph.edata["w"])
    assert torch.allclose(result(graph), expected(graph), rtol=1e-12)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_edge_features_that_were_read_without_gradients(first: Any) -> None:
    graph = made()
    graph.apply_edges(fn.u_add_v("h", "h", "s"))
    with first():
        result(graph)
        graph.edge_softmax(torch.ones(6, 1))
        graph.edata["s"].mean()
    assert graph.edata["s"].requires_grad
    for _ in range(2):
        # A second step has a history of its own.
        loss = result(graph).square().sum() + graph.edata["s"].detach().sum()
        wanted = torch.autograd.grad(expected(graph).square().sum(), graph.edata["w"])
        found = torch.autograd.grad(loss, graph.edata["w"])
        assert torch.allclose(found[0], wanted[0], rtol=1e-12)
    score = torch.zeros(6, 1, requires_grad=True)
    graph.edge_softmax(score).square().sum().backward()


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_features_of_a_part_that_were_read_without_gradients(first: Any) -> None:
    graph = made()
    with first():
        part = graph.subgraph([1, 2, 3])
        result(part)
    loss = result(part).square().sum() + part.edata["w"].sum()
    sources = graph.ndata["h"], graph.edata["w"]
    found = torch.autograd.grad(loss, sources)
    again = made()
    part = again.subgraph([1, 2, 3])
    loss = result(part).square().sum() + part.edata["w"].sum()
    wanted = torch.autograd.grad(loss, (again.ndata["h"], again.edata["w"]))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_columns_that_programs_made_may_be_written_to() -> None:
    graph = made()
    graph.apply_edges(fn.u_add_v("h", "h", "s"))
    graph.apply_edges(fn.copy_e("w", "copy"))
    before = graph.edata["copy"].clone()
    with torch.no_grad(), graph.local_scope():
        graph.edata["s"].fill_(2)
        graph.edata["w"].fill_(7)
    assert bool((graph.edata["s"] == 2).all())
    assert torch.equal(graph.edata["copy"], before)
    graph.update_all(fn.copy_e("s", "m"), fn.sum("m", "o"))
    assert torch.equal(graph.ndata["o"][:, 0], 2.0 * graph.in_degrees())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("how", ["copy_", ".data", "numpy"])
@pytest.mark.parametrize("inference", [False, True])
def test_ids_that_are_written_to(dtype: Any, how: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        src, dst = ENDS.to(dtype).clone()
        src, dst = src.clone(), dst.clone()
    graph = Graph(src, dst, num_nodes=4)
    graph.ndata["h"], graph.edata["w"] = torch.randn(4, 2), torch.rand(6, 1)
    result(graph)
    graph.apply_edges(fn.copy_u("h", "s"))
    rows = graph.ndata["h"][graph.edges()[0]]
    new = torch.tensor([3, 3, 0, 1, 2, 1], dtype=dtype)
    with torch.inference_mode(inference):
        if how == "numpy":
            dst.numpy()[...] = new.numpy()
        else:
            (dst if how == "copy_" else dst.data).copy_(new)
    assert torch.equal(graph.edges()[1], new.long())
    assert torch.allclose(result(graph), expected(graph))
    assert torch.equal(graph.in_degrees(), torch.bincount(new, minlength=4))
    # A column in the old order is the edges' still.
    assert torch.equal(graph.edata["s"], rows)
    graph.update_all(fn.copy_u("h", "m"), fn.median("m", "o"))
    again = Graph(*graph.edges(), num_nodes=4)
    again.ndata["h"] = graph.ndata["h"]
    again.update_all(fn.copy_u("h", "m"), fn.median("m", "o"))
    assert torch.equal(graph.ndata["o"], again.ndata["o"])


def test_degrees_that_a_caller_writes_to() -> None:
    graph = made()
    graph.in_degrees().zero_()
    assert int(graph.in_degrees().sum()) == 6


@pytest.mark.parametrize("aggr", ["mean", "max", *GROUPED])
def test_layers_whose_first_call_was_an_evaluation(aggr: str) -> None:
    torch.manual_seed(0)
    x, conv = torch.randn(4, 4), RGCNConv(4, 4, 2, aggr=aggr)
    with torch.inference_mode():
        graph = HeteroGraph.from_pyg(ENDS, KINDS, num_nodes=4, num_relations=2)
        conv(x, graph)
        conv(x, ENDS, KINDS)
    fresh = copy.deepcopy(conv)
    for edges in ((graph,), (ENDS, KINDS)):
        mine = x.clone().requires_grad_()
        other = x.clone().requires_grad_()
        conv(mine, *edges).square().sum().backward()
        fresh(other, ENDS.clone(), KINDS.clone()).square().sum().backward()
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


def test_a_graph_whose_own_tensors_are_changed_is_refused() -> None:
    graph = HeteroGraph.from_pyg(ENDS, KINDS, num_nodes=4, num_relations=2)
    x = torch.randn(4, 4)
    copies = [pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)]
    for aggr in ("mean", "median"):
        conv = RGCNConv(4, 4, 2, aggr=aggr)
        first = conv(x, graph)
        for other in copies:
            assert torch.equal(conv(x, other), first)
        graph.src.add_(0)
        with pytest.raises(StaleGraphError, match="changed in place; build a new"):
            conv(x, graph)
        graph = copies[0]


@hector.compile
def twice(g: Any, feature: Any) -> Any:
    for n in g.nodes():
        n["a"] = n.feature * 1.0
        n["b"] = n.feature * 1.0
    return g.ndata["a"], g.ndata["b"]


def test_results_share_no_memory() -> None:
    graph = HeteroGraph.from_pyg(ENDS, KINDS, num_nodes=4, num_relations=2)
    x = torch.ones(4, 2)
    a, b = twice(graph, x)
    a.zero_()
    assert bool((b == 1).all()) and bool((x == 1).all())


def test_another_default_device_and_dtype() -> None:
    """Nothing of hector's own follows the program's defaults."""
    torch.manual_seed(0)
    x, pairs = torch.randn(4, 4), [("a", "r", "a"), ("a", "s", "a")]
    dicts = {pairs[0]: ENDS[:, :3], pairs[1]: ENDS[:, 3:]}
    rgcn = {a: RGCNConv(4, 4, 2, aggr=a) for a in ("mean", "max", *GROUPED)}
    rgat, hgt = RGATConv(4, 4, 2), HGTConv(4, 4, (["a"], pairs), 2)
    tree, gcn = TreeLSTM(4, 4), GraphConv(4, 4)

    whole = HeteroGraph.from_pyg(ENDS, KINDS, num_nodes=4, num_relations=2)

    def ready() -> Callable[[], list[Tensor]]:
        """Fresh objects, and what runs on them."""
        graph, w = made(), torch.ones(6, 1)
        ends, kinds = ENDS.clone(), KINDS.clone()
        chain = Graph(*ENDS[:, :2].clone(), num_nodes=4)
        given = {k: e.clone() for k, e in dicts.items()}

        def run() -> list[Tensor]:
            outs = [c(x, ends, kinds) for c in (*rgcn.values(), rgat)]
            outs += [hgt({"a": x}, given)["a"], *tree(chain, x), gcn(graph, x)]
            outs += [result(graph), graph.edge_softmax(w), graph.in_degrees()]
            graph.pull(ENDS[1, :1], *SUM)
            outs += [graph.ndata["o"], NeighborSampler(whole, [2]).sample(chosen)[1]]
            graph.update_all(fn.copy_u("h", "m"), fn.median("m", "o"))
            return [*outs, graph.ndata["o"]]

        return run

    chosen = ENDS[0, :1]
    plain = ready()()
    run = ready()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        found = run()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, plain))
    assert [t.dtype for t in found] == [t.dtype for t in plain]


FACTORIES = (
    *("empty", "zeros", "ones", "full", "arange", "tensor", "rand", "randn"),
    *("randint", "randperm", "eye", "linspace"),
)


def test_every_tensor_of_its_own_is_told_its_device() -> None:
    """But parameters, which are the user's."""
    root, wrong = Path(hector.__file__).parent, []
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        users = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2]
            in ("Parameter", "register_buffer")
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in users:
                continue
            owner, _, name = ast.unparse(node.func).rpartition(".")
            given = {k.arg for k in node.keywords}
            if owner == "torch" and name in FACTORIES and "device" not in given:
                wrong.append(f"{path.relative_to(root)}:{node.lineno} torch.{name}")
    assert not wrong
