"""The probe of what copies cost compute (cache/contention.py)."""

from dataclasses import replace

import pytest
import torch

from ssdtrain.cache import contention as module
from ssdtrain.cache.contention import Contention, measure, slowdown_of
from ssdtrain.cache.observer import fitted_links
from ssdtrain.plan.profile import COPY_SLOWDOWN
from ssdtrain.remat.clock import Clock
from ssdtrain.transfer.device import Copy, CpuDevice, MemoryLevel
from ssdtrain.transfer.pinned import PinnedPool

COPIES = [Copy(True, 1000, 1.0), Copy(False, 1000, 1.0)]


class Measured(CpuDevice):
    """A CPU that has an allocator to ask, as a GPU has."""

    def memory(self) -> MemoryLevel:  # type: ignore[override]
        return MemoryLevel(0, 0, 0, 0)


def test_the_fastest_runs_are_compared() -> None:
    assert slowdown_of([1.0, 1.001, 1.5], [1.2, 1.02]) == pytest.approx(0.02)
    assert slowdown_of([1.0, 1.0, 1.0], [0.9, 1.0]) == 0.0


def test_noise_is_no_measurement() -> None:
    assert slowdown_of([1.0, 1.2, 1.3], [1.25, 1.3]) is None


def test_a_device_without_an_allocator_is_not_probed() -> None:
    device = CpuDevice()
    pool = PinnedPool(device, 1 << 26)
    clock = Clock(torch.device("cpu"))
    assert measure(device, pool, clock, COPIES) == Contention()
    device.close()


@pytest.mark.parametrize("cap_bytes", [1 << 26, 1 << 20], ids=["room", "no room"])
def test_the_probe_gives_its_buffers_back(
    cap_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SIDE": 16, "LEAST_MOVED_BYTES": 1, "NUM_ROUNDS": 2}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "PROBE_BYTES", 1 << 20)
    device = Measured()
    pool = PinnedPool(device, cap_bytes)
    found = measure(device, pool, Clock(torch.device("cpu")), COPIES)
    assert pool.used_bytes == 0
    assert (found.duplex_slowdown is None) == (cap_bytes == 1 << 20)
    device.close()


def test_what_cannot_be_told_is_assumed() -> None:
    links = fitted_links(COPIES, None, Contention())
    assert links is not None and links.copy_slowdown == COPY_SLOWDOWN
    told = fitted_links(COPIES, None, Contention(0.02, 0.07))
    assert told == replace(links, copy_slowdown=0.02, duplex_slowdown=0.07)
