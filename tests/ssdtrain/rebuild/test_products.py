"""Expensive recipes: products and attention, chains of them, frozen weights, LoRA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.counters import StepReport
from ssdtrain.errors import InPlaceError
from ssdtrain.rebuild.expression import Expression, Layout, TensorInput, evaluate
from tests.ssdtrain.bits import same_bits

WIDTH, ROWS = 16, 12
FULL: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 0,
    "recompute": "full",
}
KEEP = {**FULL, "plan": "keep-all"}
AWAY = {**FULL, "plan": "offload-all", "window_bytes": 1}


class Gated(nn.Module):
    """What Llama's MLP is: three products, an activation, a product of elements."""

    def __init__(self, bias: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        if frozen:
            for layer in (self.gate, self.up, self.down):
                layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        return (x + y).square().sum()


class Attention(nn.Module):
    """Projections, attention, projection."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, 2, -1).transpose(1, 2) for layer in self.inputs
        )
        mask = None
        if self.masked:
            mask = torch.zeros(length, length).masked_fill(
                torch.ones(length, length).tril() == 0, -torch.inf
            )
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        return self.last(y.transpose(1, 2).reshape(x.shape)).square().sum()


class Lora(nn.Module):
    """A frozen layer and a narrow trained way around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.base = nn.Linear(WIDTH, 2 * WIDTH, bias=False).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 4, bias=False)
        self.b = nn.Linear(4, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        y = self.base(x) + self.b(self.a(x)) * 2.0
        return F.silu(y).square().sum()


def source(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def run(
    make: Callable[[], nn.Module], x: Tensor, settings: dict[str, Any] | None
) -> tuple[list[Tensor], StepReport | None]:
    """Gradients of two steps, and the last report."""
    net = make()
    session = None if settings is None else ssdtrain.offload(net, **settings)
    found = []
    for number in range(2):
        net(x + number).backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
    report = None
    if session is not None:
        report = session.last_step
        session.close()
    return found, report


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and same_bits(ours, theirs)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "two dimensions": (Gated, (ROWS, WIDTH), "MmBackward0"),
    "three dimensions": (Gated, (2, ROWS, WIDTH), "MmBackward0"),
    "bias": (lambda: Gated(bias=True), (2, ROWS, WIDTH), "AddmmBackward0"),
    "attention": (
        Attention,
        (2, ROWS, WIDTH),
        "ScaledDotProductFlashAttentionForCpuBackward0",
    ),
    "masked attention": (
        lambda: Attention(masked=True),
        (2, ROWS, WIDTH),
        "ScaledDotProductFlashAttentionForCpuBackward0",
    ),
}


@pytest.mark.parametrize("settings", [KEEP, AWAY], ids=["alone", "offloading"])
@pytest.mark.parametrize("name", CASES)
def test_rebuilds_the_same_bytes(name: str, settings: dict[str, Any]) -> None:
    make, shape, recipe = CASES[name]
    x = source(*shape)
    theirs, _ = run(make, x, None)
    ours, report = run(make, x, settings)
    assert same(ours, theirs)
    assert report is not None
    assert report.recipes[recipe] > 0
    assert report.recipe_ms[recipe] > 0


def test_shadows_find_no_other_byte() -> None:
    for make, shape, recipe in CASES.values():
        _, report = run(make, source(*shape), {**AWAY, "verify": "shadow"})
        assert report is not None and report.recipes[recipe] > 0
        assert report.num_verified > 0


def test_a_cheap_session_leaves_products_alone() -> None:
    _, report = run(Gated, source(ROWS, WIDTH), {**KEEP, "recompute": "auto"})
    assert report is not None
    assert not {"MmBackward0", "AddmmBackward0"} & set(report.recipes)


def test_a_fused_step_between_two_backwards() -> None:
    """What recipes read of weights is what it was: transposed views, too."""

    def train(settings: dict[str, Any] | None) -> list[Tensor]:
        net = Gated()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, fused=True)
        session = None if settings is None else ssdtrain.offload(net, **settings)
        loss = net(source(ROWS, WIDTH))
        later = net(source(ROWS, WIDTH) + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        later.backward()
        found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        if session is not None:
            session.close()
        return found

    # torch's own products read the weights after the step; recipes must not.
    for settings in (KEEP, AWAY):
        assert same(train(settings), train(None))


def test_a_weight_that_is_changed_before_backward_raises() -> None:
    net = Gated()
    with ssdtrain.offload(net, **KEEP):
        loss = net(source(ROWS, WIDTH))
        with torch.no_grad():
            net.gate.weight.add_(1)
        with pytest.raises(InPlaceError):
            loss.backward()


def test_what_several_parts_read_is_made_once() -> None:
    calls = []

    def double(x: Tensor) -> Tensor:
        calls.append("double")
        return 2 * x

    x = torch.arange(4.0)
    held = TensorInput(holder=None, layout=Layout.of(x))
    inner = Expression(recipe="a", function=double, operands=(held,), constants=())
    scaled = Expression(
        recipe="b", function=torch.mul, operands=(inner, 3.0), constants=()
    )
    both = Expression(
        recipe="c", function=torch.add, operands=(scaled, inner), constants=()
    )
    assert both.inputs == (held,)
    assert torch.equal(evaluate(both, [x]), 8 * x)
    assert torch.equal(evaluate(both.without_holders(), [x]), 8 * x)
    assert calls == ["double", "double"]


# -- chains past tensors that nobody saved: [Note: unsaved tensors] in frame.py --------


class Rotary(nn.Module):
    """Projections, rotary embeddings, grouped attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.q, self.k = (nn.Linear(WIDTH, n * 8, bias=False) for n in (4, 2))
        self.v = nn.Linear(WIDTH, 16, bias=False)
        self.last = nn.Linear(32, WIDTH)
        self.at: float | None = None
        """What nobody saves is held below it, under no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = F.gelu(self.first(x))
        q = self.q(x).view(batch, length, 4, 8).transpose(1, 2)
        k = self.k(x).view(batch, length, 2, 8).transpose(1, 2)
        v = self.v(x).view(batch, length, 2, 8).transpose(1, 2)
        angle = torch.arange(length)[:, None] / 10.0 ** torch.arange(8)
        q, k = (self.turned(each, angle.cos(), angle.sin()) for each in (q, k))
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.last(y.transpose(1, 2).reshape(batch, length, 32)).square().sum()

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = half_turned(x)
        if self.at is not None:
            with torch.no_grad():
                half.clamp_(max=self.at)
        return x * cos + half * sin


def half_turned(x: Tensor) -> Tensor:
    first, second = x[..., :4], x[..., 4:]
    return torch.cat((-second, first), dim=-1)


@pytest.mark.parametrize("make", [Rotary, Lora, lambda: Gated(frozen=True)])
def test_chains_are_bitwise(make: Callable[[], nn.Module]) -> None:
    x = source(2, ROWS, WIDTH)
    theirs, _ = run(make, x, None)
    for settings in (KEEP, AWAY, {**AWAY, "verify": "shadow"}):
        ours, report = run(make, x, settings)
        assert same(ours, theirs)
        assert report is not None and report.bytes_recomputed > 0


def test_what_may_be_written_to_is_never_passed() -> None:
    """Not in the step in which nobody writes to it either."""
    net, twin = Rotary(), Rotary()
    x = source(2, ROWS, WIDTH)
    with ssdtrain.offload(net, **KEEP) as session:
        for at in (1e9, 0.0):
            net.at = twin.at = at
            net(x).backward()
            twin(x).backward()
            report = session.last_step
            assert report is not None and "AddBackward0" not in report.recipes
    gradients = ([p.grad for p in each.parameters()] for each in (net, twin))
    assert same_bits(*gradients)
