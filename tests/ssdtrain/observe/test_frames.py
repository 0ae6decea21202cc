"""For how many marks somebody beside the cache holds a saved tensor."""

import weakref

import torch
from torch import Tensor

from ssdtrain.cache.identity import identify, raw_bytes
from ssdtrain.cache.ledger import Ledger
from ssdtrain.cache.record import (
    NO_PLAN,
    Lane,
    LaneCursor,
    LaneProfile,
    Record,
    Retired,
)
from ssdtrain.cache.state import RecordState
from ssdtrain.counters import Counters
from ssdtrain.observe.frames import Frames
from ssdtrain.transfer.device import CpuDevice

NUM_BYTES = 4096


class Saver:
    """Saves tensors as the cache does, one a row."""

    def __init__(self) -> None:
        self.frames = Frames(torch.device("cpu"))
        self.cursor = LaneCursor(0, NO_PLAN)
        self.row = 0
        self._lane = Lane("model", LaneProfile())
        self._retired = Retired()
        self._ledger = Ledger(CpuDevice(), Counters())

    def save(self, tensor: Tensor, *, rebuilt: bool = False) -> Record | None:
        """A record, or none where a recipe takes its place."""
        number = self.row
        self.frames.enter(self.cursor, number, tensor, tensor.nbytes, self.row)
        if rebuilt:
            return None
        key, _ = identify(tensor)
        record = Record(key, self._lane, "x", self._retired, self._ledger)
        record.open(raw_bytes(tensor, key))
        self.cursor.records[number] = weakref.ref(record)
        return record

    def next_row(self) -> tuple[int, int]:
        """Bytes that others alone hold at this row; of them gone before its end."""
        counted = self.frames.count()
        self.row += 1
        return counted, self.frames.look(self.row)

    def marks(self, number: int) -> int:
        return self.frames.marks(0, number)


def produced() -> Tensor:
    return torch.ones(NUM_BYTES // 4, requires_grad=True) * 2


def release(record: Record | None) -> None:
    assert record is not None
    record.state, record.data = RecordState.AWAY, None


def test_what_was_released_counts_until_the_local_is_gone() -> None:
    saver, local = Saver(), produced()
    record = saver.save(local)
    saver.next_row()
    release(record)
    assert saver.next_row() == (NUM_BYTES, 0)
    del local
    assert saver.next_row() == (NUM_BYTES, 0), "it was there while the operator ran"
    assert saver.next_row() == (0, 0)
    assert saver.marks(0) == 3


def test_a_mask_that_is_rebuilt_is_gone_before_the_next_operator() -> None:
    saver = Saver()
    mask, result = torch.ones(NUM_BYTES // 4), produced()
    saver.save(mask, rebuilt=True)
    del mask
    assert saver.next_row() == (NUM_BYTES, NUM_BYTES)
    saver.save(result, rebuilt=True)
    del result
    assert saver.next_row() == (NUM_BYTES, 0), "an input lives while it is read"
    assert (saver.marks(0), saver.marks(1)) == (0, 1)
