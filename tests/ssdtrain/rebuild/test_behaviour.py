"""Recipes of users, of long chains, and when off."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ssdtrain
from ssdtrain.rebuild.expression import MAX_CHAIN
from ssdtrain.rebuild.recipes import REGISTERED
from tests.ssdtrain.rebuild.recipe_cases import (
    REFUSED,
    ROWS,
    WIDTH,
    Case,
    Net,
    Result,
    run,
)

ALONE: dict[str, Any] = {"plan": "keep-all", "min_bytes": 0}
NUM_BYTES = ROWS * WIDTH * 4


def rebuilt(case: Case) -> Result:
    """With recipes, after it was compared with the plain run."""
    result = run(case, **ALONE)
    assert result.equals(run(case))
    return result


def test_off_leaves_no_trace() -> None:
    net = Net(lambda net, a: net.drop(net.last(net.norm(F.gelu(a)))))
    settings = {**ALONE, "target": "host"}
    with ssdtrain.offload(net, recompute="off", **settings) as session:
        assert "forward" not in vars(net.drop)
        loss = net(torch.randn(ROWS, WIDTH))
        node = loss.grad_fn
        while node is not None:
            assert not node.metadata
            node = node.next_functions[0][0] if node.next_functions else None
        loss.backward()
        assert not session.steps[0].recipes
        assert session.steps[0].recompute_ms == 0
    with ssdtrain.offload(net, **settings):
        assert "forward" in vars(net.drop)
    assert "forward" not in vars(net.drop)


class Doubled(torch.autograd.Function):
    """A custom function as a fused kernel would be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return doubled(x, factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * x.sign(), None


def doubled(x: Tensor, factor: float) -> Tensor:
    return x.abs() * factor


FUSED = Case("DoubledBackward", lambda net, a: net.last(Doubled.apply(a, 1.5)))


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = set(REGISTERED)
    yield
    for name in set(REGISTERED) - before:
        del REGISTERED[name]


@pytest.mark.usefixtures("clean_registry")
def test_users_recipe() -> None:
    assert FUSED.recipe not in rebuilt(FUSED).reports[0].recipes

    @ssdtrain.recipe(FUSED.recipe)
    def _doubled(node: Any) -> Any:
        return node.rebuilt_by(doubled, node.saved(0), factor=node.constant("factor"))

    assert rebuilt(FUSED).reports[0].recipes[FUSED.recipe] == NUM_BYTES
    with pytest.raises(ValueError, match="registered already"):
        ssdtrain.recipe(FUSED.recipe)(_doubled)
    with pytest.raises(ValueError, match="at least one node"):
        ssdtrain.recipe()


@pytest.mark.usefixtures("clean_registry")
def test_failing_recipe_is_refused_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @ssdtrain.recipe(FUSED.recipe)
    def _doubled(node: Any) -> Any:
        return node.rebuilt_by(doubled, node.saved(0), factor=node.constant("missing"))

    assert rebuilt(FUSED).reports[0].fallbacks[REFUSED] == 1
    assert FUSED.recipe in caplog.text


def chain(net: Net, a: Tensor) -> Tensor:
    for _ in range(2 * MAX_CHAIN):
        a = F.silu(a)
    return net.last(a)


def test_chains_are_bounded() -> None:
    num_bytes = rebuilt(Case("SiluBackward0", chain)).reports[0].recipes
    assert MAX_CHAIN <= num_bytes["SiluBackward0"] / NUM_BYTES < 2 * MAX_CHAIN


def tree(net: Net, a: Tensor) -> Tensor:
    a = a.square().tanh()
    for _ in range(MAX_CHAIN - 2):
        a = a + a
    return net.last(a)


def test_trees_of_sums_are_bounded() -> None:
    assert "AddBackward0" not in rebuilt(Case("", tree)).reports[0].recipes
