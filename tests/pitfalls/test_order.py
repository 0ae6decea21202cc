"""The races of the field, each as an order that must hold, without luck in timing."""

import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.cache.state import RecordState
from ssdtrain.cache.window import ReleaseWindow
from ssdtrain.counters import Counters, Trace
from ssdtrain.transfer import copies as in_places
from ssdtrain.transfer.copies import CudaCopies, PinnedBuffer, buffer_for
from ssdtrain.transfer.device import CpuDevice, CpuEvent
from ssdtrain.transfer.native import TO_HOST, Native
from ssdtrain.transfer.offloader import Drain, Meters, Offloader
from ssdtrain.transfer.pinned import PinnedPool
from ssdtrain.transfer.transfers import Transfer, TransferState
from tests.compilers import HAS_COMPILER, needs_compiler

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "ssdtrain" / "races"))
from fake_cuda import Event, FakeCuda, FakeRuntime, Stream
from perturb import perturbed

NUM_BYTES = 4096
Buffers = list[PinnedBuffer]


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
        transfer = offloader.store(filled(7), "t", lambda: True)
        assert transfer is not None
        load = offloader.load(transfer, target)
        threading.Event().wait(0.02)
    load.wait(offloader.device)
    assert torch.equal(target, filled(7))
    offloader.discard(transfer)


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

    def enter(
        self, window: ReleaseWindow, data: torch.Tensor, transfer: Any, due: Any = None
    ) -> None:
        self.holding = SimpleNamespace(transfer=transfer)
        window.add(self, data, transfer, due=due)  # type: ignore[arg-type]

    def release(self) -> None:
        self.state = RecordState.AWAY


def test_memory_is_not_let_go_before_its_copy(offloader: Offloader) -> None:
    """torchtune#1867: a tensor is freed while its copy is in flight."""
    window, record = ReleaseWindow(offloader), Leaving()
    held = Held(offloader.device._store)
    source = filled(7)
    transfer = offloader.store(source, "t", lambda: True)
    assert transfer is not None
    record.enter(window, source, transfer)
    threading.Timer(0.03, held.gate.set).start()
    window.release_oldest()
    assert record.state is RecordState.AWAY
    assert transfer.copied.query(), "released before the copy had ended"
    offloader.discard(transfer)


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
    transfer = Transfer("t", NUM_BYTES, TransferState.STAGED, None, copied)  # type: ignore[arg-type]
    with cuda.on(side):
        record.enter(window, filled(7), transfer)
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


Make = Callable[[FakeCuda], Any]
MADE: list[Any] = [
    lambda cuda: FakeRuntime(),
    pytest.param(lambda cuda: Native(FakeRuntime(), cuda.device), marks=needs_compiler),
    lambda cuda: None,
]
"""Copies by calls from Python, from C, and, where they are watched, torch's own."""


@pytest.mark.parametrize("make", MADE)
def test_places_are_ordered_as_transfers_are(cuda: FakeCuda, make: Make) -> None:
    """Out behind its producer, back behind its own copy out, out again behind that."""
    copies, device = copies_on(cuda, make(cuda)), cuda.device
    place = buffer_for(PinnedPool(CpuDevice(), 1 << 20), torch.ones(4))
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
        (found,) = copies.back([place])
        assert torch.equal(found, torch.full((4,), float(number)))
        assert place.loaded.after(store, copied)
        assert place.loaded.after(cuda.current, allocated)
        read = load.tick()
        place.loaded.record(load)
        copies.arrive(place)
        assert cuda.current.known[load] >= read
    assert cuda.current is cuda.default


@pytest.fixture
def places() -> Buffers:
    pool = PinnedPool(CpuDevice(), 1 << 20)
    found = [buffer_for(pool, torch.ones(4)) for _ in range(4)]
    return [place for place in found if place is not None]


def copies_on(cuda: FakeCuda, native: Any) -> CudaCopies:
    """native: None: the copies are watched."""
    cuda.device.is_watching = native is None
    cuda.device.torch_device = torch.device("cpu")
    return CudaCopies(cuda.device, native)


