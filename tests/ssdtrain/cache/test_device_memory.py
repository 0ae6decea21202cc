"""`device_memory`: everything on the device within a limit, metered on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError
from ssdtrain.observe import planner
from ssdtrain.observe.observer import Recording
from ssdtrain.plan.goal import DEVICE_RESERVE
from ssdtrain.plan.placement import Placement
from ssdtrain.quantities import Share
from ssdtrain.transfer.device import CpuDevice, MemoryLevel
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.metered import Meter
from tests.ssdtrain.cache.test_peak import ROWS, WIDTH, Block

SETTINGS: dict[str, Any] = {"max_overhead": 0.01, "target": "host", "min_bytes": 0}
pytestmark = pytest.mark.usefixtures("quick_links")


class Run:
    """Steps of three blocks, all of whose memory is metered."""

    optimizer_of: Any = torch.optim.SGD
    resets = True
    """Whether the user starts the allocator's maximum again at each step's end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.meter = Meter()
        self.meter.install(monkeypatch)
        self.highest: list[int] = []
        self.seen: list[Tensor] = []
        with self.meter:
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(*(Block() for _ in range(3)))
            parameters = self.model.parameters()
            self.optimizer = self.optimizer_of(parameters, lr=1e-3, foreach=False)
            self.session = None
            if settings:
                self.session = ssdtrain.offload(self.model, **settings)

    def steps(self, num_steps: int) -> "Run":
        """Train; the peak of each step, everything counted."""
        with self.meter:
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
            x.requires_grad_()
            for _ in range(num_steps):
                peaks: list[int] = []
                reset = type(self.meter).reset_peak
                self.meter.reset_peak = lambda: (  # type: ignore[method-assign]
                    peaks.append(self.meter.peak_bytes),  # noqa: B023
                    reset(self.meter),  # noqa: B023
                )[1]
                if self.resets:
                    self.meter.reset_peak()
                peaks.clear()
                self.model(x).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                x.grad = None
                if self.resets:
                    self.meter.reset_peak()
                self.highest.append(max([*peaks, self.meter.peak_bytes]))
        self.seen = [p.detach().clone() for p in self.model.parameters()]
        return self


def test_the_whole_peak_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest plan that fits: nothing moves where all fits, and more moves where
    less fits; the weights stay bitwise equal."""
    plain = Run(monkeypatch).steps(6)
    whole = plain.highest[-1]
    moved = []
    for share in (1.1, 0.8, 0.65):
        limit = int(share * whole)
        run = Run(monkeypatch, device_memory=limit, **SETTINGS).steps(6)
        assert same_bits(run.seen, plain.seen)
        assert max(run.highest[3:]) <= limit
        assert run.session is not None and run.session.plan is not None
        sums = run.session.plan.bytes_by_placement()
        moved.append(sum(sums.values()) - sums.get("keep", 0))
        run.session.close()
    assert moved[0] == 0 < moved[1] < moved[2]


def test_a_shortage_is_told_before_the_second_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Run(monkeypatch).steps(2).highest[-1]
    run = Run(monkeypatch, device_memory=int(0.45 * whole), **SETTINGS)
    run.steps(1)
    with pytest.raises(ConfigError, match=r"short by \d+ bytes at .* of module \d"):
        run.steps(1)
    assert len(run.highest) == 1
    run.session.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_second_step_that_does_not_fit_is_told_though_a_plan_would(
    monkeypatch: pytest.MonkeyPatch, sets_to_none: bool
) -> None:
    """It is one like the first, with the optimizer's state beside it; gradients that
    stay are no more than they were."""
    monkeypatch.setattr(Run, "optimizer_of", torch.optim.Adam)
    zero_grad = torch.optim.Adam.zero_grad
    monkeypatch.setattr(
        torch.optim.Adam, "zero_grad", lambda adam: zero_grad(adam, sets_to_none)
    )
    monkeypatch.setattr(planner, "choose", lambda *_: None)  # whatever plans need
    monkeypatch.setitem(SETTINGS, "recompute", "regions")
    free = Run(monkeypatch, device_memory="1GB", **SETTINGS).steps(1)
    state = 2 * sum(p.nbytes for p in free.model.parameters())
    needed = free.highest[0] + state
    free.session.close()  # type: ignore[union-attr]
    fits = Run(monkeypatch, device_memory=int(1.01 * needed), **SETTINGS).steps(2)
    fits.session.close()  # type: ignore[union-attr]
    short = Run(monkeypatch, device_memory=int(0.97 * needed), **SETTINGS).steps(1)
    told = r"short by \d+ bytes at module \d.* in a step in which every repeated module"
    with pytest.raises(ConfigError, match=told):
        short.steps(1)
    assert len(short.highest) == 1
    short.session.close()  # type: ignore[union-attr]


def test_what_a_region_needs_while_it_runs_again_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the most of a step where its operators need much beside what they save."""
    base, peak = 10**6, [10**6]
    monkeypatch.setattr(
        CpuDevice, "memory", lambda device: MemoryLevel(base, 0, peak[0], 0)
    )
    monkeypatch.setattr(
        CpuDevice, "reset_peak", lambda device: peak.__setitem__(0, base)
    )
    runs_again, seen = Recording.runs_again, []

    def greedy(recording: Recording) -> None:
        runs_again(recording)
        peak[0] = 10**9
        seen.append(recording)

    monkeypatch.setattr(Recording, "runs_again", greedy)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*parts)
    settings = {**SETTINGS, "recompute": "regions", "device_memory": "500MB"}
    with ssdtrain.offload(model, **settings):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert len(seen) == 3
    assert seen[0].needed_bytes == 10**9 - base and seen[0].peak_module == "2"


