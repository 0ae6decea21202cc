"""Compiled recipes: what is asked again at every step, and what a change does.

[Note: how it is asked here]
A program runs twice under a session that rebuilds everything. The first run's recipe is
compiled; the second run's tensor is offered to it.
"""

import gc
import importlib.util
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.rebuild.compiled import Compiled
from ssdtrain.rebuild.expression import Expression
from ssdtrain.rebuild.graph import AutogradGraph
from ssdtrain.rebuild.node import RecipeSearch
from ssdtrain.rebuild.recipes import REGISTERED

sys.path.insert(0, str(Path(__file__).parent))
from recipe_cases import CASES, Net

SPEC = importlib.util.spec_from_file_location(
    "ssdtrain.rebuild_watch", Path(__file__).parent / "compiled_watch.py"
)
assert SPEC is not None and SPEC.loader is not None
MODULE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MODULE)
Watch: Any = MODULE.Watch
ALONE: dict[str, Any] = {"target": "host", "plan": "keep-all", "min_bytes": 0}
ROWS, WIDTH = 6, 16


def twice(
    net: nn.Module, first: Callable[[], Tensor], second: Callable[[], Tensor]
) -> Any:
    with ssdtrain.offload(net, **ALONE) as session:
        watch = Watch(session)
        kept = [first()]
        watch.again()
        kept.append(second())
        del kept
    return watch


class Body(nn.Module):
    """Any body between two linears."""

    def __init__(self, body: Callable[["Body", Tensor, Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor, how: Any) -> Tensor:
        return self.last(self.body(self, self.first(x), how)).sum()


def answers(
    body: Callable[[Body, Tensor, Any], Tensor], before: Any, after: Any
) -> list[bool]:
    """What compiled recipes of `before` say of a forward of `after`."""
    net = Body(body)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    watch = twice(net, lambda: net(x, before), lambda: net(2 * x, after))
    assert all(watch.equal)
    return watch.answers


@pytest.mark.parametrize("name", [name for name in CASES if "mask" not in name])
def test_every_recipe_is_right_of_the_next_step(name: str) -> None:
    case = CASES[name]
    net = Net(case.body).to(case.dtype)
    x = torch.randn(ROWS, WIDTH, dtype=case.dtype)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            return net(x)

    watch = twice(net, lambda: forward(x), lambda: forward(x + 1))
    recipes = [each.expression.recipe for each in watch.known if each is not None]
    assert case.recipe in recipes
    assert all(watch.answers) and len(watch.answers) == len(recipes)
    assert all(watch.equal) and len(watch.equal) == len(recipes)


# Each pair: a program whose second run differs in one answer.


def gelu(net: Body, a: Tensor, how: str) -> Tensor:
    return F.gelu(a, approximate=how)


def activated(net: Body, a: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
    return how(a)


def scaled(net: Body, a: Tensor, how: float) -> Tensor:
    return torch.pow(a, how)


def normed(net: Body, a: Tensor, how: float) -> Tensor:
    return F.layer_norm(a, (WIDTH,), net.norm.weight, net.norm.bias, how)


def unbiased(net: Body, a: Tensor, how: bool) -> Tensor:
    bias = net.norm.bias if how else None
    return F.layer_norm(a, (WIDTH,), net.norm.weight, bias, 1e-5)


def overwritten(net: Body, a: Tensor, how: bool) -> Tensor:
    y = F.gelu(a)
    if how:
        a.data = a.data  # leaves the version
        with torch.no_grad():
            a.add_(1)
    return y


def rewritten(net: Body, a: Tensor, how: bool) -> Tensor:
    y = F.gelu(a)
    if how:
        with torch.no_grad():
            y.clamp_(min=0)
    return y


def swapped(net: Body, a: Tensor, how: bool) -> Tensor:
    first, second = a, net.norm(a)
    y = F.silu(second if how else first) * F.silu(first)
    return y * y


@pytest.mark.parametrize(
    ("body", "before", "after"),
    [
        (gelu, "none", "tanh"),
        (activated, F.gelu, F.silu),
        (activated, F.silu, F.softplus),
        (normed, 1e-5, 1e-12),
        (unbiased, True, False),
        (unbiased, False, True),
        (overwritten, False, True),
        (rewritten, False, True),
    ],
)
def test_another_answer_is_noticed(body: Any, before: Any, after: Any) -> None:
    assert all(answers(body, before, before))
    assert answers(body, before, before)
    assert not all(answers(body, before, after))


def test_an_exponent_of_minus_zero_is_another_number() -> None:
    assert all(answers(scaled, 0.0, 0.0))
    assert not all(answers(scaled, 0.0, -0.0))


class Nobody:
    """Keeps nothing."""

    def is_altered(self) -> bool:
        """No."""
        return False


def other_now(graph: AutogradGraph, at: int, place: int) -> bool:
    """Answers as `has_edge` does while it is searched for, and not later."""
    return len(graph.owners) == 1


@pytest.mark.parametrize(
    ("read", "holds"), [(AutogradGraph.has_edge, True), (other_now, False)]
)
def test_two_reads_with_equal_answers_are_two_guards(read: Any, holds: bool) -> None:
    made = torch.ones(2, requires_grad=True).sin()
    nobody: Any = Nobody()
    graph = AutogradGraph(made, nobody, cast(Any, None))
    graph.owners.append(0)
    search = RecipeSearch(graph, {})
    for each in (AutogradGraph.has_edge, read):
        assert search.ask(each, 0, 0) is True
    plain = Expression(recipe="sin", function=torch.sin, operands=(), constants=())
    compiled = Compiled.of(plain, search, made.detach())
    assert compiled is not None
    assert compiled.holds(AutogradGraph(made, nobody, cast(Any, None))) == holds


def test_another_operand_of_the_same_layout_is_taken_not_the_old_one() -> None:
    assert all(answers(swapped, False, False))
    # What it was made from is read from the graph, so it may be another tensor.
    assert all(answers(swapped, True, True))


def test_a_graph_that_was_compiled_is_not_held() -> None:
    net = Body(gelu)
    x = torch.randn(ROWS, WIDTH)
    with ssdtrain.offload(net, **ALONE) as session:
        watch = Watch(session)
        loss = net(x, "none")
        assert loss.grad_fn is not None
        mark = nn.Module()
        loss.grad_fn.next_functions[0][0].metadata["mark"] = mark
        seen = weakref.ref(mark)
        del mark
        del loss
        gc.collect()
        assert any(watch.known)
        assert session.cache.is_idle
        assert seen() is None


def test_a_recipe_that_looks_past_its_producer_is_not_compiled() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    def look(node: Any) -> Any:
        assert node.node is not None
        return node.rebuilt_by(torch.mul, node.saved(0), 2)

    body = Body(lambda net, a, how: Doubled.apply(a))

    def forward() -> Tensor:
        return body(torch.ones(ROWS, WIDTH), None)

    ssdtrain.recipe("DoubledBackward")(look)
    try:
        watch = twice(body, forward, forward)
    finally:
        del REGISTERED["DoubledBackward"]
    assert watch.known.count(None) == len(watch.known)