def away(cuda: FakeCuda, copies: CudaCopies, places: Buffers) -> list[int]:
    """All of them are copied out; the number of each copy on the store stream."""
    found, store = [], cuda.device.store_stream
    for number, place in enumerate(places):
        cuda.current.tick()
        copies.out(place, torch.full((4,), float(number)))
        found.append(store.tick())
        place.copied.record(store)
    return found


@pytest.mark.parametrize("make", MADE)
def test_a_batch_in_is_ordered_as_its_copies_are(
    cuda: FakeCuda, places: Buffers, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy behind its own copy out and behind what used its memory before; whoever
    waits for one of the batch reads bytes that are there."""
    runtime = make(cuda)
    copies, load = copies_on(cuda, runtime), cuda.device.load_stream
    out = away(cuda, copies, places)
    room_for, used = in_places.room_for, []

    def allocate(place: PinnedBuffer, device: Any) -> torch.Tensor:
        used.append(cuda.current.tick())  # what had this memory before
        return room_for(place, device)

    monkeypatch.setattr(in_places, "room_for", allocate)
    found = copies.back(places)
    assert [int(tensor[0]) for tensor in found] == [0, 1, 2, 3]
    for place, copied in zip(places, out, strict=True):
        assert place.loaded.after(cuda.device.store_stream, copied)
        assert place.loaded.after(cuda.current, used[-1])
    if runtime is not None:
        (event,) = {place.loaded for place in places}
        assert event.after(load, len(places)), "one event, behind the last copy"


class Waits:
    """Counts compute's waits."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[Stream] = []
        wait = cuda.device.wait

        def counted(event: Any, order: Any = None, *, outwards: bool = False) -> None:
            self.streams.append(cuda.current if order is None else order)
            wait(event, order, outwards=outwards)

        monkeypatch.setattr(cuda.device, "wait", counted)


class CountedCopies(FakeRuntime):
    """Notes when each copy was started, and counts waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0
        self.started: dict[int, tuple[int, dict[Stream, int]]] = {}
        """By host address: number on its stream, and what that was behind."""

    def _wait(self, stream: int, event: int, flags: int) -> int:
        self.num_waits += 1
        return super()._wait(stream, event, flags)

    def _copy(self, to: int, source: int, count: int, kind: int, stream: int) -> int:
        own = Stream.made[stream - 1]
        before = dict(own.known)
        done = super()._copy(to, source, count, kind, stream)
        self.started[to if kind == TO_HOST else source] = own.known[own], before
        return done


@pytest.mark.parametrize("seed", range(40))
def test_no_copy_overtakes_one_of_the_other_way(
    cuda: FakeCuda, places: Buffers, seed: int
) -> None:
    """Out and in, in any order, in batches: each behind the last one of its
    place, however few waits are left."""
    runtime, draw = CountedCopies(), random.Random(seed)
    in_c = HAS_COMPILER and seed % 2
    calls: Any = Native(runtime, cuda.device) if in_c else runtime
    copies, device = copies_on(cuda, calls), cuda.device
    other = {True: device.load_stream, False: device.store_stream}
    last: dict[int, int] = {}
    away: Buffers = []
    for _ in range(60):
        home = [place for place in places if place not in away]
        cuda.current.tick()
        outwards = bool(home) and (not away or draw.random() < 0.5)
        if outwards:
            chosen = [draw.choice(home)]
            copies.out(chosen[0], torch.ones(4))
            away += chosen
        else:
            chosen = draw.sample(away, draw.randint(1, len(away)))
            copies.back(chosen)
            away = [place for place in away if place not in chosen]
        for place in chosen:
            address = place.memory.data_ptr()
            number, before = runtime.started[address]
            assert before.get(other[outwards], 0) >= last.get(address, 0)
            last[address] = number


def test_a_settled_step_waits_once_each_way(cuda: FakeCuda, places: Buffers) -> None:
    """For the copies of the other way, besides compute and by compute."""
    runtime = CountedCopies()
    copies = copies_on(cuda, runtime)

    def step() -> int:
        before = runtime.num_waits
        for place in places:
            copies.out(place, torch.ones(4))
        for place in reversed(places):
            copies.back([place])
        return runtime.num_waits - before

    step()
    assert step() == 2 * len(places) + 2


def test_all_copies_of_a_watched_batch_are_waited_for(
    cuda: FakeCuda, places: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own copies: whoever waits for one of the batch waits no second time."""
    copies, load = copies_on(cuda, None), cuda.device.load_stream
    away(cuda, copies, places)
    copy_in, read = cuda.device.copy_in, []

    def numbered(*arguments: Any) -> Any:
        read.append(load.tick())
        return copy_in(*arguments)

    monkeypatch.setattr(cuda.device, "copy_in", numbered)
    copies.back(places)
    copies.arrive(places[0])
    copies.arrive(places[-1])
    assert cuda.default.known[load] >= read[-1]


@pytest.mark.parametrize("make", MADE)
def test_who_has_waited_for_a_batch_waits_no_more(
    cuda: FakeCuda, places: Buffers, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, waits = copies_on(cuda, make(cuda)), Waits(cuda, monkeypatch)
    first, second = places[:2], places[2:]
    away(cuda, copies, places)
    mine, side = cuda.default, Stream()
    copies.back(first)
    copies.arrive(first[1])
    copies.arrive(first[0])
    assert waits.streams == [mine]
    copies.back(second)
    copies.arrive(second[0])
    assert waits.streams == [mine, mine], "a later batch"
    for place in places:
        copies.arrive(place)
    assert waits.streams == [mine, mine], "the earlier one is before it"
    with cuda.on(side):  # has waited for nothing
        copies.arrive(first[0])
    assert waits.streams == [mine, mine, side]


@pytest.mark.parametrize("make", MADE)
def test_a_number_that_a_stream_leaves_to_another_is_not_believed(
    cuda: FakeCuda,
    places: Buffers,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two steps a stream may be destroyed: no wait of before counts then."""
    copies, waits = copies_on(cuda, make(cuda)), Waits(cuda, monkeypatch)
    away(cuda, copies, places)
    copies.back(places[:2])
    copies.arrive(places[0])
    away(cuda, copies, places[2:])
    copies.arrive(places[1])
    assert len(waits.streams) == 2


def test_waits_that_a_capture_left_out_are_not_counted(
    cuda: FakeCuda, places: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    copies, load = copies_on(cuda, FakeRuntime()), cuda.device.load_stream
    away(cuda, copies, places)
    copies.back(places)
    assert cuda.device.is_capturing()
    read = load.tick()
    places[0].loaded.record(load)
    copies.arrive(places[0])
    captures.clear()
    captures.append(False)
    copies.arrive(places[1])
    assert cuda.current.known[load] >= read


def test_copies_out_that_are_due_together_are_waited_for_once(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of each stream's; one that a thread makes says for itself."""
    waits, side = Waits(cuda, monkeypatch), Stream()
    window = ReleaseWindow(SimpleNamespace(device=cuda.device))  # type: ignore[arg-type]
    store, threaded = cuda.device.store_stream, CpuEvent(done=True)
    records = [Leaving() for _ in range(6)]
    for number, record in enumerate(records):
        copied: Any = Event()
        store.tick()
        copied.record(store)
        transfer = Transfer("t", NUM_BYTES, TransferState.STAGED, None, copied)
        if number == 3:
            transfer.copied = threaded
        with cuda.on(side if number == 1 else cuda.default):
            record.enter(window, filled(7), transfer, due=number // 5)
    assert window.release_due(0) == 5
    assert waits.streams == [cuda.default, cuda.default, side]
    assert cuda.default.known[store] == 5 and side.known[store] == 2
    assert [record.state for record in records] == [
        *[RecordState.AWAY] * 5,
        RecordState.LEAVING,
    ]
