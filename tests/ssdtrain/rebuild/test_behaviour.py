"""Recipes under in-place changes, repeated backwards, sharing, and when off."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache.rebuilder import Rebuilder
from ssdtrain.cache.record import RecordView
from ssdtrain.cache.weights import COPIED_BYTES, Weights
from ssdtrain.counters import Fallback
from ssdtrain.errors import InPlaceError
from ssdtrain.rebuild.expression import MAX_CHAIN
from ssdtrain.rebuild.recipes import REGISTERED
from tests.ssdtrain.bits import same_bits

ROWS, WIDTH = 4, 8
REFUSED = Fallback.RECIPE_REFUSED.value
UNSAVED = Fallback.RECIPE_UNSAVED.value
ALONE: dict[str, Any] = {"target": "host", "plan": "keep-all", "min_bytes": 0}
AWAY = {**ALONE, "plan": "offload-all", "window_bytes": 1}


class Net(nn.Module):
    """Any body between two linears."""

    def __init__(self, body: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.first(x)).float().sum()


def gradients(net: Net) -> list[Tensor]:
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return found


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return same_bits(ours, theirs)


def source() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def backward(net: Net, autocast: bool = False) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = net(source())
    loss.backward()
    return gradients(net)


def test_input_changed_after_both_were_saved_raises() -> None:
    def body(net: Net, a: Tensor) -> Tensor:
        y = net.last(F.gelu(a))
        a.add_(1)
        return y

    net = Net(body)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        backward(net)
    with ssdtrain.offload(net, **ALONE), pytest.raises(InPlaceError):
        backward(net)


def test_input_changed_before_the_output_was_saved_is_refused() -> None:
    seen = []

    def body(net: Net, a: Tensor) -> Tensor:
        y = F.gelu(a)
        a.add_(1)
        handle_of(session, y)
        return net.last(y)

    def handle_of(session: ssdtrain.Session, y: Tensor) -> None:
        seen.append(session.cache.pack(y).source)

    net = Net(body)
    with ssdtrain.offload(net, **ALONE) as session:
        loss = net(source())
        assert isinstance(seen[0], RecordView)
        assert (
            session.cache.ledger.counters.take().fallbacks[Fallback.RECIPE_REFUSED] >= 1
        )
        with pytest.raises(InPlaceError):
            loss.backward()


def test_output_changed_in_place_is_another_tensor() -> None:
    def body(net: Net, a: Tensor) -> Tensor:
        y = F.silu(a)
        first = net.last(y.clone())
        y = F.silu(a)
        y.mul_(2)
        return first + net.other(y)

    net = Net(body)
    theirs = backward(net)
    with ssdtrain.offload(net, **ALONE):
        assert same(backward(net), theirs)


def test_hidden_intermediate_changed_under_no_grad() -> None:
    """[Note: unsaved tensors]: nothing saves `y`, so no version tells."""

    def body(net: Net, a: Tensor) -> Tensor:
        y = net.norm(a.float())
        with torch.no_grad():
            y.mul_(3)
        return net.last(net.norm(net.other(y).float()))

    net = Net(body)
    theirs = [backward(net, autocast=True) for _ in range(2)]
    with ssdtrain.offload(net, **ALONE) as session:
        ours = [backward(net, autocast=True) for _ in range(2)]
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    (report,) = session.steps
    assert report.fallbacks[UNSAVED] >= 1
    # The second norm's cast is rebuilt through its norm, an argument of the linear.
    assert report.recipes["ToCopyBackward0"] > 0


@pytest.mark.parametrize("settings", [ALONE, AWAY], ids=["alone", "away"])
def test_backward_twice(settings: dict[str, Any]) -> None:
    def body(net: Net, a: Tensor) -> Tensor:
        return net.drop(net.last(net.norm(F.gelu(a))))

    def twice(net: Net) -> list[Tensor]:
        torch.manual_seed(2)
        loss = net(source())
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(net)

    net = Net(body)
    theirs = twice(net)
    with ssdtrain.offload(net, **settings) as session:
        assert same(twice(net), theirs)
        assert session.cache.is_idle


def test_handles_share_one_rebuilt_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(net: Net, a: Tensor) -> Tensor:
        y = F.gelu(a)
        return net.last(y) + net.other(y.view(-1, WIDTH)) + net.last(y * 2)

    runs = []
    rebuild = Rebuilder._rebuild

    def counted(self: Rebuilder, rebuilt: Any) -> Tensor:
        runs.append(rebuilt.expression.recipe)
        return rebuild(self, rebuilt)

    monkeypatch.setattr(Rebuilder, "_rebuild", counted)
    net = Net(body)
    theirs = backward(net)
    with ssdtrain.offload(net, **ALONE) as session:
        assert same(backward(net), theirs)
    assert runs.count("GeluBackward0") == 1
    assert session.steps[0].recipes["GeluBackward0"] == ROWS * WIDTH * 4


def test_inputs_are_prefetched_where_their_recipe_runs() -> None:
    """Backward needs `a` for the recipe of gelu(a), long before gelu's own node."""

    def body(net: Net, a: Tensor) -> Tensor:
        y = F.gelu(a)
        z = net.other(a.sin())
        return net.last(y) + z.cos()

    net = Net(body)
    with ssdtrain.offload(net, **AWAY) as session:
        backward(net)
        (profile,) = session.cache.lanes._profiles.values()
        loss = net(source())
        records = session.cache.lanes._latest.records
        names = [records[ordinal]().name for ordinal in profile.order]
        loss.backward()
    # z.cos() saves z. The recipe's input comes next, before the result of a.sin().
    assert names == [
        "AddmmBackward0 [4x8]",
        "AddmmBackward0 [4x8]",
        "SinBackward0 [4x8]",
        "input [4x8]",
    ]
    assert profile.order == [3, 1, 2, 0]