def test_what_ends_the_first_step_says_what_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before there is a plan; under one, and without a limit, torch says it."""
    hear: list[Any] = []

    def listen(device: CpuDevice, each: Any) -> Any:
        hear.append(each)
        return hear.clear

    monkeypatch.setattr(CpuDevice, "hear_shortages", listen)
    monkeypatch.setitem(SETTINGS, "recompute", "regions")
    run = Run(monkeypatch, device_memory="1GB", **SETTINGS)

    def backward(*_: Any) -> None:
        told = r"short by at least \d+ bytes at module \d"
        with pytest.raises(ConfigError, match=told):
            hear[0](10**9)

    hook = run.model[0].register_full_backward_pre_hook(backward)
    run.steps(1)
    hook.remove()
    run.steps(5)
    assert run.session is not None and run.session.plan is not None
    hear[0](10**9)
    run.session.close()
    assert not hear
    Run(monkeypatch, **SETTINGS).session.close()  # type: ignore[union-attr]
    assert not hear


def test_an_optimizer_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch)
    weights = sum(p.nbytes for p in run.model.parameters())
    monkeypatch.setattr(Run, "optimizer_of", torch.optim.Adam)
    small = Run(monkeypatch, device_memory=int(2.5 * weights), **SETTINGS).steps(1)
    with pytest.raises(ConfigError, match="whatever happens to activations"):
        small.steps(1)
    small.session.close()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="allocated already"):
        Run(monkeypatch, device_memory=weights // 2, **SETTINGS)


def test_what_pinned_memory_cannot_hold_goes_to_the_ssd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    whole = Run(monkeypatch).steps(2).highest[-1]
    limit = int(0.7 * whole)
    small: dict[str, Any] = {
        "host_bytes": 3 << 20,
        "device_memory": limit,
        "min_bytes": 0,
    }
    small |= {"max_overhead": 0.01, "target": "tiered", "directory": str(tmp_path)}
    run = Run(monkeypatch, **small).steps(5)
    assert run.session is not None and run.session.plan is not None
    placed = {o.placement for os in run.session.plan.orders.values() for o in os}
    assert Placement.OFFLOAD_SSD in placed
    run.session.close()
    assert run.highest[-1] <= limit


@pytest.mark.parametrize(
    ("given", "parsed"),
    [("fit", "fit"), (" FIT ", "fit"), ("40GB", 40 * 10**9), ("80%", Share(0.8))],
)
def test_what_may_be_asked_for(given: Any, parsed: Any) -> None:
    assert OffloadConfig(device_memory=given).device_memory == parsed


def test_what_may_not_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fit'"):
        OffloadConfig(device_memory="fits")
    with pytest.raises(ConfigError, match="expects plan='auto'"):
        OffloadConfig(device_memory="fit", plan="keep-all")
    assert 0 < DEVICE_RESERVE < 0.1
