"""A re-run stops behind the last tensor that is needed; code that would tell by what it
leaves behind runs to its end."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.regions.settings import SETTINGS

WIDTH, ROWS, NUM_STEPS = 8, 4, 3
SHARED = SimpleNamespace(depth=1)
LOG: list[str] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.stack, self.num_failed = 1.0, [1.0], 0

    def inner(self, x: Tensor) -> Tensor:
        """What it computes; its last operator that saves is that of `down`."""
        hidden: Tensor = self.down(torch.tanh(self.up(x)))
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.kind(x) + 1

    kind: Callable[[Tensor], Tensor]


def flag(block: Any, x: Tensor) -> Tensor:
    x = x * block.scale
    block.scale = 3.0
    y = block.inner(x)
    block.scale = 1.0
    return y  # type: ignore[no-any-return]


def stack(block: Any, x: Tensor) -> Tensor:
    block.stack.append(2.0)
    y = block.inner(x * sum(block.stack))
    block.stack.pop()
    return y  # type: ignore[no-any-return]


def shared(block: Any, x: Tensor) -> Tensor:
    SHARED.depth += 1
    y = block.inner(x * SHARED.depth)
    SHARED.depth -= 1
    return y  # type: ignore[no-any-return]


def counts_failures(block: Any, x: Tensor) -> Tensor:
    try:
        return block.inner(x * (1 + block.num_failed))  # type: ignore[no-any-return]
    except BaseException:
        block.num_failed += 1
        raise


def tries_again(block: Any, x: Tensor) -> Tensor:
    for number in range(3):
        with contextlib.suppress(BaseException):
            return block.inner(x * (1 + number))  # type: ignore[no-any-return]
    return x


@contextlib.contextmanager
def logged() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        LOG.append(type(error).__name__)
        raise


def logs(block: Any, x: Tensor) -> Tensor:
    with logged():
        return block.inner(x)  # type: ignore[no-any-return]


@logged()
def logs_around(block: Any, x: Tensor) -> Tensor:
    return block.inner(x)  # type: ignore[no-any-return]


def dtype(block: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    y = block.inner(x)
    torch.set_default_dtype(torch.float32)
    return y * torch.ones(())


def autocast(block: Any, x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    y = block.inner(x).float()
    torch.set_autocast_enabled("cpu", False)
    return y  # type: ignore[no-any-return]


def deterministic(block: Any, x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    y = block.inner(x)
    torch.use_deterministic_algorithms(False)
    return y  # type: ignore[no-any-return]


KINDS = [
    *(flag, stack, shared, counts_failures, tries_again, logs, logs_around),
    *(dtype, autocast, deterministic),
]


def train(kind: Callable[[Any, Tensor], Tensor], offloaded: bool) -> tuple[Any, Any]:
    """Losses and gradients of every step, and what is everybody's behind each."""
    torch.manual_seed(0)
    LOG.clear()
    own = type("Own", (Block,), {"kind": kind, "__module__": __name__})
    net = nn.Sequential(*(own() for _ in range(3)))
    found, left = [], []
    session = ssdtrain.offload(net, **SETTINGS) if offloaded else None
    with contextlib.nullcontext() if session is None else session:
        for _ in range(NUM_STEPS):
            loss = net(torch.randn(ROWS, WIDTH)).square().sum()
            loss.backward()
            found += [loss.detach(), *(p.grad for p in net.parameters())]
            net.zero_grad()
            left.append(
                (
                    *(torch.get_default_dtype(), torch.is_autocast_enabled("cpu")),
                    *(torch.are_deterministic_algorithms_enabled(), SHARED.depth),
                    *(list(LOG), [(b.scale, b.stack, b.num_failed) for b in net]),
                )
            )
        if session is not None:
            assert not session.regions_refused
            report = session.last_step
            assert report is not None and report.recipes["region"] > 0
    return found, left


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(kind: Callable[[Any, Tensor], Tensor]) -> None:
    try:
        ours, left = train(kind, offloaded=True)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_autocast_enabled("cpu", False)
        torch.use_deterministic_algorithms(False)
        SHARED.depth = 1
    theirs, before = train(kind, offloaded=False)
    assert same_bits(ours, theirs)
    assert left == before
