"""The races of the field, each as an order that must hold, without luck in timing."""

import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.cache.record import RecordState
from ssdtrain.cache.window import ReleaseWindow
from ssdtrain.counters import Counters, Trace
from ssdtrain.transfer.device import CpuDevice
from ssdtrain.transfer.offloader import Drain, Meters, Offloader
from ssdtrain.transfer.parcel import Parcel, ParcelState
from ssdtrain.transfer.pinned import PinnedPool
from ssdtrain.transfer.places import CudaCopies, place_for

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "ssdtrain" / "races"))
from fake_cuda import Event, FakeCuda, FakeRuntime, Stream
from perturb import perturbed

NUM_BYTES = 4096


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def offloader() -> Iterator[Offloader]:
    """Room for one tensor, so that the next must take the same buffer."""
    device = CpuDevice()
    meters = Meters(counters=Counters(), trace=Trace(enabled=False))
    pool = PinnedPool(device, NUM_BYTES)
    made = Offloader(device, pool, None, Drain.NEVER, 1, meters)
    yield made
    made.close()


class Held:
    """Holds a worker back until the block ends."""

    def __init__(self, executor: Any) -> None:
        self.gate = threading.Event()
        executor.submit(self.gate.wait)

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *error: object) -> None:
        self.gate.set()


def filled(value: int) -> torch.Tensor:
    return torch.full((NUM_BYTES,), value, dtype=torch.uint8)


def test_a_load_waits_for_its_own_copy_out(offloader: Offloader) -> None:
    """Megatron#7398: the reload races its own copy to the host."""
    target = filled(9)
    with Held(offloader.device._store):
        parcel = offloader.store(filled(7), "t", lambda: True)
        assert parcel is not None
        load = offloader.load(parcel, target)
        threading.Event().wait(0.02)
    load.wait(offloader.device)
    assert torch.equal(target, filled(7))
    offloader.discard(parcel)


def test_a_buffer_is_not_written_while_a_load_reads_it(offloader: Offloader) -> None:
    """DeepSpeed#8186: a pooled buffer is reused before the copy from it has run."""
    target = filled(9)
    with Held(offloader.device._load):
        first = offloader.store(filled(7), "first", lambda: True)
        assert first is not None
        load = offloader.load(first, target)
        offloader.discard(first)
        second = offloader.store(filled(8), "second", lambda: True)
        assert second is not None
        assert second.buffer is not None
        threading.Event().wait(0.02)
    load.wait(offloader.device)
    assert torch.equal(target, filled(7))
    offloader.discard(second)


class Leaving:
    """What the window needs of a record."""

    state = RecordState.LEAVING
    num_bytes = NUM_BYTES
    data: Any = None

    def release(self) -> None:
        self.state = RecordState.AWAY


def test_memory_is_not_let_go_before_its_copy(offloader: Offloader) -> None:
    """torchtune#1867: a tensor is freed while its copy is in flight."""
    window, record = ReleaseWindow(offloader), Leaving()
    held = Held(offloader.device._store)
    source = filled(7)
    parcel = offloader.store(source, "t", lambda: True)
    assert parcel is not None
    window.add(record, source, parcel)  # type: ignore[arg-type]
    threading.Timer(0.03, held.gate.set).start()
    window.release_oldest()
    assert record.state is RecordState.AWAY
    assert parcel.copied.query(), "released before the copy had ended"
    offloader.discard(parcel)


