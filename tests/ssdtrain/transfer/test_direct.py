"""The path without staging: same bytes, nothing lost, nothing left behind."""

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain import api
from ssdtrain.counters import Count, Counters, Fallback, Trace
from ssdtrain.errors import ActivationLostError
from ssdtrain.storage import PosixStorage, Slot, Storage
from ssdtrain.storage.base import ForwardingStorage
from ssdtrain.storage.gds import GdsStorage
from ssdtrain.transfer.device import CpuDevice, CpuEvent
from ssdtrain.transfer.direct import DirectOffloader
from ssdtrain.transfer.offloader import Drain, Meters
from ssdtrain.transfer.pinned import PinnedPool
from ssdtrain.transfer.transfers import TransferState
from tests.ranks import SOON_S
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.faulty import Fault, FaultKind, FaultyStorage, Operation
from tests.ssdtrain.kvikio_files import use_kvikio
from tests.ssdtrain.memory_storage import MemoryStorage

PAGE = 4096


class AnyBuffer(ForwardingStorage):
    """Takes device buffers of any length and alignment, as `GdsStorage` does."""

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        whole = self._whole(buffer)
        whole[: buffer.numel()] = buffer
        super().write(slot, whole)

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        whole = self._whole(buffer)
        super().read(slot, whole)
        buffer.copy_(whole[: buffer.numel()])

    def _whole(self, buffer: torch.Tensor) -> torch.Tensor:
        size = -(-buffer.numel() // PAGE) * PAGE
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class Gate(ForwardingStorage):
    """Writes wait until they are let through."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.open = threading.Event()

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        self.open.wait(SOON_S)
        super().write(slot, buffer)


def open_direct(
    storage: Storage, cap_bytes: int = 1 << 20, counters: Counters | None = None
) -> DirectOffloader:
    device = CpuDevice()
    meters = Meters(counters=counters or Counters(), trace=Trace(True))
    pool = PinnedPool(device, cap_bytes)
    return DirectOffloader(device, pool, storage, Drain.AT_ONCE, 2, meters)


def there_and_back(offloader: DirectOffloader, source: torch.Tensor) -> torch.Tensor:
    transfer = offloader.store(source, "x", lambda: True)
    assert transfer is not None
    target = torch.zeros_like(source)
    offloader.load(transfer, target).wait(offloader.device)
    offloader.discard(transfer)
    return target


@pytest.mark.parametrize("num_bytes", [1, 100, PAGE, 3 * PAGE + 5, 300_000])
def test_bytes_come_back(num_bytes: int) -> None:
    storage = AnyBuffer(MemoryStorage())
    counters = Counters()
    offloader = open_direct(storage, counters=counters)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    assert same_bits(there_and_back(offloader, source), source)
    offloader.wait_io()
    assert storage.stats().used_bytes == 0
    assert offloader.pool.total_bytes == 0, "no staging was used"
    counts = counters.take().counts
    assert counts[Count.WRITTEN] == num_bytes
    offloader.close()


def test_bytes_are_computed_before_they_are_written_or_overwritten() -> None:
    """The storage knows no streams: the worker waits for the caller's compute."""
    order: list[str] = []

    class Ready(CpuEvent):
        def synchronize(self) -> None:
            order.append("computed")

    class Device(CpuDevice):
        def now(self) -> CpuEvent:
            return Ready(done=True)

    class Told(AnyBuffer):
        def write(self, slot: Slot, buffer: torch.Tensor) -> None:
            order.append("written")
            super().write(slot, buffer)

        def read(self, slot: Slot, buffer: torch.Tensor) -> None:
            order.append("read")
            super().read(slot, buffer)

    device = Device()
    meters = Meters(counters=Counters(), trace=Trace(True))
    pool, storage = PinnedPool(device, 1 << 20), Told(MemoryStorage())
    offloader = DirectOffloader(device, pool, storage, Drain.AT_ONCE, 2, meters)
    source = torch.ones(PAGE, dtype=torch.uint8)
    transfer = offloader.store(source, "x", lambda: True)
    assert transfer is not None
    offloader.wait_io()
    assert order == ["computed", "written"]
    target = torch.zeros_like(source)
    offloader.load(transfer, target).wait(device)
    assert order == ["computed", "written", "computed", "read"]
    offloader.discard(transfer)
    offloader.close()


@pytest.mark.parametrize("kind", [FaultKind.IO_ERROR, FaultKind.NO_SPACE])
@pytest.mark.parametrize("cap_bytes", [1 << 20, 1])
def test_what_a_write_did_not_take_is_kept(kind: FaultKind, cap_bytes: int) -> None:
    fault = Fault(operation=Operation.WRITE, kind=kind, at=0)
    storage = FaultyStorage(AnyBuffer(MemoryStorage()), [fault])
    counters = Counters()
    offloader = open_direct(storage, cap_bytes, counters)
    source = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    kept = source.clone()
    transfer = offloader.store(source, "x", lambda: True)
    assert transfer is not None
    offloader.device.wait(transfer.copied)
    del source  # released
    for _ in range(2):
        target = torch.zeros_like(kept)
        offloader.load(transfer, target).wait(offloader.device)
        assert same_bits(target, kept)
    offloader.discard(transfer)
    assert storage.stats().used_bytes == 0
    assert offloader.pool.used_bytes == 0
    fallbacks = counters.take().fallbacks
    full = kind is FaultKind.NO_SPACE
    reason = Fallback.KEPT_STORAGE_FULL if full else Fallback.KEPT_WRITE_FAILED
    assert fallbacks[reason] == 1
    offloader.close()


def test_no_room_keeps_the_tensor() -> None:
    offloader = open_direct(AnyBuffer(MemoryStorage(capacity_bytes=PAGE)))
    source = torch.zeros(2 * PAGE, dtype=torch.uint8)
    assert offloader.store(source, "x", lambda: True) is None
    offloader.close()


def test_a_failed_read_is_lost_and_says_so() -> None:
    fault = Fault(operation=Operation.READ, kind=FaultKind.IO_ERROR, at=0)
    offloader = open_direct(FaultyStorage(AnyBuffer(MemoryStorage()), [fault]))
    source = torch.zeros(PAGE, dtype=torch.uint8)
    transfer = offloader.store(source, "layer 3", lambda: True)
    assert transfer is not None
    for _ in range(2):
        load = offloader.load(transfer, torch.empty_like(source))
        with pytest.raises(ActivationLostError, match=r"layer 3 \(4096 bytes\)"):
            load.wait(offloader.device)
    assert transfer.state is TransferState.LOST
    offloader.discard(transfer)
    offloader.close()


def test_discarded_while_it_is_written() -> None:
    gate = Gate(AnyBuffer(MemoryStorage()))
    offloader = open_direct(gate)
    source = torch.zeros(PAGE, dtype=torch.uint8)
    transfers = [offloader.store(source, "x", lambda: True) for _ in range(4)]
    assert not offloader._writers._shutdown
    for transfer in transfers:
        assert transfer is not None
        assert not transfer.copied.query()
        offloader.discard(transfer)
    gate.open.set()
    offloader.wait_io()
    for transfer in transfers:
        assert transfer is not None
        transfer.copied.synchronize()
    assert gate.stats().used_bytes == 0
    offloader.close()


def train(
    device: str, wrap: Callable[[nn.Module], ssdtrain.Session | None]
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(33, 33), nn.GELU()) for _ in range(4)]
    ).to(device)
    session = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(17, 33, generator=generator).to(device)
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    if session is not None:
        report = session.last_step
        assert report is not None and report.bytes_written > 0
        session.close()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def check_training(
    storage: Storage,
    device: str,
    everything: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    drain: Drain = Drain.AT_ONCE,
    cap_bytes: int = 1 << 20,
) -> None:
    def open_it(settings: Any, device: Any, meters: Meters) -> DirectOffloader:
        pool = PinnedPool(device, cap_bytes)
        return DirectOffloader(device, pool, storage, drain, 2, meters)

    monkeypatch.setattr(api, "_open_offloader", open_it)
    plain = train(device, lambda _: None)
    moved = train(device, lambda model: ssdtrain.offload(model, **everything))
    assert same_bits(plain, moved)
    assert storage.stats().used_bytes == 0


