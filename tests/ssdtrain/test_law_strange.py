"""The first law where graphs are entered or left in unusual ways.

Autocast inside the model, second derivatives, compiled and sharded modules; losses,
gradients and parameters are compared as bytes under every plan, with recipes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import ssdtrain
from tests.ssdtrain.bits import same_bits

NUM_STEPS, ROWS, WIDTH = 5, 8, 16
PLANS: list[dict[str, Any]] = [
    {"plan": "keep-all"},
    {"plan": "offload-all", "window_bytes": 1},
    {"plan": "offload-all", "window_bytes": 1, "recompute": "off"},
    {"plan": "auto", "max_overhead": 1.0},
]
NAMES = ["keep", "move", "move alone", "auto"]


class Block(nn.Module):
    """Norm, MLP, dropout, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) to the same."""
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Mixed(nn.Module):
    """Autocast is entered, left and entered again inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) to the same."""
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                x = self.second(x.float())
            x = F.silu(self.third(x))
        return self.third(x.float())


def mixed() -> nn.Module:
    return Mixed()


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


def smooth() -> nn.Module:
    """Whose second derivative is not zero, without dropout."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
    )


def compiled() -> nn.Module:
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
    model[0].compile(backend="aot_eager")
    return model


def compiled_whole() -> nn.Module:
    model = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    model.compile(backend="aot_eager")
    return model


def sharded(policy: MixedPrecisionPolicy) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
        mesh = dist.init_device_mesh("cpu", (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    return make


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).float().square().sum()
    loss.backward()
    return loss


def hessian(model: nn.Module, x: Tensor) -> Tensor:
    """Of the loss by the input, row by row, then a backward through all of it."""
    x = x[:2, :].requires_grad_()
    (first,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    rows = [
        torch.autograd.grad(first.view(-1)[i], [x], create_graph=True)[0]
        for i in range(4)
    ]
    loss = torch.stack(rows).square().sum()
    loss.backward()
    return loss


def train(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, Tensor], Tensor],
    settings: dict[str, Any] | None,
) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = None
    if settings is not None:
        session = ssdtrain.offload(model, target="host", min_bytes=0, **settings)
    found, saved = [], 0
    for number in range(NUM_STEPS):
        torch.manual_seed(number)
        found.append(step(model, torch.randn(ROWS, WIDTH)).detach())
        found += [local(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    found += [local(parameter.detach()) for parameter in model.parameters()]
    if session is not None:
        saved = sum(report.bytes_saved for report in session.steps)
        session.close()
    return found, saved


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).clone()


def check(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, Tensor], Tensor],
    settings: dict[str, Any],
) -> None:
    theirs, _ = train(make, step, None)
    ours, saved = train(make, step, settings)
    assert saved > 0
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
@pytest.mark.parametrize("make", [mixed, blocks])
def test_autocast_inside_the_model(
    make: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    check(make, backward, settings)


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
def test_second_derivatives(settings: dict[str, Any]) -> None:
    check(smooth, hessian, settings)


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
@pytest.mark.parametrize("make", [compiled, compiled_whole])
def test_compiled_in_place(
    make: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    check(make, backward, settings)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_fsdp2(dtype: torch.dtype | None, settings: dict[str, Any]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    check(sharded(policy), backward, settings)
