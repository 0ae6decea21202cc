"""One class owns the state of saved bytes: each transition books them."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdtrain.cache.identity import identify
from ssdtrain.cache.ledger import Ledger
from ssdtrain.cache.moved import Moved
from ssdtrain.cache.record import Lane, LaneProfile, Record, Retired
from ssdtrain.cache.state import RecordState, SavedBytes
from ssdtrain.counters import Counters
from ssdtrain.transfer.device import CpuDevice

NUM = 64
KEPT, LEAVING, AWAY = RecordState.KEPT, RecordState.LEAVING, RecordState.AWAY
RETURNING, BACK = RecordState.RETURNING, RecordState.BACK


class Load:
    """A copy in, which may fail."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.num_waits = 0

    def wait(self, device: Any) -> None:
        self.num_waits += 1
        if self.error is not None:
            raise self.error


class Books:
    """A ledger, and bytes that are booked there."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self.ledger = Ledger(device, Counters())
        self.lane = Lane("model/0", LaneProfile())
        self.tensor = torch.zeros(NUM, dtype=torch.uint8)

    def record(self) -> SavedBytes:
        key, _ = identify(self.tensor)
        made = Record(key, self.lane, "op", Retired(), self.ledger)
        made.open(self.tensor.detach())
        return made

    def moved(self) -> SavedBytes:
        return Moved(self.tensor, "op", self.lane, self.ledger, None)

    def agree(self, own: SavedBytes, alive: int) -> bool:
        """Whether the record, what it holds and the ledger say the same."""
        ledger = self.ledger
        ledger.settle()
        has_data = (own.data is not None) == bool(alive)
        return has_data and own.holding.live_bytes == ledger.live_bytes == alive


@pytest.fixture
def books() -> Iterator[Books]:
    device = CpuDevice()
    yield Books(device)
    device.close()


@pytest.fixture(params=[Books.record, Books.moved])
def own(request: pytest.FixtureRequest, books: Books) -> SavedBytes:
    """Of the general path, and of a table's row."""
    make: Callable[[Books], SavedBytes] = request.param
    return make(books)


def data() -> Tensor:
    return torch.zeros(NUM, dtype=torch.uint8)


def test_out_and_back_twice(books: Books, own: SavedBytes) -> None:
    """Backward may come again: what left once stays away behind each."""
    parcel, load = object(), Load()
    found = [(own.state, books.agree(own, NUM))]
    own.leave(parcel)
    found.append((own.state, books.agree(own, NUM)))
    for _ in range(2):
        own.release() if own.state is LEAVING else None
        found.append((own.state, books.agree(own, 0)))
        own.start_load(data(), load)  # type: ignore[arg-type]
        found.append((own.state, books.agree(own, NUM)))
        own.arrive(books.device)
        assert own.holding.load is None
        found.append((own.state, books.agree(own, NUM)))
        own.num_uses = 1
        own.put_back()
        assert own.num_uses == 0 and own.holding.parcel is parcel
    states = [KEPT, LEAVING, *([AWAY, RETURNING, BACK] * 2)]
    assert found == [(state, True) for state in states]
    assert books.agree(own, 0) and load.num_waits == 2


def test_forwarded_bytes_stay_for_good(books: Books, own: SavedBytes) -> None:
    parcel = object()
    own.leave(parcel)
    assert own.stay() is parcel and own.holding.parcel is None
    assert own.state is KEPT and books.agree(own, NUM)
    own.put_back()
    assert own.state is KEPT and books.agree(own, NUM)


@pytest.mark.parametrize("error", [OSError("lost"), KeyboardInterrupt()])
def test_a_load_that_fails_leaves_them_away(
    books: Books, own: SavedBytes, error: BaseException
) -> None:
    """And the next one may bring them back."""
    own.leave(object())
    own.release()
    own.start_load(data(), Load(error))  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        own.arrive(books.device)
    assert own.state is AWAY and own.holding.load is None and books.agree(own, 0)
    own.start_load(data(), Load())  # type: ignore[arg-type]
    own.arrive(books.device)
    assert own.state is BACK and books.agree(own, NUM)


def test_what_a_region_makes_again_is_dropped_and_made(books: Books) -> None:
    record: Any = books.record()
    record.region = object()
    found = []
    for act, alive in [
        (record.drop, 0),
        (lambda: record.made_again(data()), NUM),
        (record.put_back, 0),
        (lambda: record.made_again(data()), NUM),
        (record.drop_again, 0),
        (lambda: record.made_again(data()), NUM),
        (record.pin, NUM),
    ]:
        act()
        assert books.agree(record, alive), record.state
        found.append(record.state)
    assert all(before is not after for before, after in pairwise(found))
    record.put_back()
    assert record.state is KEPT and record.region is None
