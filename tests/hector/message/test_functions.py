"""Every built-in message and reduce function against a loop over nodes: values and
gradients in float64 on random graphs."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hector.message import Graph
from hector.message import functions as fn
from hector.message.functions import Combine, MessageFunction, Reducer, Side

PAIRS = [(a, b) for a, b in itertools.product(Side, Side) if a is not b]
MESSAGES: list[Any] = [
    (Combine.COPY, Side.SOURCE, None),
    (Combine.COPY, Side.EDGE, None),
    *((c, a, b) for c in Combine if c is not Combine.COPY for a, b in PAIRS),
]
ROWS = [((), ()), ((6,), (6,)), ((6,), (1,)), ((2, 3), (2, 1)), ((2, 3), (3,))]
"""Shapes of the rows of both operands."""


def random_graph(seed: int) -> tuple[Graph, dict[Side, Tensor]]:
    """Parallel edges, loops and nodes without edges among them."""
    made = torch.Generator().manual_seed(seed)
    nodes = int(torch.randint(1, 14, (1,), generator=made))
    edges = int(torch.randint(0, 60, (1,), generator=made)) if seed else 0
    ends = torch.randint(nodes, (2, edges), generator=made)
    graph = Graph(ends[0], ends[1], num_nodes=nodes)
    every = torch.arange(edges)
    return graph, {Side.SOURCE: ends[0], Side.DESTINATION: ends[1], Side.EDGE: every}


def plain_message(f: MessageFunction, rows: dict[tuple[Side, str], Tensor]) -> Tensor:
    left = rows[f.left]
    if f.right is None:
        return left
    right = rows[f.right]
    while left.dim() < right.dim():
        left = left.unsqueeze(1)
    while right.dim() < left.dim():
        right = right.unsqueeze(1)
    if f.combine is Combine.DOT:
        product = left * right
        return product.sum(-1, keepdim=True) if product.dim() > 1 else product
    operation = {"add": "add", "sub": "sub", "mul": "mul", "div": "div"}
    return getattr(torch, operation[f.combine.value])(left, right)  # type: ignore[no-any-return]


def plain_reduce(kind: Reducer, box: Tensor, lstm: nn.LSTM | None) -> Tensor:
    """One node's messages [degree, ...]."""
    match kind:
        case Reducer.SUM:
            return box.sum(0)
        case Reducer.MEAN:
            return box.mean(0)
        case Reducer.MAX:
            return box.amax(0)
        case Reducer.MIN:
            return box.amin(0)
        case Reducer.STD:
            return box.std(0, correction=0)
        case Reducer.SOFTMAX:
            return (torch.softmax(0.7 * box, 0) * box).sum(0)
        case Reducer.MUL:
            return box.prod(0)
        case Reducer.MEDIAN:
            return box.median(0).values
    assert lstm is not None
    return lstm(box[None])[0][0, -1]  # type: ignore[no-any-return]


def reducer_of(kind: Reducer, lstm: nn.LSTM | None) -> fn.ReduceFunction:
    if kind is Reducer.SOFTMAX:
        return fn.softmax("m", "out", temperature=0.7)
    if kind is Reducer.LSTM:
        assert lstm is not None
        return fn.lstm("m", "out", lstm)
    made: fn.ReduceFunction = getattr(fn, kind.value)("m", "out")
    return made