def test_off_leaves_no_trace() -> None:
    net = Net(lambda net, a: net.drop(net.last(net.norm(F.gelu(a)))))
    with ssdtrain.offload(net, recompute="off", **ALONE) as session:
        assert "forward" not in vars(net.drop)
        loss = net(source())
        node = loss.grad_fn
        while node is not None:
            assert not node.metadata
            node = node.next_functions[0][0] if node.next_functions else None
        loss.backward()
        assert not session.steps[0].recipes
        assert session.steps[0].recompute_ms == 0
    with ssdtrain.offload(net, **ALONE):
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


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = set(REGISTERED)
    yield
    for name in set(REGISTERED) - before:
        del REGISTERED[name]


@pytest.mark.usefixtures("clean_registry")
def test_users_recipe() -> None:
    net = Net(lambda net, a: net.last(Doubled.apply(a, 1.5)))
    theirs = backward(net)
    with ssdtrain.offload(net, **ALONE) as before:
        backward(net)

    @ssdtrain.recipe("DoubledBackward")
    def _doubled(node: Any) -> Any:
        return node.rebuilt_by(doubled, node.saved(0), factor=node.constant("factor"))

    with ssdtrain.offload(net, **ALONE) as session:
        assert same(backward(net), theirs)
    assert "DoubledBackward" not in before.steps[0].recipes
    assert session.steps[0].recipes["DoubledBackward"] == ROWS * WIDTH * 4
    with pytest.raises(ValueError, match="registered already"):
        ssdtrain.recipe("DoubledBackward")(_doubled)
    with pytest.raises(ValueError, match="at least one node"):
        ssdtrain.recipe()


@pytest.mark.usefixtures("clean_registry")
def test_failing_recipe_is_refused_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @ssdtrain.recipe("DoubledBackward")
    def _doubled(node: Any) -> Any:
        return node.rebuilt_by(doubled, node.saved(0), factor=node.constant("missing"))

    net = Net(lambda net, a: net.last(Doubled.apply(a, 1.5)))
    theirs = backward(net)
    with ssdtrain.offload(net, **ALONE) as session:
        assert same(backward(net), theirs)
    assert session.steps[0].fallbacks[REFUSED] == 1
    assert "DoubledBackward" in caplog.text


def test_chains_are_bounded() -> None:
    def body(net: Net, a: Tensor) -> Tensor:
        for _ in range(2 * MAX_CHAIN):
            a = F.silu(a)
        return net.last(a)

    net = Net(body)
    theirs = backward(net)
    with ssdtrain.offload(net, **ALONE) as session:
        assert same(backward(net), theirs)
    report = session.steps[0]
    assert report.recipes["SiluBackward0"] < 2 * MAX_CHAIN * ROWS * WIDTH * 4
    assert report.recipes["SiluBackward0"] >= MAX_CHAIN * ROWS * WIDTH * 4


def test_trees_of_sums_are_bounded() -> None:
    def body(net: Net, a: Tensor) -> Tensor:
        a = a.square().tanh()
        for _ in range(MAX_CHAIN - 2):
            a = a + a
        return net.last(a)

    net = Net(body)
    theirs = backward(net)
    with ssdtrain.offload(net, **ALONE) as session:
        assert same(backward(net), theirs)
    assert "AddBackward0" not in session.steps[0].recipes


def test_gathered_parameters_are_copied_when_small_and_refused_when_large() -> None:
    net = Net(lambda net, a: net.last(net.norm(a)))
    for parameter in net.parameters():
        parameter.ds_id = 1
    theirs = backward(net)
    with ssdtrain.offload(net, **ALONE) as session:
        loss = net(source())
        weight = net.norm.weight
        kept, net.norm.weight.data = weight.data, torch.empty(0)
        # As under ZeRO-3: gathered again only for the norm's own backward.
        handles = [v for v in session.cache.recipes._alive.values() if "Norm" in v.name]
        made = session.cache.recipes._rebuild(handles[0])
        net.norm.weight.data = kept
        assert same_bits(made, net.norm(net.first(source())))
        loss.backward()
        assert same(gradients(net), theirs)
        large = nn.Parameter(torch.zeros(COPIED_BYTES // 4 + 1))
        assert Weights().operand(large) is None


def test_stale_autocast_cast_is_refused() -> None:
    """A cached cast may be older than its parameter."""
    net = Net(lambda net, a: net.last(a))

    def second_loss(change: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            net(source())
            with torch.no_grad():
                net.last.weight.mul_(2 if change else 1)
            loss = net(source())
        loss.backward()
        return gradients(net)

    theirs = second_loss(change=False)
    with ssdtrain.offload(net, **ALONE):
        ours = second_loss(change=True)
    assert same(ours, theirs)


def test_views_hidden_behind_identity_functions() -> None:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    net = Net(lambda net, a: net.last(Identity.apply(F.gelu(a))))
    theirs = backward(net)
    with ssdtrain.offload(net, **ALONE) as session:
        assert same(backward(net), theirs)
    assert session.steps[0].recipes["GeluBackward0"] > 0
