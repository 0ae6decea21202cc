"""Races: any schedule of the workers gives the same bytes, and a missing edge shows."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ssdtrain
from ssdtrain.errors import ActivationChangedError
from ssdtrain.transfer.device import CpuDevice, CpuEvent, Event

sys.path.insert(0, str(Path(__file__).parent))
from perturb import missing_event, num_holders, patched, perturbed, poisoned

from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.mlp import WIDTH, gradients_of, mlp
from tests.ssdtrain.targets import TARGETS

SEEDS = range(2)


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
    net = mlp()
    expected = gradients_of(net)
    settings = settings_of(target, everything, tmp_path)
    with (
        perturbed(seed) as delays,
        poisoned() as poison,
        ssdtrain.offload(net, **settings) as session,
    ):
        for _ in range(3):
            found = gradients_of(net)
            assert same_bits(found, expected)
        assert session.cache.is_idle
    assert delays.num > 20
    assert sum(poison) > 0, "nothing was released, so nothing was poisoned"


@contextlib.contextmanager
def late_loads() -> Iterator[None]:
    """No copy in begins before the block ends."""
    end, copy_in = CpuEvent(), CpuDevice.copy_in

    def late(self: CpuDevice, buffer: Tensor, target: Tensor, after: Any) -> Event:
        return copy_in(self, buffer, target, [*after, end])

    with patched(CpuDevice, "copy_in", late):
        try:
            yield
        finally:
            end.reach()


@pytest.mark.parametrize("verify", ["off", "checksum"])
def test_a_missing_event_is_caught(verify: str, everything: Any) -> None:
    """Poison shows it in gradients; verify stops the backward that meets it."""
    net = mlp()
    expected = gradients_of(net)
    with (
        poisoned(),
        missing_event(),
        ssdtrain.offload(net, verify=verify, **everything),
    ):
        if verify == "off":
            with late_loads():
                found = gradients_of(net)
            assert not same_bits(found, expected)
        else:
            with late_loads(), pytest.raises(ActivationChangedError):
                gradients_of(net)


def test_the_count_of_holders_is_what_we_think() -> None:
    base = torch.ones(8)
    assert num_holders(base) == 1
    view = base[2:]
    assert num_holders(base) == 2
    del view
    assert num_holders(base) == 1
