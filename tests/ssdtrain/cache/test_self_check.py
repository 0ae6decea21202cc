"""One rebuilt tensor in so many is compared even under verify="off"."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache import verify
from ssdtrain.cache.rebuilder import Rebuilder
from ssdtrain.errors import ActivationChangedError

WIDTH, DEPTH, PERIOD = 16, 8, 8
SETTINGS: dict[str, Any] = {"target": "host", "plan": "keep-all", "min_bytes": 0}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in so few that a few steps tell: the draw is the same."""
    monkeypatch.setattr(verify, "SELF_CHECK_PERIOD", PERIOD)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.sum()


def steps(net: Net, session: ssdtrain.Session, number: int) -> None:
    for _ in range(number):
        net(torch.randn(4, WIDTH)).backward()
        session.hints.step_end()


def test_one_in_so_many_is_compared() -> None:
    net = Net()
    number = 100 * PERIOD // DEPTH
    with ssdtrain.offload(net, **SETTINGS) as session:
        steps(net, session, number)
        verified = sum(step.num_verified for step in session.steps)
    rebuilt = number * (DEPTH - 1)
    assert 0.7 < verified * PERIOD / rebuilt < 1.4


@pytest.mark.parametrize("place", range(DEPTH - 1))
def test_a_wrong_recipe_is_found_wherever_it_is(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that gives other bytes behind its admission."""
    rebuild = Rebuilder._rebuild
    seen: list[int] = []

    def wrong(self: Rebuilder, rebuilt: Any) -> Tensor:
        made = rebuild(self, rebuilt)
        seen.append(1)
        # Backward asks for the last layer's input first.
        return made + 1 if len(seen) % (DEPTH - 1) == place else made

    net = Net()
    monkeypatch.setattr(Rebuilder, "_rebuild", wrong)
    with (
        ssdtrain.offload(net, seed=place, **SETTINGS) as session,
        pytest.raises(ActivationChangedError, match="rebuilt by a recipe"),
    ):
        steps(net, session, 20 * PERIOD)


def test_every_seed_draws_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed: list[str] = []
    monkeypatch.setattr(verify, "describe", lambda h, s: sealed.append(h.source) or "")

    def drawn(seed: int) -> list[int]:
        net, found = Net(), []
        with ssdtrain.offload(net, seed=seed, **SETTINGS) as session:
            for _ in range(10):
                steps(net, session, 1)
            found = [step.num_verified for step in session.steps]
        return found

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert sealed


@pytest.mark.gpu
def test_on_a_gpu_the_next_backward_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rebuild = Rebuilder._rebuild
    monkeypatch.setattr(verify, "SELF_CHECK_PERIOD", 1)
    net = Net().cuda()
    x = torch.randn(4, WIDTH, device="cuda")
    with ssdtrain.offload(net, **SETTINGS) as session:
        net(x).backward()
        session.hints.step_end()
        monkeypatch.setattr(Rebuilder, "_rebuild", lambda s, r: rebuild(s, r) + 1)
        net(x).backward()
        session.hints.step_end()
        with pytest.raises(ActivationChangedError, match="rebuilt by a recipe"):
            net(x).backward()
