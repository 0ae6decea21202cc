"""[Note: the node between] and [Note: places]: what a recipe makes is what is saved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.rebuild.between import is_unwritten, writes_nothing
from tests.ssdtrain.graphs.unusual import Written


class Same(torch.autograd.Function):
    """As those of FSDP2 and Megatron."""

    @staticmethod
    def forward(ctx: Any, group: object, *tensors: Tensor) -> Any:
        ctx.group = group
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *gradients


class Detached(torch.autograd.Function):
    """As those of ZeRO-3."""

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.num = 0
        ctx.num += 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class PartWritten(torch.autograd.Function):
    """Returns a view of what it has written to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        tensor.detach().numpy()[...] *= 2
        return tensor.view(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view(4, 6) * 2


class Stored(torch.autograd.Function):
    """Writes without a call."""

    ALIAS = torch.zeros(4).numpy()

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        Stored.ALIAS[0] = 1
        return tensor


class Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        tensor.data = other
        return tensor


class Context(torch.autograd.Function):
    """Writes where the context is set up."""

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        inputs[0].data.zero_()


def test_code_that_writes_nothing_is_told_from_other() -> None:
    assert writes_nothing(Same)
    assert writes_nothing(Detached)
    for function in (Written, PartWritten, Stored, Replaced, Context):
        assert not writes_nothing(function), function


def test_only_views_and_harmless_functions_are_passed() -> None:
    base = torch.randn(4, 6, requires_grad=True) * 1
    part = base.chunk(2, 1)[1].t()
    assert is_unwritten(base, base)
    assert is_unwritten(part, base)
    _, other = Same.apply(None, part, base)
    assert is_unwritten(other, base)
    assert is_unwritten(Detached.apply(base).view(-1), base)
    assert not is_unwritten(Written.apply(part, 1.0).t(), base)
    assert not is_unwritten(PartWritten.apply(base)[3:], base)
    inner, _ = Same.apply(None, Written.apply(part, 1.0), base)
    assert not is_unwritten(inner, base)
    with torch.no_grad():
        assert not is_unwritten(base.view(-1), base)


def kernel(tensor: Tensor) -> Tensor:
    return Written.apply(tensor, 0.5)


def nested(tensor: Tensor) -> Tensor:
    return Same.apply(None, Written.apply(tensor.view_as(tensor), 0.5))[0]


def direct(tensor: Tensor) -> Tensor:
    tensor.data.mul_(0.5)
    return tensor


def through_numpy(tensor: Tensor) -> Tensor:
    tensor.detach().numpy()[...] *= 2
    return tensor


class Pair(nn.Module):
    """Two tensors of one class; one of them is written to."""

    def __init__(self, write: Callable[[Tensor], Tensor], *, is_first: bool) -> None:
        super().__init__()
        self.write, self.is_first = write, is_first
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        clean, other = self.a(x), self.b(x)
        if self.is_first:
            clean = F.gelu(clean)
        other = F.gelu(self.write(other))
        if not self.is_first:
            clean = F.gelu(clean)
        return self.out(F.silu(clean) * other)


def gradients(make: Callable[[], nn.Module], settings: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model, found = nn.Sequential(*(make() for _ in range(3))), []
    session = None if settings is None else ssdtrain.offload(model, **settings)
    for step in range(12):
        model(torch.randn(8 + step % 2, 32)).square().mean().backward()
        found += [each.grad for each in model.parameters() if each.grad is not None]
        model.zero_grad()
    if session is not None:
        session.close()
    return found


@pytest.mark.parametrize("write", [kernel, nested, direct, through_numpy])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"plan": "keep-all", "recompute": "full"},
        {"plan": "offload-all", "recompute": "full", "target": "host"},
        {"max_overhead": 1.0},
    ],
    ids=["keep", "move", "planned"],
)
def test_a_recipe_makes_no_tensor_that_was_written_to(
    write: Callable[[Tensor], Tensor], is_first: bool, settings: dict[str, Any]
) -> None:
    def make() -> nn.Module:
        return Pair(write, is_first=is_first)

    found = gradients(make, {"max_overhead": 0.01, "min_bytes": 0, **settings})
    assert all(map(torch.equal, found, gradients(make, None)))


def test_what_is_not_written_to_is_rebuilt_all_the_same() -> None:
    model = Pair(lambda tensor: Same.apply(None, tensor)[0], is_first=True)
    with ssdtrain.offload(model, min_bytes=0, plan="keep-all", recompute="full") as own:
        for _ in range(3):
            model(torch.randn(8, 32)).mean().backward()
    assert own.steps[-1].recipes["AddmmBackward0"] >= 2 * 8 * 32 * 4
