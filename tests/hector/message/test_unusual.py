"""Ties, nothing to reduce, numbers at the edge, ids that are none, copies."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hector.message.dgl.nn.pytorch as dglnn
from hector.emit.source import literal
from hector.message import GATConv, Graph
from hector.message import functions as fn


@pytest.mark.parametrize("name", ["max", "min"])
def test_equal_messages_share_a_gradient_as_pytorch_has_it(name: str) -> None:
    """`amax` shares it evenly, `max(dim)` gives it to one."""
    edges = torch.tensor([[0, 1, 2, 0], [3, 3, 3, 2]])
    for call in (
        lambda box: getattr(box, f"a{name}")(1),
        lambda box: getattr(box, name)(1).values,
    ):
        graph = Graph(*edges, num_nodes=4)
        h = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
        graph.ndata["h"] = h
        graph.update_all(
            fn.copy_u("h", "m"), lambda n, call=call: {"out": call(n.mailbox["m"])}
        )
        (mine,) = torch.autograd.grad(graph.ndata["out"][3].sum(), h)
        (other,) = torch.autograd.grad(call(h[None, :3]).sum(), h)
        assert torch.equal(mine, other)


def test_a_reduce_function_without_messages_gives_zeros() -> None:
    graph = Graph([], [], num_nodes=3)
    graph.ndata["h"] = torch.ones(3, 4, dtype=torch.float64)
    graph.update_all(
        fn.copy_u("h", "m"), lambda n: {"out": n.mailbox["m"].cumsum(1).sum(1)[:, :2]}
    )
    assert torch.equal(graph.ndata["out"], torch.zeros(3, 2, dtype=torch.float64))


def test_numbers_of_another_kind_are_not_cut() -> None:
    graph = Graph([0, 1], [1, 0], num_nodes=2)
    graph.ndata["count"] = torch.ones(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rows of torch.int64 for 'count', .*float32"):
        graph.apply_nodes(lambda n: {"count": n.data["count"] * 0.5}, [0])


def test_ids_that_no_node_has_are_named() -> None:
    graph = Graph([0, 1], [1, 0], num_nodes=2)
    graph.ndata["h"] = torch.ones(2, 1)
    call = (fn.copy_u("h", "m"), fn.sum("m", "out"))
    with pytest.raises(ValueError, match=r"expected v in \[0, 2\), got -1"):
        graph.pull([-1], *call)
    with pytest.raises(ValueError, match=r"expected u in \[0, 2\), got -1"):
        graph.push([-1], *call)
    with pytest.raises(ValueError, match=r"expected u in \[0, 2\), got 2"):
        graph.send_and_recv(([2], [0]), *call)
    with pytest.raises(ValueError, match=r"u and v of one length, got 2 and 1"):
        graph.send_and_recv(([0, 1], [0]), *call)
    with pytest.raises(ValueError, match=r"expected v in \[0, 2\), got 3"):
        graph.apply_nodes(lambda n: {"h": n.data["h"]}, [3])


def test_a_graph_is_sent_without_what_was_compiled() -> None:
    """A `DataLoader`'s workers send batches; those of one process share programs."""
    graph = Graph([2, 0, 1], [0, 1, 0], num_nodes=3)
    graph.ndata["h"], graph.edata["w"] = torch.randn(3, 2), torch.randn(3, 2)
    call = (fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
    graph.update_all(*call)
    for other in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert other.programs is graph.programs and not other.counts
        other.update_all(*call)
        assert torch.equal(other.ndata["out"], graph.ndata["out"])
        assert torch.equal(other.edata["w"], graph.edata["w"])


def test_slopes_of_elu_keep_their_digits() -> None:
    """exp(x), not elu(x) + 1, whose digits are gone far below 0."""
    x = torch.tensor([-30.0, -9.0, 0.0, 2.0, 1000.0])[:, None].requires_grad_()
    graph = Graph(range(5), range(5), num_nodes=5)
    graph.ndata["x"] = x
    graph.apply_edges(lambda e: {"y": F.elu(e.src["x"])})
    assert graph.counts == {"compiled": 1}
    (mine,) = torch.autograd.grad(graph.edata["y"].sum(), x)
    (other,) = torch.autograd.grad(F.elu(x).sum(), x)
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)