class Asked(AnyBuffer):
    """Notes where the bytes of each write were."""

    def __init__(self, inner: Storage, pool: Callable[[int], bool]) -> None:
        super().__init__(inner)
        self._pool = pool
        self.staged: list[bool] = []

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        self.staged.append(self._pool(buffer.data_ptr()))
        super().write(slot, buffer)


def test_what_does_not_fit_into_host_memory_goes_past_it() -> None:
    """Two transfers fit; the others go the direct way while no older one makes room.
    All come back, and nothing is left."""
    device, counters = CpuDevice(), Counters()
    sources = [torch.randint(0, 256, (8 * PAGE,), dtype=torch.uint8) for _ in range(8)]
    own = {source.data_ptr() for source in sources}
    storage = Asked(MemoryStorage(), lambda address: address not in own)
    gate = Gate(storage)
    pool = PinnedPool(device, 18 * PAGE)
    meters = Meters(counters=counters, trace=Trace(False))
    offloader = DirectOffloader(device, pool, gate, Drain.WHEN_FULL, 2, meters)
    transfers = [
        offloader.store(s, f"{i}", lambda: True) for i, s in enumerate(sources)
    ]
    assert all(transfer is not None for transfer in transfers)
    assert pool.total_bytes <= 18 * PAGE
    gate.open.set()
    offloader.wait_io()
    assert storage.staged.count(False) == 6, "past host memory"
    for transfer, source in zip(reversed(transfers), reversed(sources), strict=True):
        assert transfer is not None
        offloader.recall(transfer)
        target = torch.zeros_like(source)
        offloader.load(transfer, target).wait(device)
        assert same_bits(target, source)
        offloader.discard(transfer)
    offloader.wait_io()
    assert storage.stats().used_bytes == 0 and pool.used_bytes == 0
    assert counters.take().fallbacks == {}
    offloader.close()


@pytest.mark.parametrize("cap_bytes", [1 << 12, 1 << 15])
def test_tiered_past_host_memory_trains_to_the_same_bits(
    cap_bytes: int, everything: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = AnyBuffer(MemoryStorage())
    settings = {"max_overhead": 0.01, **everything, "target": "tiered"}
    check_training(storage, "cpu", settings, monkeypatch, Drain.WHEN_FULL, cap_bytes)


@pytest.mark.parametrize("failing", [False, True])
def test_a_model_trains_to_the_same_bits(
    failing: bool, everything: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [
        Fault(operation=Operation.WRITE, kind=FaultKind.IO_ERROR, at=at)
        for at in range(0, 30, 3)
    ]
    storage = FaultyStorage(AnyBuffer(MemoryStorage()), faults if failing else [])
    check_training(storage, "cpu", everything, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_trains_to_the_same_bits(
    tmp_path: Path, everything: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kvikio(monkeypatch)
    storage = GdsStorage(PosixStorage(tmp_path))
    check_training(storage, "cuda", everything, monkeypatch)