def test_release_does_not_wait_to_be_seen(everything: Any) -> None:
    """torchtitan#735: frees that come late, and at random, pile memory up."""
    one = 32 * 64 * 4
    layers = [(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    net = nn.Sequential(*[layer for pair in layers for layer in pair])
    settings = {**everything, "window_bytes": 2 * one}
    with perturbed(seed=0), ssdtrain.offload(net, **settings) as session:
        for _ in range(2):
            net(torch.randn(32, 64, requires_grad=True)).sum().backward()
            report = session.last_step
            assert report is not None
            assert report.saved_backward_start_bytes <= 2 * one


def test_copies_are_ordered_behind_the_producer(cuda: FakeCuda) -> None:
    """torchtitan#2581: `current_stream()` inside `with stream(s)` is s itself."""
    source, buffer = torch.ones(4), torch.empty(4)
    produced = cuda.default.tick()
    done = cuda.device.copy_out(source, buffer, [cuda.device.now()])
    assert done.after(cuda.default, produced)
    assert torch.equal(source, buffer)
    # And compute is ordered behind a load, once it has waited for it.
    cuda.device._load.tick()
    loaded = cuda.device.copy_in(buffer, source, [cuda.device.now()])
    cuda.device.wait(loaded)
    assert cuda.default.known[cuda.device._load] >= 1


def test_whoever_computes_is_waited_for(cuda: FakeCuda) -> None:
    """torchtune#2683: tensors of a side stream (tensor parallelism's collectives)."""
    side = Stream()
    with cuda.on(side):
        produced = side.tick()
        done = cuda.device.copy_out(torch.ones(4), torch.empty(4), [cuda.device.now()])
    assert done.after(side, produced)
    loaded = Event()
    loaded.known = {cuda.device._load: 5}
    with cuda.on(side):
        cuda.device.wait(loaded)
    assert side.known[cuda.device._load] == 5


def test_memory_goes_back_in_the_order_of_its_own_stream(cuda: FakeCuda) -> None:
    """Released from another stream than the one that owns the block."""
    side, record = Stream(), Leaving()
    window = ReleaseWindow(SimpleNamespace(device=cuda.device))
    copied = Event()
    copied.known = {cuda.device._store: 3}
    parcel = Parcel("t", NUM_BYTES, ParcelState.STAGED, None, copied)  # type: ignore[arg-type]
    with cuda.on(side):
        window.add(record, filled(7), parcel)  # type: ignore[arg-type]
    window.release_oldest()
    assert side.known.get(cuda.device._store) == 3


def test_the_tensor_itself_is_let_go(everything: Any) -> None:
    """TransformerEngine#1514: a nested reference keeps the device copy alive."""
    held: list[weakref.ref[Any]] = []

    class Quantized(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            small = x.to(torch.float8_e4m3fn)
            scale = torch.full((64,), 2.0)
            held.extend(weakref.ref(t.untyped_storage()) for t in (small, scale))
            ctx.save_for_backward(small, scale)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            small, scale = ctx.saved_tensors
            return gradient * scale[0] + small.float() * 0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Quantized.apply(x).exp().sum()

    net, x = Net(), torch.randn(64, requires_grad=True)
    with ssdtrain.offload(net, **everything):
        loss = net(x)
        assert [storage() for storage in held] == [None, None]
        loss.backward()


@pytest.mark.parametrize("runtime", [FakeRuntime(), None])
def test_places_are_ordered_as_parcels_are(cuda: FakeCuda, runtime: Any) -> None:
    """Out behind its producer, back behind its own copy out, out again behind that."""
    copies, device = CudaCopies(cuda.device, runtime), cuda.device
    copies._torch_device = torch.device("cpu")
    place = place_for(PinnedPool(CpuDevice(), 1 << 20), torch.ones(4))
    assert place is not None
    store, load, read = device.store_stream, device.load_stream, 0
    for number in range(2):
        side = Stream()
        with cuda.on(side):
            produced = side.tick()
            copies.out(place, torch.full((4,), float(number)))
        assert place.copied.after(side, produced)
        if number:
            assert place.copied.after(load, read)
        copied = store.tick()
        place.copied.record(store)
        allocated = cuda.current.tick()
        found = copies.back(place)
        assert torch.equal(found, torch.full((4,), float(number)))
        assert place.loaded.after(store, copied)
        assert place.loaded.after(cuda.current, allocated)
        read = load.tick()
        place.loaded.record(load)
        copies.arrive(place)
        assert cuda.current.known[load] >= read
    assert cuda.current is cuda.default
