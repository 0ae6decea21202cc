"""Races: any schedule of the workers gives the same bytes, and a missing edge shows."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.errors import ActivationChangedError
from ssdtrain.transfer.device import CpuDevice, CpuEvent

sys.path.insert(0, str(Path(__file__).parent))
from perturb import missing_event, num_holders, patched, perturbed, poisoned

from tests.ranks import SOON_S
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.targets import TARGETS

WIDTH = 64
SEEDS = range(2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


def step(net: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(32, WIDTH, requires_grad=True)
    net.zero_grad()
    net(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in net.parameters())]


def settings_of(target: str, everything: Any, tmp_path: Path) -> dict[str, Any]:
    settings = {
        "max_overhead": 0.01,
        **everything,
        "target": target,
        "window_bytes": 2 * 32 * WIDTH * 4,
    }
    if target != "host":
        # So little host memory that bytes go to the disk and back.
        settings |= {"directory": str(tmp_path), "host_bytes": 64 << 10}
    return settings


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_schedule_changes_a_byte(
    target: str, seed: int, everything: Any, tmp_path: Path
) -> None:
    net = model()
    expected = step(net)
    settings = settings_of(target, everything, tmp_path)
    with (
        perturbed(seed) as delays,
        poisoned() as poison,
        ssdtrain.offload(net, **settings) as session,
    ):
        for _ in range(3):
            found = step(net)
            assert same_bits(found, expected)
        assert session.cache.is_idle
    assert delays.num > 20
    assert sum(poison) > 0, "nothing was released, so nothing was poisoned"


@contextlib.contextmanager
def late_loads() -> Iterator[None]:
    """No copy in begins before the block ends."""
    go, copy_in = threading.Event(), CpuDevice.copy_in

    def late(self: CpuDevice, *args: Any) -> CpuEvent:
        self._load.submit(go.wait, SOON_S)
        return copy_in(self, *args)

    with patched(CpuDevice, "copy_in", late):
        try:
            yield
        finally:
            go.set()


@pytest.mark.parametrize("verify", ["off", "checksum"])
def test_a_missing_event_is_caught(verify: str, everything: Any) -> None:
    """Poison shows it in gradients; verify stops the backward that meets it."""
    net = model()
    expected = step(net)
    with (
        poisoned(),
        missing_event(),
        ssdtrain.offload(net, verify=verify, **everything),
    ):
        if verify == "off":
            with late_loads():
                found = step(net)
            assert not same_bits(found, expected)
        else:
            with late_loads(), pytest.raises(ActivationChangedError):
                step(net)


def test_the_count_of_holders_is_what_we_think() -> None:
    base = torch.ones(8)
    assert num_holders(base) == 1
    view = base[2:]
    assert num_holders(base) == 2
    del view
    assert num_holders(base) == 1