def test_numbers_without_a_literal() -> None:
    graph = Graph([0], [0], num_nodes=1)
    graph.ndata["x"] = torch.ones(1, 2)
    graph.apply_edges(lambda e: {"y": e.src["x"] * 1e39 + math.nan})
    assert graph.edata["y"].isnan().all() and graph.counts == {"compiled": 1}
    assert [literal(v) for v in (0.5, -math.inf)] == ["0.5", 'float("-inf")']


@pytest.mark.parametrize("combine", [fn.u_add_v, fn.u_sub_v, fn.u_mul_v])
def test_a_column_that_both_ends_read_has_its_gradient_rounded_once(
    combine: Callable[..., fn.MessageFunction],
) -> None:
    torch.manual_seed(0)
    graph = Graph(*torch.randint(7, (2, 20)), num_nodes=7)
    rows = torch.randn(7, 4).bfloat16()

    def gradient(h: torch.Tensor) -> torch.Tensor:
        graph.ndata["h"] = h.requires_grad_()
        graph.update_all(combine("h", "h", "m"), fn.mul("m", "out"))
        (found,) = torch.autograd.grad(graph.ndata["out"].float().sum(), h)
        return found

    assert torch.equal(gradient(rows), gradient(rows.float()).bfloat16())


ARGUMENTS: dict[str, tuple[Callable[..., torch.Tensor], float, float]] = {
    "slope": (F.leaky_relu, 0.2, 0.7),
    "alpha": (F.elu, 1.0, 0.5),
    "axis": (lambda h, t: h.unsqueeze(t).sum((1, 2))[:, None], 1, 2),
    "squeezed": (lambda h, t: h.unsqueeze(1).squeeze(t).flatten(1), 1, 0),
    "start": (lambda h, t: h.unsqueeze(2).flatten(t).view(3, -1), 1, 2),
    "view": (lambda h, t: h.view(-1, t, 4 // t).sum(2), 4, 2),
}


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_tensors_read_as_numbers_are_read_in_every_call(name: str, pure: bool) -> None:
    call, first, second = ARGUMENTS[name]
    graph = Graph([0, 1, 2], [0, 1, 2], num_nodes=3)
    h = torch.randn(3, 4, dtype=torch.float64)
    graph.ndata["h"] = h
    t = torch.tensor(first)
    message = fn.pure(lambda e, t: {"m": call(e.src["h"], t)})
    for value in (first, second, first):
        t.fill_(value)
        made = message(t) if pure else lambda e: {"m": call(e.src["h"], t)}
        graph.update_all(made, fn.sum("m", "out"))
        torch.testing.assert_close(graph.ndata["out"], call(h, t))


def test_slopes_that_are_numbers_are_compiled() -> None:
    graph = Graph([0, 1, 2], [0, 1, 2], num_nodes=3)
    graph.ndata["h"] = h = torch.randn(3, 4)
    message = fn.pure(lambda e, t: {"m": F.leaky_relu(e.src["h"], t)})
    for slope in (0.5, 1, True, np.float64(0.25), np.float32(0.75)):
        graph.update_all(message(slope), fn.sum("m", "out"))
        wanted = F.leaky_relu(h, float(slope))
        torch.testing.assert_close(graph.ndata["out"], wanted)
    assert set(graph.counts) == {"compiled"}


@pytest.mark.parametrize("layer", [GATConv(4, 2), dglnn.GATConv(4, 2, 1)])
def test_a_tensor_as_slope_of_attention_is_refused(layer: Any) -> None:
    graph, x = Graph([0, 1, 2], [0, 1, 2], num_nodes=3), torch.randn(3, 4)
    for slope in (0.5, np.float32(0.75)):
        layer.slope = slope
        layer(graph, x)
    layer.slope = torch.tensor(0.2)
    with pytest.raises(ValueError, match="a number as negative_slope, got Tensor"):
        layer(graph, x)
