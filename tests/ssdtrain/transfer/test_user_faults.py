"""What goes wrong in the user's code, or beside a storage, from pack to unpack."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.counters import Fallback
from ssdtrain.transfer.device import CpuDevice, CpuEvent
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.eventually import session_threads, until

WIDTH = 64
KEPT = Fallback.KEPT_WRITE_FAILED.value


class Stumble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, net: "Net") -> Tensor:
        ctx.net = net
        if net.fails == "forward":
            raise ZeroDivisionError("forward")
        if net.fails == "out of memory" and x.shape[0] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.net.fails == "backward":
            raise ZeroDivisionError("backward")
        return gradient * 1, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fails = ""
        pairs = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
        self.first = nn.Sequential(*[m for pair in pairs for m in pair])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Stumble.apply(self.first(x), self)).square().sum()


def step(net: Net, rows: int = 32) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    net.zero_grad()
    net(x).backward()
    return [x.grad, *(p.grad.clone() for p in net.parameters())]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return same_bits(ours, theirs)


def failing(call: Callable[[], Any], error: type[BaseException]) -> None:
    """In a frame of its own: the error's traceback holds the graph."""
    with pytest.raises(error):
        call()


def check_clean(session: ssdtrain.Session) -> None:
    gc.collect()
    assert session.cache.is_idle
    assert session.live_bytes == 0
    session.cache.window.release_down_to(0)
    offloader = session.cache.offloader
    offloader.wait_io()
    # A read under way when its record was dropped gives its buffer back as it ends.
    until(lambda: offloader.pool.used_bytes == 0)
    storage = offloader.storage
    assert storage is None or storage.stats().used_bytes == 0


@pytest.mark.parametrize("target", ["host", "ssd"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_exception_between_pack_and_unpack(
    target: str, place: str, everything: Any, tmp_path: Any
) -> None:
    net = Net()
    expected = step(net)
    settings = {"max_overhead": 0.01, **everything, "target": target, "io_threads": 2}
    if target == "ssd":
        settings["directory"] = str(tmp_path)
    before = session_threads()
    # Pools start their threads one by one: writers, readers, and two that copy.
    most = 2 * settings["io_threads"] + 2
    with ssdtrain.offload(net, **settings) as session:
        for _ in range(4):
            net.fails = place
            failing(lambda: step(net), ZeroDivisionError)
            check_clean(session)
            net.fails = ""
            assert equal(step(net), expected)
            check_clean(session)
            assert len(session_threads() - before) <= most
    assert not list(tmp_path.iterdir())
    assert session_threads() <= before


def test_an_out_of_memory_retry(everything: Any) -> None:
    """What accelerate's `find_executable_batch_size` does: half the batch, again."""
    net = Net()
    expected = step(net, rows=16)
    with ssdtrain.offload(net, **everything) as session:
        net.fails = "out of memory"
        failing(lambda: step(net, rows=32), torch.OutOfMemoryError)
        check_clean(session)
        assert equal(step(net, rows=16), expected)
        check_clean(session)


@pytest.mark.parametrize("target", ["host", "ssd"])
def test_a_copy_out_that_fails_keeps_its_tensor(
    target: str, everything: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The bytes never left the device: training goes on with them, and counts it."""
    real = CpuDevice.copy_out
    broken = [False]

    def copy(self: CpuDevice, *args: Any) -> CpuEvent:
        if broken[0]:
            done = CpuEvent()

            def die() -> None:
                done.error = MemoryError("the copy's thread died")
                done.reach()

            self._store.submit(die)
            return done
        return real(self, *args)

    monkeypatch.setattr(CpuDevice, "copy_out", copy)
    net, before = Net(), session_threads()
    expected = step(net)
    settings = {"max_overhead": 0.01, **everything, "target": target}
    if target == "ssd":
        settings["directory"] = str(tmp_path)
    with ssdtrain.offload(net, **settings) as session:
        for breaks in (True, True, False):
            broken[0] = breaks
            assert equal(step(net), expected)
            check_clean(session)
        assert sum(s.fallbacks.get(KEPT, 0) for s in session.steps) > 0
    assert session_threads() <= before
