"""Writes that no version counts: a region that does so runs once, from whenever on."""

from typing import Any

import numpy
import pytest
import torch
from numpy import asarray as taken
from torch import Tensor, nn

import ssdtrain
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.unseen import Owner

WIDTH, STEPS, TURN = 16, 6, 3
SETTINGS: dict[str, Any] = {"recompute": "regions", "min_bytes": 0, "target": "host"}
WRITES = [False]
SHARED = torch.zeros(WIDTH)


class Reads(nn.Module):
    """Writes to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.own: list[Tensor] = [torch.zeros(WIDTH)]

    def touch(self, x: Tensor) -> Tensor:
        return x * x.detach().abs().amax()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(self.touch(x))))


class Buffer(Reads):
    def touch(self, x: Tensor) -> Tensor:
        if WRITES[0]:
            self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return x + self.mean


class ByNumpy(Reads):
    def touch(self, x: Tensor) -> Tensor:
        if WRITES[0]:
            self.mean.numpy()[:] += 0.5
        return x + self.mean


class AsArray(Reads):
    def touch(self, x: Tensor) -> Tensor:
        if WRITES[0]:
            numpy.asarray(self.mean)[:] += 0.5
        return x + self.mean


class AsArrayByAnotherName(Reads):
    def touch(self, x: Tensor) -> Tensor:
        if WRITES[0]:
            taken(self.mean)[:] += 0.5
        return x + self.mean


class Swapped(Reads):
    def touch(self, x: Tensor) -> Tensor:
        if WRITES[0]:
            torch.utils.swap_tensors(self.mean, self.mean + 0.5)
        return x + self.mean


class Attribute(Reads):
    def touch(self, x: Tensor) -> Tensor:
        if WRITES[0]:
            self.own[0].data.add_(x.detach().mean(0))
        return x + self.own[0]


class Global(Reads):
    def touch(self, x: Tensor) -> Tensor:
        if WRITES[0]:
            SHARED.data.add_(x.detach().mean(0))
        return x + SHARED


class Weight(Reads):
    def touch(self, x: Tensor) -> Tensor:
        if WRITES[0]:
            self.up.weight.data.mul_(0.99)
        return x


class OtherData(Reads):
    """The largest norm of a weight has a limit."""

    def touch(self, x: Tensor) -> Tensor:
        if WRITES[0]:
            weight = self.up.weight
            weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.3)
        return x


class Argument(Reads):
    def touch(self, x: Tensor) -> Tensor:
        y = x * 1
        if WRITES[0]:
            x.data.mul_(0.99)
        return y


def trained(kind: type[Reads], turn: int, **settings: Any) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    SHARED.zero_()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind() for _ in range(3)))
    session = ssdtrain.offload(model, **settings) if settings else None
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(STEPS):
        WRITES[0] = step >= turn
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found += [each.detach().clone() for each in model.state_dict().values()]
        found += [each.own[0].clone() for each in model[1:]] + [SHARED.clone()]
    reports = [] if session is None else session.steps
    if session is not None:
        session.close()
    return found, reports


KERNEL = Owner(lambda tensor: tensor.data.mul_(0.99))
HIDDEN = KERNEL.proxy()


class ByKernel(Reads):
    """Of which nobody sees the code."""

    def touch(self, x: Tensor) -> Tensor:
        HIDDEN.value(self.up.weight)
        return x


KINDS = [Buffer, ByNumpy, AsArray, Swapped, Attribute, Global, Weight, OtherData]
KINDS += [Argument, ByKernel, AsArrayByAnotherName]


@pytest.mark.parametrize("plan", ["keep-all", "offload-all"])
@pytest.mark.parametrize("turn", [0, TURN])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_past_its_version_is_written_once(
    kind: type[Reads], turn: int, plan: str
) -> None:
    plain, _ = trained(kind, turn)
    ours, reports = trained(kind, turn, plan=plan, **SETTINGS)
    assert same_bits(plain, ours)
    assert not any(report.recipes.get("region") for report in reports)


def test_what_reads_alone_runs_again() -> None:
    plain, _ = trained(Reads, STEPS)
    ours, reports = trained(Reads, STEPS, plan="keep-all", **SETTINGS)
    assert same_bits(plain, ours)
    assert all(report.recipes["region"] > 0 for report in reports)


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_before_training(mode: bool) -> None:
    """What training writes, evaluation has read."""

    def both(offloads: bool) -> list[Tensor]:
        torch.manual_seed(0)
        WRITES[0] = False
        model = nn.Sequential(*(Buffer() for _ in range(3)))
        session = ssdtrain.offload(model, plan="keep-all", **SETTINGS)
        if not offloads:
            session.close()
        x = torch.randn(8, WIDTH)
        loss = model.train(mode)(x).square().mean()
        WRITES[0] = True
        loss = loss * model.train()(x + 1).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()))
        session.close()
        return [loss.detach(), *found, *model.buffers()]

    assert same_bits(both(False), both(True))
