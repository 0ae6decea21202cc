"""What a region waits for in its collectives is in the price of its second forward."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.plan.agree import slowest
from ssdtrain.plan.choose import kept_but
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.simulate import Run
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.cache.steps import train
from tests.ssdtrain.virtual_time import VirtualTime

WIDTH, BLOCKS, NUM_OBSERVED = 16, 3, 5
WAIT_S = 0.05
"""For the rank that comes last, in each layer."""
SETTINGS: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 1,
    "recompute": "regions",
}


class Layer(nn.Module):
    """Its ranks meet between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x).tanh()
        torch.ops.ssdtrain_tests.meet(made.detach())
        result: Tensor = x + self.down(made).sigmoid()
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Layer() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def waits_s(virtual_time: VirtualTime) -> Iterator[list[float]]:
    """How long a rank waits in the collective: the last of them counts. An operator,
    into which no region's inventory looks."""
    found = [0.0]

    def meet(x: Tensor) -> Tensor:
        virtual_time.sleep(found[-1])
        return x.clone()

    library = torch.library.Library("ssdtrain_tests", "DEF")
    library.define("meet(Tensor x) -> Tensor")
    library.impl("meet", meet, "CPU")
    yield found
    library._destroy()


def observed() -> Profile:
    """Of one rank."""

    def loss_of(model: nn.Module, number: int) -> Tensor:
        loss: Tensor = model(torch.randn(8, WIDTH)).square().mean()
        return loss

    model = Net()
    with ssdtrain.offload(model, **SETTINGS) as session:
        for _ in train(model, loss_of, NUM_OBSERVED):
            pass
        assert session.profile is not None
        return session.profile


def step_ms(timeline: Timeline, num_again: int) -> float:
    """Predicted, where nothing moves and so many layers run again."""
    (kind,) = timeline.profile.regions
    again = [(kind, number) for number in range(num_again)]
    return Run(timeline, kept_but(timeline, again)).run().step_ms


@pytest.mark.parametrize("early", [0, 1])
def test_a_layer_that_runs_again_waits_for_the_last_rank_again(
    waits_s: list[float], early: int
) -> None:
    """The rank that comes last does not wait, and may be the first one, whose profile
    tells of all else."""
    ranks = []
    for rank in range(2):
        waits_s.append(WAIT_S if rank == early else 0.0)
        ranks.append(observed())
    merged = slowest(ranks)
    assert merged is not None
    timeline = Timeline(merged)
    for num_again in range(1, BLOCKS + 1):
        dearer_ms = step_ms(timeline, num_again) - step_ms(timeline, 0)
        assert dearer_ms >= 1e3 * WAIT_S * num_again
        assert dearer_ms < 1e3 * WAIT_S * (num_again + 1)
