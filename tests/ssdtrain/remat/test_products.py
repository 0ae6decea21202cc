"""Matrix products made again: bitwise, by exact shape, and only where asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain import api
from ssdtrain.counters import StepReport
from ssdtrain.errors import InPlaceError
from ssdtrain.remat.expression import Expression
from ssdtrain.remat.finder import with_products
from ssdtrain.remat.producer import Producer
from ssdtrain.remat.registry import Registry

WIDTH = 32
WITH_BIAS, WITHOUT = "AddmmBackward0", "MmBackward0"
FULL: dict[str, Any] = {"target": "host", "min_bytes": 1, "recompute": "full"}


class Gated(nn.Module):
    """A gated MLP: what its first two products make is saved."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.up(h)) * self.gate(h))


def net(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Gated(bias), Gated(bias)).to(dtype)


def gradients(
    model: nn.Module, x: Tensor, settings: dict[str, Any] | None
) -> tuple[list[Tensor | None], StepReport | None]:
    """Of one step, plain or under these settings; and its report."""
    model.zero_grad()
    if settings is None:
        model(x).square().mean().backward()
        return [p.grad for p in model.parameters()], None
    with ssdtrain.offload(model, **settings) as session:
        model(x).square().mean().backward()
        (report,) = session.steps
    return [p.grad for p in model.parameters()], report


def assert_equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


@pytest.mark.parametrize("plan", ["keep-all", "offload-all", "auto"])
@pytest.mark.parametrize("shape", [(24, WIDTH), (3, 8, WIDTH)], ids=["2d", "3d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_products_give_the_same_bytes(
    bias: bool, dtype: torch.dtype, shape: tuple[int, ...], plan: str
) -> None:
    model, x = net(bias, dtype), torch.randn(shape, dtype=dtype)
    theirs, _ = gradients(model, x, None)
    ours, report = gradients(model, x, {**FULL, "plan": plan})
    assert_equal(ours, theirs)
    assert report is not None
    made = report.recipes[WITH_BIAS if bias else WITHOUT]
    # Both products of each block, and nothing else.
    assert made == 4 * x.numel() // WIDTH * 4 * WIDTH * dtype.itemsize
    assert not report.fallbacks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(16, 128, WIDTH), (2048, WIDTH)], ids=["3d", "2d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_on_a_gpu_a_plan_uses_products(
    bias: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The observed step rebuilds whatever it can, so the profile tells."""
    model = net(bias, dtype).cuda()
    x = torch.randn(shape, dtype=dtype, device="cuda")
    theirs, _ = gradients(model, x, None)
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    optim.zero_grad()
    settings = {**FULL, "plan": "auto", "max_overhead": 1.0}
    with ssdtrain.offload(model, **settings) as session:
        for _ in range(4):
            model(x).square().mean().backward()
            assert_equal([p.grad for p in model.parameters()], theirs)
            optim.step()
            optim.zero_grad()
        assert session.profile is not None
        items = [i for kind in session.profile.kinds.values() for i in kind]
    made = [i for i in items if i.recipe == (WITH_BIAS if bias else WITHOUT)]
    assert len(made) == 4
    assert all(item.recipe_ms > 0 for item in made)


@pytest.mark.parametrize("plan", ["keep-all", "offload-all", "auto"])
def test_products_are_asked_for(plan: str) -> None:
    settings = {**FULL, "recompute": "auto", "plan": plan}
    _, report = gradients(net(True), torch.randn(24, WIDTH), settings)
    assert report is not None
    assert report.recipes
    assert WITH_BIAS not in report.recipes


def less(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mutant(*operands: Any, **constants: Any) -> Tensor:
        return function(*operands, **constants).half().float()

    return mutant


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_of_other_bytes_is_stored(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    name = WITH_BIAS if bias else WITHOUT
    registry = with_products()
    recipe = registry.find(name)
    assert recipe is not None

    def mutant(node: Producer) -> Expression | None:
        found = recipe(node)
        return None if found is None else replace(found, function=less(found.function))

    planted = registry.merged(Registry({name: mutant}))
    monkeypatch.setattr(api, "with_products", lambda: planted)
    model, x = net(bias), torch.randn(24, WIDTH)
    theirs, _ = gradients(model, x, None)
    ours, report = gradients(model, x, {**FULL, "plan": "offload-all"})
    assert_equal(ours, theirs)
    assert report is not None
    assert name not in report.recipes
    assert report.fallbacks


def test_every_shape_is_checked_by_itself() -> None:
    """Shapes of one class for element-wise kernels; products have others for each."""
    model = net(True)
    with ssdtrain.offload(model, **FULL, plan="keep-all") as session:
        recipes: Any = session._cache.recipes
        known = []
        for rows in (40, 48, 48):  # as many bits, and multiples of 64 bytes
            model(torch.randn(rows, WIDTH)).sum().backward()
            checked = [
                key for key in recipes._admission._verdicts if WITH_BIAS in key[0]
            ]
            known.append(len(checked))
    assert known[0] > 0
    assert known[1] == 2 * known[0]
    assert known[2] == known[1]


def test_a_weight_that_may_be_gone_is_not_multiplied() -> None:
    """ZeRO-3 marks the parameters that it gathers and frees."""
    model = net(True)
    for parameter in model.parameters():
        parameter.ds_id = 1  # type: ignore[attr-defined]
    x = torch.randn(24, WIDTH)
    theirs, _ = gradients(model, x, None)
    ours, report = gradients(model, x, {**FULL, "plan": "offload-all"})
    assert_equal(ours, theirs)
    assert report is not None
    assert WITH_BIAS not in report.recipes


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_a_frozen_parameter_hides_is_stored(frozen: str) -> None:
    """Its factor is not saved, or its place in the graph is empty."""
    model = net(True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    x = torch.randn(24, WIDTH, requires_grad=True)
    theirs, _ = gradients(model, x, None)
    ours, report = gradients(model, x, {**FULL, "plan": "offload-all"})
    assert_equal(ours, theirs)
    assert report is not None
    assert WITH_BIAS not in report.recipes
    assert not report.fallbacks


def test_a_changed_weight_is_an_error_as_in_plain_autograd() -> None:
    model, x = net(True), torch.randn(24, WIDTH)
    with ssdtrain.offload(model, **FULL, plan="keep-all"):
        loss = model(x).square().mean()
        with torch.no_grad():
            model[1].up.weight.mul_(2)
        with pytest.raises(
            (InPlaceError, RuntimeError), match="modified by an inplace"
        ):
            loss.backward()


def test_a_product_that_nobody_saved_is_no_step_on_the_way() -> None:
    """Else residual streams would be rebuilt through whole layers."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    torch.manual_seed(0)
    model, x = Residual(), torch.randn(24, WIDTH)
    _, report = gradients(model, x, {**FULL, "plan": "keep-all"})
    assert report is not None
    assert not report.recipes
