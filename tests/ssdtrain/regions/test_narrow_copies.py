"""What recipes store for themselves inside a region goes with the region, and comes
back with it: [Note: narrow copies in regions] in cache/savedplaces.py."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.cache import digest
from ssdtrain.observe import links
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.metered import copy_at_once
from tests.ssdtrain.graphs.between import RmsNorm

WIDTH, ROWS, NUM_LAYERS = 64, 256, 6
STATE_BYTES = 2 * WIDTH * ROWS
"""Of a hidden state, in bfloat16."""
SETTINGS: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 1 << 12,
}
RESERVE = 1.03


def _norm() -> RmsNorm:
    return RmsNorm(torch.ones(WIDTH, dtype=torch.bfloat16))


class Block(nn.Module):
    """Two branches, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_norm() for _ in range(2))
        self.ups = nn.ModuleList(_linear() for _ in range(2))
        self.writes = False
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.num_calls += 1
        for norm, up in zip(self.norms, self.ups, strict=True):
            x = x + torch.tanh(up(norm(x)))
        return x


class Net(nn.Module):
    """Blocks, run in a given way."""

    def __init__(self, run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = _linear()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self._run is None else self._run(block, x)
        return x.float().square().mean()


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)


def batch() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=draw).bfloat16()


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(block, x, use_reentrant=False)
    return result


def train(model: nn.Module, x: Tensor, num_backwards: int = 1) -> list[Tensor]:
    """One step; its gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = model(x)
    for number in range(num_backwards):
        loss.backward(retain_graph=number < num_backwards - 1)
    found = [each.grad for each in model.parameters() if each.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return found


def most_alive(step: Callable[[], None]) -> int:
    """Bytes that a step has allocated and not freed yet, at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    results: Any = seen.profiler
    events = [
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]"
    ]
    now = most = 0
    for _, num_bytes in sorted(events, key=lambda event: event[0]):
        now += num_bytes
        most = max(most, now)
    return most


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is limited, so all regions run again before the first plan. What a copy
    that is late carries would be alive for longer: none is."""
    copy_at_once(monkeypatch)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    # Between two steps; on a device these 16 MB are small beside all else.
    monkeypatch.setattr(links, "PROBE_BYTES", 4096)
    # Likewise the 128 kB of factors that digest the inputs of a first call.
    monkeypatch.setattr(digest, "ROW_WORDS", 255)


def test_the_first_steps_need_no_more_than_checkpointing() -> None:
    """The observed one among them, in live bytes."""
    model, x = Net(checkpointed), batch()
    train(model, x)
    theirs = most_alive(lambda: train(model, x))
    ours = Net()
    with ssdtrain.offload(ours, **SETTINGS) as session:
        found = [most_alive(lambda: train(ours, x)) for _ in range(4)]
        assert session.profile is not None and session.plan is None
    assert max(found) <= RESERVE * theirs, (found, theirs)


def test_what_is_stored_for_backward_are_the_regions_inputs() -> None:
    model, x = Net(), batch()
    with ssdtrain.offload(model, **SETTINGS) as session:
        for _ in range(4):
            train(model, x)
        assert session.profile is not None
        items = session.profile.kinds["model/0"]
        copies = [item for item in items if item.owner >= 0 and item.region >= 0]
        assert len(copies) == 2 * NUM_LAYERS
        assert {item.num_bytes for item in copies} == {STATE_BYTES}
        _, observed, later, _ = session.steps
    stored = [step.bytes_offloaded + step.bytes_kept for step in (observed, later)]
    assert stored[0] == stored[1] < observed.bytes_saved


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_gradients_are_equal(num_backwards: int) -> None:
    """Also where each region runs again in several backwards through one forward."""
    model, x = Net(), batch()
    reference = copy.deepcopy(model)
    with ssdtrain.offload(model, **SETTINGS) as session:
        for number in range(8):
            theirs = train(reference, x, num_backwards)
            assert same_bits(train(model, x, num_backwards), theirs), number
        assert session.plan is not None


def test_what_was_made_again_before_its_weights_change_stays() -> None:
    """An optimizer's step between forward and backward."""
    model, x = Net(), batch()
    reference = copy.deepcopy(model)
    with ssdtrain.offload(model, **SETTINGS):
        train(model, x)
        train(reference, x)
        found = []
        for each in (model, reference):
            written = each.blocks[2].ups[0].bias
            optimizer = torch.optim.SGD([written], lr=0.1)
            loss = each(x)
            written.grad = torch.ones_like(written)
            if each is model:
                optimizer.step()
            written.grad = None
            loss.backward()
            found.append([one.grad for one in each.parameters()])
    assert same_bits(*found)


def test_a_region_that_is_refused_stores_them() -> None:
    model, x = Net(), batch()
    block: Any = model.blocks[2]
    block.writes = True
    reference = copy.deepcopy(model)
    with ssdtrain.offload(model, **SETTINGS) as session:
        for _ in range(6):
            theirs = train(reference, x)
            assert same_bits(train(model, x), theirs)
        assert "blocks.2" in session.regions_refused


class Wide(nn.Module):
    """Gives out what autograd saves inside of it, and a recipe makes."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(_linear() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(ROWS, WIDTH) to the same in float32, and a penalty."""
        x = x.bfloat16()
        for up in self.ups:
            x = torch.tanh(up(x))
        wide = x.float()
        return wide, wide.square().mean()


class Chain(nn.Module):
    """Each layer's input is the result of the one before."""

    def __init__(self, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Wide() for _ in range(NUM_LAYERS))
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.zeros(())
        for layer in self.layers:
            x, penalty = layer(x) if self._run is None else self._run(layer, x)
            loss = loss + penalty
        return loss + x.square().mean()


def test_no_region_runs_again_for_the_input_of_the_next() -> None:
    """Or all of them would be alive at once."""
    model, x = Chain(checkpointed), batch()
    train(model, x)
    theirs = most_alive(lambda: train(model, x))
    ours = Chain()
    with ssdtrain.offload(ours, **SETTINGS) as session:
        found = [most_alive(lambda: train(ours, x)) for _ in range(4)]
        assert session.profile is not None and session.plan is None
    assert max(found) <= RESERVE * theirs, (found, theirs)
