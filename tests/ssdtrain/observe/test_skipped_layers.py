"""Layers that are skipped at random under a memory limit, in virtual time."""

import pytest
import torch
from torch import Tensor, nn

from ssdtrain.cache.regions import Choice, Regions
from ssdtrain.observe import observation
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.plan.goal import Goal
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.observe.slow_blocks import Block, run
from tests.ssdtrain.plan.profiles import links
from tests.ssdtrain.virtual_time import VirtualTime


class Skipping(nn.Sequential):
    """Skips layers at random, as wav2vec 2.0 does in training."""

    share = 0.3

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            if not (isinstance(layer, Block) and torch.rand(()) < self.share):
                x = layer(x)
        return x


@pytest.mark.parametrize(("over_bytes", "share"), [(0, 1.0), (1000, 1.0), (0, 0.7)])
def test_layers_that_are_skipped_at_random_run_again(
    over_bytes: int,
    share: float,
    virtual_time: VirtualTime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No plan fits a second step; what they need is still told, and judged."""
    again = {"plan": "keep-all", "recompute": "regions", "verify": "checksum"}
    theirs, times, _, reports, _ = run(virtual_time, None, kind=Skipping, **again)
    budget = int(share * max(report.saved_peak_bytes for report in reports)) + 1
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    monkeypatch.setattr(MemoryGoal, "over_bytes", lambda memory, goal: over_bytes)
    ours, own, plan, reports, is_settled = run(virtual_time, budget, kind=Skipping)
    assert same_bits(ours, theirs)
    assert is_settled and plan is None
    if share == 1.0:
        assert all(report.saved_peak_bytes <= budget for report in reports[20:])
    left = any(report.bytes_offloaded > 0 for report in reports[-10:])
    assert left == (over_bytes > 0 or share < 1.0)
    if not left:
        assert own[-10:] == pytest.approx(times[-10:])


@pytest.mark.parametrize("over_bytes", [0, 1000])
def test_what_there_is_room_for_stays_where_layers_are_skipped_at_random(
    over_bytes: int, virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is skipped, also while plans are tried. Where steps need more, nothing
    stays in the end."""
    again = {"plan": "keep-all", "recompute": "regions", "verify": "checksum"}
    theirs, times, _, reports, _ = run(virtual_time, None, kind=Skipping, **again)
    _, _, _, keeping, _ = run(virtual_time, None, kind=Skipping)
    least, most = (max(r.saved_peak_bytes for r in own) for own in (reports, keeping))
    budget = (least + most) // 2
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    monkeypatch.setattr(MemoryGoal, "over_bytes", lambda memory, goal: over_bytes)
    ours, own, plan, reports, is_settled = run(virtual_time, budget, kind=Skipping)
    assert same_bits(ours, theirs)
    assert is_settled and plan is None
    assert all(report.saved_peak_bytes <= budget for report in reports)
    if over_bytes:
        assert own[-10:] == pytest.approx(times[-10:], rel=1e-3)
    else:
        assert max(r.saved_peak_bytes for r in reports[20:]) > 1.1 * least
        assert sum(own[20:]) < 0.95 * sum(times[20:])


def test_fewer_layers_stay_where_one_step_needed_too_much(
    virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer, not none."""
    again = {"plan": "keep-all", "recompute": "regions", "verify": "checksum"}
    _, times, _, reports, _ = run(virtual_time, None, kind=Skipping, **again)
    budget = 2 * max(report.saved_peak_bytes for report in reports)
    run_again, needs, told = Regions.run_again, [4096], list[int]()

    def rests(
        regions: Regions, choice: Choice, staying: frozenset[str] = frozenset()
    ) -> None:
        run_again(regions, choice, staying)
        if staying:
            told.extend(needs)
            needs.clear()

    def over_bytes(memory: MemoryGoal, goal: Goal) -> int:
        return told.pop() if told else 0

    monkeypatch.setattr(Regions, "run_again", rests)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    monkeypatch.setattr(MemoryGoal, "over_bytes", over_bytes)
    _, own, _, _, _ = run(virtual_time, budget, kind=Skipping)
    assert not needs and not told
    assert sum(own[20:]) < 0.95 * sum(times[20:])


class Drawing(nn.Sequential):
    """Its last layer draws from a generator of its own, and never runs again."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        vars(layers[-1])["generator"] = torch.Generator()


def test_a_layer_that_never_runs_again_is_not_taken_for_a_skipped_one(
    virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits is kept at once."""
    _, times, _, reports, _ = run(virtual_time, None, num_steps=6, kind=Drawing)
    budget = max(report.saved_peak_bytes for report in reports) + 1
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    monkeypatch.setattr(MemoryGoal, "over_bytes", lambda memory, goal: 0)
    _, own, plan, _, is_settled = run(virtual_time, budget, num_steps=6, kind=Drawing)
    assert is_settled and plan.keeps_all
    assert own[-2:] == pytest.approx(times[-2:])
