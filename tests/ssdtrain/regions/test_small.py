"""A scan saves a state for each token: many tensors that no plan counts."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.simulate import Simulation, keep_all
from ssdtrain.plan.timeline import Timeline
from ssdtrain.plan.unsearched import all_again
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits

WIDTH, LENGTH, DEPTH = 64, 40, 4
STATE_BYTES = WIDTH * WIDTH * 4


class Scan(nn.Module):
    """Its argument and its product are four states large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.part = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        state = x[:WIDTH]
        for _ in range(LENGTH):
            state = (state + 0.1).sin()
        return (x @ self.weight).tanh() + state.repeat(4, 1)


class Alone(Scan):
    """Nothing of it is large."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(LENGTH):
            x = (x + 0.1).sin()
        return x + self.weight


class Net(nn.Module):
    def __init__(self, kind: type[Scan]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.repeat(4, 1).square().mean()


def num_states() -> int:
    """States that are alive."""
    found = [each for each in gc.get_objects() if type(each) is Tensor]
    return len({each.data_ptr() for each in found if each.shape == (WIDTH, WIDTH)})


def steps(ours: nn.Module, x: Tensor, **settings: Any) -> tuple[list[int], Profile]:
    """States that are alive behind the forwards of four steps, and the observed one;
    gradients are a plain model's."""
    plain = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    before, alive = num_states(), []
    with ssdtrain.offload(ours, target="host", **settings) as session:
        for _ in range(4):
            loss = ours(x)
            alive.append(num_states() - before)
            loss.backward()
            plain(x).backward()
            pairs = zip(ours.parameters(), plain.parameters(), strict=True)
            assert all(same_bits(a.grad, b.grad) for a, b in pairs)
            optimizer.step()
        assert session.profile is not None
        return alive, session.profile


@pytest.mark.usefixtures("quick_links")
def test_states_of_a_scan_go_in_the_observed_step_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in checkpointing; and a plan in which the layers stay counts them."""
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    x = torch.randn(4 * WIDTH, WIDTH, requires_grad=True)
    budget = 3 * DEPTH * 4 * STATE_BYTES
    alive, profile = steps(
        Net(Scan), x, min_bytes=STATE_BYTES + 1, memory_budget=budget
    )
    # Each layer keeps as much as its argument is large, and no more.
    assert max(alive[:3]) <= DEPTH * (4 + 2)
    [calls] = profile.regions.values()
    states = (LENGTH - 4) * STATE_BYTES
    assert [call.small_bytes for call in calls] == pytest.approx([states] * DEPTH, 0.1)
    timeline = Timeline(profile)
    kept = Simulation(timeline, keep_all(timeline)).run().peak_bytes
    assert kept > DEPTH * 0.9 * states
    plan = all_again(profile, profile, Goal(memory_budget_bytes=budget))
    assert plan is not None and plan.prediction is not None
    assert plan.prediction.peak_bytes < kept - 0.9 * DEPTH * states


@pytest.mark.usefixtures("quick_links")
def test_a_layer_of_which_no_plan_knows_a_tensor_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can never be chosen, so that what it keeps is seen in the observed step."""
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    settings = {"min_bytes": STATE_BYTES + 1, "memory_budget": 60 * STATE_BYTES}
    alive, profile = steps(Net(Alone), x, **settings)
    assert alive[1] >= DEPTH * (LENGTH - 1)  # the observed one
    assert not any(
        call.small_bytes for [*calls] in profile.regions.values() for call in calls
    )
