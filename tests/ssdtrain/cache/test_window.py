"""What waits in the release window: [Note: pending release]."""

import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ssdtrain
from ssdtrain.cache.state import RecordState
from ssdtrain.cache.window import ReleaseWindow
from ssdtrain.counters import Fallback
from ssdtrain.transfer.device import CpuDevice, CpuEvent
from tests.ranks import SOON_S

NUM_BYTES = 64


class Away:
    """What the window needs of a record."""

    def __init__(self) -> None:
        self.state = RecordState.LEAVING
        self.num_bytes = NUM_BYTES
        self.data: Any = None
        self.transfer: Any = None
        self.holding = self  # which has the transfer

    def release(self) -> None:
        self.state = RecordState.AWAY

    def stay(self) -> None:
        self.state, self.transfer = RecordState.KEPT, None


class Sent:
    """What it needs of a transfer."""

    def __init__(self) -> None:
        self.copied = CpuEvent()


class Offloads:
    """What it needs of an offloader."""

    def __init__(self) -> None:
        self.device = CpuDevice()
        self.fallbacks: list[Fallback] = []

    def fall_back(self, reason: Fallback, why: str = "") -> None:
        self.fallbacks.append(reason)

    def discard(self, transfer: Any) -> None:
        pass


@pytest.fixture
def offloads() -> Iterator[Offloads]:
    made = Offloads()
    yield made
    made.device.close()


def filled_tensor() -> torch.Tensor:
    return torch.zeros(NUM_BYTES, dtype=torch.uint8)


def filled(offloads: Offloads, num: int) -> tuple[Any, list[Any], list[Any]]:
    """A window with so many leavers."""
    window: Any = ReleaseWindow(offloads)  # type: ignore[arg-type]
    records, transfers = [Away() for _ in range(num)], [Sent() for _ in range(num)]
    for record, transfer in zip(records, transfers, strict=True):
        record.transfer = transfer
        window.add(record, filled_tensor(), transfer)
    return window, records, transfers


def test_a_dead_record_is_let_go_when_its_copy_has_ended(offloads: Offloads) -> None:
    window, records, transfers = filled(offloads, 3)
    del records[1:]
    gc.collect()
    window.linger(transfers[2])
    window.linger(transfers[1])
    assert window.lingering_bytes == 2 * NUM_BYTES
    window.let_go()
    assert window.num_bytes == 3 * NUM_BYTES, "let go before the copy had ended"
    transfers[1].copied.reach()
    window.let_go()
    assert (window.num_bytes, window.lingering_bytes) == (2 * NUM_BYTES, NUM_BYTES)
    transfers[2].copied.reach()
    window.let_go()
    assert (window.num_bytes, window.lingering_bytes) == (NUM_BYTES, 0)
    transfers[0].copied.reach()
    assert window.oldest_has_left()
    window.release_oldest()
    assert window.num_bytes == 0


def test_the_end_of_backward_waits_in_order_and_not_on_the_host(
    offloads: Offloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StreamEvent:
        def query(self) -> bool:
            return False

    window, records, transfers = filled(offloads, 2)
    records.clear()
    transfers[0].copied = StreamEvent()
    waited: list[Any] = []
    monkeypatch.setattr(
        offloads.device, "wait", lambda event, order, **_: waited.append(event)
    )
    for transfer in transfers:
        window.linger(transfer)
    window.let_go_in_order()
    assert waited == [transfers[0].copied]
    assert window.num_bytes == NUM_BYTES, "a thread's copy would make the host wait"


def test_nothing_is_left_after_a_step(everything: Any) -> None:
    layers = [(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    net = torch.nn.Sequential(*[layer for pair in layers for layer in pair])
    settings = {**everything, "window_bytes": 1 << 20}  # none leaves before backward
    with ssdtrain.offload(net, **settings) as session:
        cache = session.cache
        for step in range(2):
            loss = net(torch.randn(32, 64)).sum()
            if step == 0:  # later the tail is known and kept
                assert cache.window.num_bytes > 0
            ended = threading.Event()
            cache.device._store.submit(ended.set)  # type: ignore[attr-defined]
            assert ended.wait(SOON_S)
            loss.backward()
            assert cache.is_idle
            assert cache.window.num_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_what_is_due_is_released_and_known_before(
    offloads: Offloads, seed: int
) -> None:
    """In the order of the copies, up to the first that is due later; the window knows
    the next mark at which there is something to do."""
    draw = random.Random(seed)
    window: Any = ReleaseWindow(offloads)  # type: ignore[arg-type]
    left: list[tuple[Any, Any, int | None]] = []
    for mark in range(60):
        if draw.random() < 0.7:
            record, transfer = Away(), Sent()
            transfer.copied.reach()
            due = draw.choice([None, mark + draw.randint(1, 8)])
            record.transfer = transfer
            window.add(record, filled_tensor(), transfer, due)
            left.append((record, transfer, due))
        if left and draw.random() < 0.2:
            gone = left.pop(draw.randrange(len(left)))
            window.linger(gone[1])
            window.let_go()
        expected = 0
        for number, (_, _, due) in enumerate(left):
            if due is not None and due > mark:
                break
            expected = expected if due is None else number + 1
        assert (window.next_due <= mark) == (expected > 0)
        assert window.release_due(mark) == expected
        assert all(each[0].state is RecordState.AWAY for each in left[:expected])
        left = left[expected:]
        assert all(each[0].state is RecordState.LEAVING for each in left)


def test_a_copy_that_was_replaced_releases_nothing(offloads: Offloads) -> None:
    """Its record was saved again, and leaves by a later copy."""
    window: Any = ReleaseWindow(offloads)  # type: ignore[arg-type]
    record, old, new = Away(), Sent(), Sent()
    for transfer in (old, new):
        record.transfer = transfer
        window.add(record, filled_tensor(), transfer)
        transfer.copied.reach()
    window.release_oldest()
    assert record.state is RecordState.LEAVING
    window.release_oldest()
    assert record.state is RecordState.AWAY