def check(seed: int, message: Any, kind: Reducer, shapes: Any) -> None:
    graph, ids = random_graph(seed)
    combine, left, right = message
    torch.manual_seed(seed)
    features: dict[tuple[Side, str], Tensor] = {}
    for side, name, shape in ((left, "a", shapes[0]), (right, "b", shapes[1])):
        if side is None:
            continue
        count = graph.num_edges() if side is Side.EDGE else graph.num_nodes()
        # Away from zero: quotients and products keep their digits.
        sign = torch.randint(0, 2, (count, *shape)) * 2 - 1
        value = sign * (0.5 + torch.rand(count, *shape, dtype=torch.float64))
        features[side, name] = value.requires_grad_()
        (graph.edata if side is Side.EDGE else graph.ndata)[name] = value
    f = MessageFunction(combine, (left, "a"), right and (right, "b"), "m")
    rows = {k: v[ids[k[0]]] for k, v in features.items()}
    messages = plain_message(f, rows)
    lstm = None
    if kind is Reducer.LSTM:
        lstm = nn.LSTM(messages.shape[1], 3, batch_first=True, dtype=torch.float64)
    nodes = [messages[ids[Side.DESTINATION] == n] for n in range(graph.num_nodes())]
    shape = (3,) if lstm is not None else messages.shape[1:]
    empty = torch.zeros(shape, dtype=torch.float64)
    wanted = torch.stack(
        [plain_reduce(kind, b, lstm) if len(b) else empty for b in nodes]
    )
    graph.update_all(f, reducer_of(kind, lstm))
    found = graph.ndata["out"]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    weight = torch.randn_like(wanted)
    inputs = [*features.values(), *(lstm.parameters() if lstm is not None else ())]
    grads = [
        torch.autograd.grad((t * weight).sum(), inputs, allow_unused=True)
        if t.requires_grad
        else [None for _ in inputs]
        for t in (found, wanted)
    ]
    for mine, other, value in zip(*grads, inputs, strict=True):
        zero = torch.zeros_like(value)
        mine, other = (zero if g is None else g for g in (mine, other))
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", [k for k in Reducer if k is not Reducer.LSTM])
@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_each_function_with_each_reducer(message: Any, kind: Reducer) -> None:
    place = MESSAGES.index(message) + list(Reducer).index(kind)
    check(1 + place, message, kind, ROWS[place % len(ROWS)])


@pytest.mark.parametrize("shapes", ROWS, ids=str)
@pytest.mark.parametrize("kind", [k for k in Reducer if k is not Reducer.LSTM])
def test_row_shapes(shapes: Any, kind: Reducer) -> None:
    check(100, (Combine.MUL, Side.SOURCE, Side.EDGE), kind, shapes)


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_lstm(seed: int) -> None:
    check(seed, (Combine.MUL, Side.SOURCE, Side.EDGE), Reducer.LSTM, ((5,), (1,)))


@pytest.mark.parametrize("kind", [k for k in Reducer if k is not Reducer.LSTM])
def test_a_graph_without_edges(kind: Reducer) -> None:
    check(0, (Combine.COPY, Side.SOURCE, None), kind, ((6,), ()))


def test_equal_messages_have_no_spread_and_no_gradient() -> None:
    """torch.std's subgradient: not the infinite slope of the root."""
    graph = Graph(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]), num_nodes=2)
    graph.ndata["h"] = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    graph.update_all(fn.copy_u("h", "m"), fn.std("m", "out"))
    graph.ndata["out"].sum().backward()
    assert torch.equal(graph.ndata["out"], torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(graph.ndata["h"].grad, torch.zeros(2, 3, dtype=torch.float64))  # type: ignore[arg-type]


def test_an_lstm_reads_edges_in_the_order_of_their_ids() -> None:
    graph = Graph(torch.tensor([2, 0, 1]), torch.tensor([0, 0, 0]), num_nodes=3)
    x = torch.randn(3, 4)
    lstm = nn.LSTM(4, 4, batch_first=True)
    graph.ndata["h"] = x
    graph.update_all(fn.copy_u("h", "m"), fn.lstm("m", "out", lstm))
    torch.testing.assert_close(
        graph.ndata["out"][0], lstm(x[None, [2, 0, 1]])[0][0, -1]
    )


def test_names_are_dgls() -> None:
    for left, right in PAIRS:
        for name in ("add", "sub", "mul", "div", "dot"):
            full = f"{left.value}_{name}_{right.value}"
            made = getattr(fn, full)("a", "b", "m")
            assert (made.left, made.right) == ((left, "a"), (right, "b"))
            assert made.combine.value == name and full in fn.__all__


@pytest.mark.parametrize("kind", [fn.max, fn.min, fn.median, fn.sum])
def test_what_is_no_number_reaches_its_destination(kind: Any) -> None:
    """Rows of three messages are padded to four for a median: not in front of NaN."""
    graph = Graph([0, 1, 2, 3], [0, 0, 0, 1], num_nodes=4)
    column = torch.tensor([1.0, math.nan, math.nan, 2.0]).double()
    graph.edata["e"] = column[:, None]
    graph.update_all(fn.copy_e("e", "m"), kind("m", "out"))
    assert graph.ndata["out"].isnan().flatten().tolist() == [True, *(False,) * 3]
    assert graph.ndata["out"][1:].flatten().tolist() == [2.0, 0.0, 0.0]


def test_a_trained_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="a number as temperature, got Parameter"):
        fn.softmax("m", "out", nn.Parameter(torch.ones(())))  # type: ignore[arg-type]
