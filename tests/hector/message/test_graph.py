"""The graph: user functions, parts of a graph, frames, errors."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.message import Graph
from hector.message import functions as fn
from hector.message.programs import Programs
from hector.message.traced import Trace, UntraceableError

N, E = 12, 40


@pytest.fixture
def graph() -> Graph:
    torch.manual_seed(0)
    made = Graph(torch.randint(N, (E,)), torch.randint(N, (E,)), num_nodes=N)
    made.ndata["h"] = torch.randn(N, 4, dtype=torch.float64, requires_grad=True)
    made.edata["w"] = torch.randn(E, 4, dtype=torch.float64, requires_grad=True)
    return made


def plain(graph: Graph, messages: Tensor, how: str = "sum") -> Tensor:
    _, dst = graph.edges()
    out = messages.new_zeros(graph.num_nodes(), *messages.shape[1:])
    where = dst.view(-1, *(1,) * (messages.dim() - 1)).expand_as(messages)
    return out.scatter_reduce(0, where, messages, how, include_self=False)


LINEAR = nn.Linear(4, 3, dtype=torch.float64)
BIAS = torch.randn(4, dtype=torch.float64)
MESSAGES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "gate": (lambda u, v, e: torch.sigmoid(u + v) * e, True),
    "numbers": (lambda u, v, e: 2 - u / 3 + (-v) ** 2 - e * 0.5, True),
    "captured": (lambda u, v, e: (u * BIAS + BIAS).relu() - v, True),
    "captured left": (lambda u, v, e: BIAS * u + 1 / (v * v + BIAS * BIAS), True),
    "linear": (lambda u, v, e: LINEAR(u) - F.linear(v, LINEAR.weight), True),
    "matrix": (lambda u, v, e: u @ LINEAR.weight.T, True),
    "cat": (lambda u, v, e: torch.cat([u, v, e], -1), True),
    "dot": (lambda u, v, e: (u * v).sum(-1, keepdim=True) * e, True),
    "heads": (lambda u, v, e: u.view(-1, 2, 2) * e.view(-1, 2, 2).mean(2, True), True),
    "functions": (
        lambda u, v, e: F.elu(u) + F.leaky_relu(v, 0.1) + F.gelu(e) + torch.exp(-u * u),
        True,
    ),
    "sines": (lambda u, v, e: torch.sin(u) * torch.cos(v) + torch.tanh(e), True),
    "maximum": (lambda u, v, e: torch.maximum(u, v) - torch.sqrt(e * e + 1), True),
    "clamp": (lambda u, v, e: u.clamp(min=0) + v, False),
    "index": (lambda u, v, e: u[:, :2] * v[:, 2:], False),
    "in place": (lambda u, v, e: (u * 1).relu_() + F.relu(v * 1, inplace=True), False),
    "decision": (lambda u, v, e: u if u.sum() > 0 else v, False),
    "equal": (lambda u, v, e: 1 - (u.round() == 0).double() + v, False),
    "not equal": (lambda u, v, e: (u != 0).double() * v, False),
    "ordered": (lambda u, v, e: (u < v).double() * e + (1 >= e).double(), False),
    "rest": (lambda u, v, e: u % 0.7 + v * e, False),
    "absolute": (lambda u, v, e: abs(u) * v, False),
    "base": (lambda u, v, e: 2**u + v, False),
    "left matrix": (lambda u, v, e: u.sum(0) @ LINEAR.weight.T + v[:, :3], False),
    "permuted": (lambda u, v, e: u.flip(-1) + torch.stack([v, v]).sum(0), False),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_user_messages(graph: Graph, name: str) -> None:
    """Whether traced or run on tensors: the values and gradients of plain PyTorch."""
    call, compiled = MESSAGES[name]
    h, w = graph.ndata["h"], graph.edata["w"]
    src, dst = graph.edges()
    wanted = plain(graph, call(h[src], h[dst], w))

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": call(edges.src["h"], edges.dst["h"], edges.data["w"])}

    graph.update_all(message, fn.sum("m", "out"))
    found = graph.ndata["out"]
    torch.testing.assert_close(found, wanted)
    inputs = [h, w, LINEAR.weight, LINEAR.bias]
    grads = [
        torch.autograd.grad(t.square().sum(), inputs, allow_unused=True)
        for t in (found, wanted)
    ]
    for mine, other in zip(*grads, strict=True):
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other)
        else:
            assert all(g is None or not g.any() for g in (mine, other))
    assert (graph.counts["compiled"] == sum(graph.counts.values())) is compiled
    graph.apply_edges(message)
    torch.testing.assert_close(graph.edata["m"], call(h[src], h[dst], w))


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "==": lambda x: x == 0,
    "!=": lambda x: x != x,
    "<": lambda x: x < 0,
    "<=": lambda x: 1 <= x,
    ">": lambda x: x > x,
    ">=": lambda x: 1 >= x,
    "%": lambda x: x % 2,
    "r%": lambda x: 2 % x,
    "//": lambda x: x // 2,
    "r//": lambda x: 2 // x,
    "r**": lambda x: 2**x,
    "**": lambda x: x**x,
    "r@": lambda x: BIAS @ x,
    "abs": abs,
    "~": lambda x: ~x,
    "float": float,
    "int": int,
    "bool": lambda x: not x,
    "in": lambda x: x in [1.0, 2.0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_without_a_meaning_end_a_trace(name: str) -> None:
    """Python answers some of them by itself: `x == 0` would be False."""
    x = Trace(lambda side, feature: (4,)).feature(fn.Side.SOURCE, "h")
    with pytest.raises(UntraceableError):
        OPERATORS[name](x)


REDUCERS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "sum": (lambda box: box.sum(1), True),
    "mean": (lambda box: torch.mean(box, dim=1), True),
    "max": (lambda box: box.max(dim=1)[0], False),
    "min values": (lambda box: torch.min(box, 1).values, False),
    "amax": (lambda box: torch.amax(box, 1), True),
    "amin": (lambda box: box.amin(1) * 2, True),
    "softmax": (lambda box: (F.softmax(box, dim=1) * box).sum(1), True),
    "both": (lambda box: box.square().sum(1) + box.sum(dim=1).exp(), True),
    "heads": (lambda box: box.sum(-1, keepdim=True).sum(1), True),
    "std": (lambda box: box.std(1, correction=0), False),
    "last": (lambda box: box[:, -1], False),
    "cumulated": (lambda box: box.cumsum(1).sum(1), False),
    "degree": (lambda box: box.sum(1) / box.shape[1], False),
}


@pytest.mark.parametrize("name", REDUCERS)
def test_user_reducers(graph: Graph, name: str) -> None:
    call, compiled = REDUCERS[name]
    h, w = graph.ndata["h"], graph.edata["w"]
    src, dst = graph.edges()
    messages = h[src] * w
    rows = []
    for n in range(N):
        box = messages[dst == n]
        made = call(box[None])[0] if len(box) else None
        rows.append(made)
    shape = next(r for r in rows if r is not None).shape
    wanted = torch.stack([h.new_zeros(shape) if r is None else r for r in rows])
    graph.update_all(
        fn.u_mul_e("h", "w", "m"), lambda nodes: {"out": call(nodes.mailbox["m"])}
    )
    found = graph.ndata["out"]
    there = graph.in_degrees() > 0
    torch.testing.assert_close(found[there], wanted[there])
    for mine, other in zip(
        *(
            torch.autograd.grad(t[there].square().sum(), [h, w])
            for t in (found, wanted)
        ),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)
    assert (graph.counts["compiled"] == sum(graph.counts.values())) is compiled


def test_an_apply_function_is_part_of_the_program(graph: Graph) -> None:
    h = graph.ndata["h"]
    graph.update_all(
        fn.copy_u("h", "m"),
        fn.sum("m", "sum"),
        lambda n: {"out": n.data["sum"] * 2 + n.data["h"]},
    )
    wanted = plain(graph, h[graph.edges()[0]]) * 2 + h
    torch.testing.assert_close(graph.ndata["out"], wanted)
    assert "sum" not in graph.ndata and dict(graph.counts) == {"compiled": 1}
    graph.update_all(
        fn.copy_u("h", "m"),
        fn.sum("m", "sum"),
        lambda n: {"out": LINEAR(n.data["sum"])},
    )
    wanted = LINEAR(plain(graph, h[graph.edges()[0]]))
    torch.testing.assert_close(graph.ndata["out"], wanted)


def test_a_changed_closure_is_seen(graph: Graph) -> None:
    factor = 2.0

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"] * factor}

    h = graph.ndata["h"]
    for factor in (2.0, 3.0):
        graph.update_all(message, fn.sum("m", "out"))
        wanted = plain(graph, h[graph.edges()[0]] * factor)
        torch.testing.assert_close(graph.ndata["out"], wanted)


@pytest.mark.parametrize("score", [(E,), (E, 1), (E, 3, 1), (E, 2, 3, 2)], ids=str)
def test_edge_softmax(graph: Graph, score: tuple[int, ...]) -> None:
    x = torch.randn(score, dtype=torch.float64, requires_grad=True)
    _, dst = graph.edges()
    wanted = torch.empty_like(x)
    for n in dst.unique():
        wanted[dst == n] = torch.softmax(x[dst == n], 0)
    found = graph.edge_softmax(x)
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(x)
    mine, other = (
        torch.autograd.grad((t * weight).sum(), x, retain_graph=True)[0]
        for t in (found, wanted)
    )
    torch.testing.assert_close(mine, other)
    assert not set(graph.edata) - {"w"}


def test_edge_softmax_of_integers_is_refused(graph: Graph) -> None:
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(ValueError, match=f"floating-point scores, got {dtype}"):
            graph.edge_softmax(torch.ones(E, 2, dtype=dtype))
    assert set(graph.edata) == {"w"}


def test_rows_of_more_axes_and_integers(graph: Graph) -> None:
    src, dst = graph.edges()
    x = torch.randn(N, 2, 3, 2, dtype=torch.float64)
    graph.ndata["x"] = x
    graph.update_all(fn.copy_u("x", "m"), fn.mean("m", "out"))
    total = torch.zeros_like(x).index_add(0, dst, x[src])
    degree = graph.in_degrees().clamp(min=1).view(-1, 1, 1, 1)
    torch.testing.assert_close(graph.ndata["out"], total / degree)
    graph.ndata["i"] = torch.arange(N)
    graph.apply_edges(fn.u_sub_v("i", "i", "d"))
    assert torch.equal(graph.edata["d"], src - dst)
    with pytest.raises(ValueError, match="floating-point messages"):
        graph.update_all(fn.copy_u("i", "m"), fn.sum("m", "out"))


# Parts.


def test_pull_updates_the_given_nodes_alone(graph: Graph) -> None:
    h, src = graph.ndata["h"], graph.edges()[0]
    graph.ndata["out"] = old = torch.full((N, 4), 7.0, dtype=torch.float64)
    nodes = torch.tensor([5, 1, 5])
    graph.pull(nodes, fn.copy_u("h", "m"), fn.sum("m", "out"))
    wanted = old.clone()
    wanted[nodes] = plain(graph, h[src])[nodes]
    torch.testing.assert_close(graph.ndata["out"], wanted)
    (mine,) = torch.autograd.grad(graph.ndata["out"].sum(), h)
    (other,) = torch.autograd.grad(plain(graph, h[src])[[1, 5]].sum(), h)
    torch.testing.assert_close(mine, other)


def test_send_and_recv_and_push(graph: Graph) -> None:
    h, w, (src, dst) = graph.ndata["h"], graph.edata["w"], graph.edges()
    ids = torch.tensor([3, 9, 20, 4])
    for call in (ids, (src[ids], dst[ids])):
        graph.ndata["out"] = h * 0 - 1
        graph.send_and_recv(call, fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
        wanted = (h * 0 - 1).detach().clone()
        chosen = ids
        if isinstance(call, tuple):
            pairs = set(zip(src[ids].tolist(), dst[ids].tolist(), strict=True))
            every = enumerate(zip(src.tolist(), dst.tolist(), strict=True))
            chosen = torch.tensor([i for i, pair in every if pair in pairs])
        sums = torch.zeros(N, 4, dtype=torch.float64)
        sums.index_add_(0, dst[chosen], (h[src] * w)[chosen].detach())
        wanted[dst[chosen]] = sums[dst[chosen]]
        torch.testing.assert_close(graph.ndata["out"], wanted)
    graph.push([0, 2], fn.copy_u("h", "m"), fn.max("m", "far"))
    out = torch.isin(src, torch.tensor([0, 2]))
    boxes = {int(n): h[src[out & (dst == n)]].amax(0) for n in dst[out].unique()}
    for n in range(N):
        wanted_row = boxes.get(n, torch.zeros(4, dtype=torch.float64))
        torch.testing.assert_close(graph.ndata["far"][n], wanted_row)


def test_parts_run_user_functions_with_the_callers_ids(graph: Graph) -> None:
    seen: list[Tensor] = []

    def message(edges: Any) -> dict[str, Tensor]:
        seen.append(edges.edges()[2])
        return {"m": edges.src["h"]}

    def reduce(nodes: Any) -> dict[str, Tensor]:
        seen.append(nodes.nodes())
        return {"out": nodes.mailbox["m"].sum(1)}

    graph.send_and_recv([7], message, reduce)
    assert seen[0].tolist() == [7] and seen[1].tolist() == [int(graph.edges()[1][7])]
    graph.apply_edges(fn.copy_u("h", "part"), edges=[1, 3])
    part = graph.edata["part"]
    torch.testing.assert_close(part[[1, 3]], graph.ndata["h"][graph.edges()[0][[1, 3]]])
    assert not part[[0, 2, *range(4, E)]].any()
    graph.apply_nodes(lambda n: {"two": n.data["h"] * 2}, v=[4])
    assert torch.equal(graph.ndata["two"][4], 2 * graph.ndata["h"][4])
    assert not graph.ndata["two"][5].any()


def test_levels() -> None:
    """A node comes behind all that lead to it, in as few steps as its longest path."""
    src = torch.tensor([0, 1, 2, 0, 3, 5])
    dst = torch.tensor([1, 2, 3, 3, 4, 4])
    graph = Graph(src, dst, num_nodes=6)
    levels = [sorted(v.tolist()) for v in graph.topological_levels()]
    assert levels == [[0, 5], [1], [2], [3], [4]]
    graph.ndata["h"] = torch.ones(6, 1)
    graph.prop_nodes(
        graph.topological_levels()[1:], fn.copy_u("h", "m"), fn.sum("m", "h")
    )
    assert graph.ndata["h"].flatten().tolist() == [1, 1, 1, 2, 3, 1]
    ring = Graph(torch.tensor([0, 1, 2]), torch.tensor([1, 0, 0]), num_nodes=3)
    with pytest.raises(ValueError, match="without cycles, 2 nodes"):
        ring.topological_levels()


# Frames and errors.


def test_local_scope_leaves_no_trace(graph: Graph) -> None:
    before = graph.ndata["h"]
    with pytest.raises(RuntimeError, match="inside"), graph.local_scope():
        graph.ndata["h"] = before * 2
        graph.edata["new"] = graph.edata["w"]
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
        raise RuntimeError("inside")
    assert graph.ndata["h"] is before
    assert set(graph.ndata) == {"h"} and set(graph.edata) == {"w"}
    graph.apply_edges(fn.copy_e("w", "w2"))
    torch.testing.assert_close(graph.edata["w2"], graph.edata["w"])


def test_a_scope_may_be_entered_again(graph: Graph) -> None:
    before, scope = sorted(graph.ndata), graph.local_scope()
    for _ in range(2):
        with scope:
            graph.ndata["outer"] = graph.ndata["h"]
            with scope:
                graph.ndata["inner"] = graph.ndata["h"]
            assert "outer" in graph.ndata and "inner" not in graph.ndata
        assert sorted(graph.ndata) == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: g.ndata.update(x=torch.ones(3, 2)), "12 node rows, got"),
        (lambda g: g.edata.update(x=torch.ones(())), "40 edge rows, got"),
        (lambda g: g.update_all(fn.copy_u("no", "m"), fn.sum("m", "o")), "'no', there"),
        (lambda g: g.update_all(fn.copy_u("h", "a"), fn.sum("m", "o")), "one of .'a'."),
        (lambda g: g.update_all(lambda e: 3, fn.sum("m", "o")), "expected a dict"),
        (lambda g: g.send_and_recv([99], None, None), "edges in .0, 40."),
        (lambda g: g.apply_edges(lambda e: {"m": torch.ones(3)}), "with 40 rows"),
        (lambda g: Graph([0, 5], [1, 1], num_nodes=3), "src in .0, 3."),
        (lambda g: Graph([0, 1], [1]), "one length"),
    ],
)
def test_errors_say_what_was_expected(
    graph: Graph, call: Callable[[Graph], Any], words: str
) -> None:
    with pytest.raises((ValueError, KeyError), match=words):
        call(graph)


def test_a_mismatch_of_rows_names_both_features(graph: Graph) -> None:
    graph.edata["odd"] = torch.randn(E, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'h' and 'odd'.*\[1, 4\] and \[1, 3\]"):
        graph.update_all(fn.u_mul_e("h", "odd", "m"), fn.sum("m", "out"))


def test_graphs_share_programs() -> None:
    """A second graph with rows of the same shape is not compiled anew."""
    from hector.message.programs import Programs

    programs = Programs()
    for seed in range(3):
        torch.manual_seed(seed)
        graph = Graph(torch.randint(5, (9,)), torch.randint(5, (9,)), programs=programs)
        graph.ndata["h"] = torch.randn(graph.num_nodes(), 4)
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
        graph.update_all(
            lambda e: {"m": e.src["h"].exp()}, lambda n: {"o": n.mailbox["m"].sum(1)}
        )
    assert len(programs) == 2


def test_pure_functions_are_traced_once_and_get_their_arguments() -> None:
    calls = []

    @fn.pure
    def message(edges: Any, weight: Tensor, power: int) -> dict[str, Tensor]:
        calls.append(power)
        return {"m": (edges.src["h"] * weight) ** power}

    torch.manual_seed(0)
    programs = Programs()
    for seed in range(3):
        graph = Graph(torch.randint(5, (9,)), torch.randint(5, (9,)), programs=programs)
        graph.ndata["h"] = h = torch.randn(graph.num_nodes(), 4, dtype=torch.float64)
        weight = torch.full((1, 4), 1.5 + seed, dtype=torch.float64).requires_grad_()
        graph.update_all(message(weight, 2), fn.sum("m", "out"))
        wanted = plain(graph, (h[graph.edges()[0]] * weight) ** 2)
        torch.testing.assert_close(graph.ndata["out"], wanted)
        mine, other = (
            torch.autograd.grad(t.sum(), weight)[0]
            for t in (graph.ndata["out"], wanted)
        )
        torch.testing.assert_close(mine, other)
    # A trace, and another one that the program is made of.
    assert calls == [2, 2] and len(programs) == 1
    # Rows of another width, and another number, are other programs.
    graph.ndata["h"] = torch.randn(graph.num_nodes(), 1, dtype=torch.float64)
    graph.update_all(message(weight, 2), fn.sum("m", "out"))
    wanted = plain(graph, (graph.ndata["h"][graph.edges()[0]] * weight) ** 2)
    torch.testing.assert_close(graph.ndata["out"], wanted)
    assert len(programs) == 2


def test_a_pure_functions_trace_knows_which_tensors_are_one(graph: Graph) -> None:
    """Traced with one tensor twice, it must not serve two tensors."""
    programs = Programs()
    graph.programs = programs

    @fn.pure
    def message(edges: Any, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"m": edges.src["h"] * left + right}

    torch.manual_seed(1)
    one, two = torch.randn(2, 4, dtype=torch.float64).unbind()
    for left, right in ((one, one), (one, two), (two, one), (two, two)):
        graph.update_all(message(left, right), fn.sum("m", "out"))
        wanted = plain(graph, graph.ndata["h"][graph.edges()[0]] * left + right)
        torch.testing.assert_close(graph.ndata["out"], wanted)
    assert graph.counts["compiled"] == 4 and len(programs) == 2
    # Two functions of a call share places as well.
    apply = fn.pure(lambda nodes, bias: {"out": nodes.data["s"] + bias})
    for bias in (one, two):
        graph.update_all(message(one, one), fn.sum("m", "s"), apply(bias))
        wanted = plain(graph, graph.ndata["h"][graph.edges()[0]] * one + one) + bias
        torch.testing.assert_close(graph.ndata["out"], wanted)


@pytest.mark.parametrize("values", [(True, 1, 1.0), (1.0, 1, True), (0.0, -0.0)])
def test_equal_numbers_of_another_kind_are_other_traces(
    graph: Graph, values: tuple[Any, ...]
) -> None:
    def plainly(h: Tensor, k: Any) -> Tensor:
        if k in (0.0, -0.0):
            return h / k
        return h * {bool: 2.0, int: 3.0, float: 5.0}[type(k)]

    message = fn.pure(lambda edges, k: {"m": plainly(edges.src["h"], k[0])})
    for k in values:
        graph.update_all(message((k,)), fn.sum("m", "out"))
        wanted = plain(graph, plainly(graph.ndata["h"][graph.edges()[0]], k))
        assert torch.equal(graph.ndata["out"].isnan(), wanted.isnan())
        torch.testing.assert_close(graph.ndata["out"], wanted, equal_nan=True)
    assert set(graph.counts) == {"compiled"}


def test_a_pure_functions_values_are_hashable(graph: Graph) -> None:
    message = fn.pure(lambda edges, k: {"m": edges.src["h"] * k[0]})
    with pytest.raises(ValueError, match=r"hashable values .* got \['list'\]"):
        graph.update_all(message([2.0]), fn.sum("m", "out"))


def test_a_pure_function_reads_its_arguments_alone(graph: Graph) -> None:
    message = fn.pure(lambda edges: {"m": edges.src["h"] * BIAS})
    with pytest.raises(ValueError, match="its arguments alone"):
        graph.update_all(message(), fn.sum("m", "out"))


def test_a_part_is_sent_to_another_process() -> None:
    """Alone once its features have been read, else with those of its graph."""
    g = Graph([0, 1, 2, 3], [1, 2, 3, 0], num_nodes=4)
    g.ndata["h"], g.edata["w"] = torch.randn(4, 1000), torch.randn(4)
    part = g.subgraph([2, 1])
    sizes = []
    for _ in range(2):
        sent = pickle.dumps(part)
        sizes.append(len(sent))
        found = pickle.loads(sent)
        assert torch.equal(found.ndata["h"], g.ndata["h"][[2, 1]])
        assert torch.equal(found.edata["w"], part.edata["w"])
        assert torch.equal(copy.deepcopy(part).ndata["h"], part.ndata["h"])
        for frame in (part.ndata, part.edata):
            assert all(name in frame and frame[name] is not None for name in [*frame])
    assert sizes[1] < sizes[0]
