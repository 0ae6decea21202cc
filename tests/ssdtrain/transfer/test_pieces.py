"""Copies by pieces: the bytes, the order, and that the engine is left to others."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdtrain.transfer.native import TO_DEVICE, TO_HOST, Calls, Native, Ordering
from tests.compilers import needs_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "pitfalls"))
from fake_cuda import FakeCuda, FakeRuntime, Stream

PIECE = 64
Make = Callable[..., Calls]


class Written(FakeRuntime):
    """Writes its copies down: the stream, and the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Stream, int]] = []
        self.behind: list[dict[Stream, int]] = []
        """Of each copy, what its stream was behind when it came."""

    def _copy(self, to: int, source: int, count: int, kind: int, stream: int) -> int:
        self.copies.append((Stream.made[stream - 1], count))
        self.behind.append(dict(Stream.made[stream - 1].known))
        return super()._copy(to, source, count, kind, stream)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


pytestmark = needs_compiler


@pytest.fixture
def make() -> Make:
    return Native


def status_of(
    calls: Calls, cuda: FakeCuda, source: Tensor, target: Tensor, kind: int
) -> int:
    """Copy, behind compute."""
    device = cuda.device
    stream = device.load_stream if kind == TO_DEVICE else device.store_stream
    (_, ready), (_, done) = device.event(), device.event()
    part = target.data_ptr(), source.data_ptr(), source.nbytes
    own = cuda.current.cuda_stream
    order = Ordering(kind, ready, own, stream.cuda_stream, more=0, done=done)
    return calls.batch(order, [part])


def moved(calls: Calls, cuda: FakeCuda, num_bytes: int, kind: int = TO_DEVICE) -> bool:
    """Copy so many bytes, and say whether they came."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    assert status_of(calls, cuda, source, target, kind) == 0
    return torch.equal(target, source)


def test_pieces_go_by_two_streams_in_turns(cuda: FakeCuda, make: Make) -> None:
    """However large each copy is: no stream has more than a piece at a time."""
    written = Written()
    load, side = cuda.device.load_stream, cuda.device.load_side
    calls = make(written, cuda.device, PIECE, PIECE)
    for num_bytes in (PIECE // 2, PIECE, 3 * PIECE, 7):
        assert moved(calls, cuda, num_bytes)
    half = PIECE // 2
    assert written.copies == [
        *[(load, half), (load, half), (side, half)],
        *[(side, half), (load, PIECE), (side, PIECE), (load, half), (load, 7)],
    ]


def test_each_piece_waits_for_the_one_before(cuda: FakeCuda, make: Make) -> None:
    """Or both streams would fill the engine; and all keep the order of one stream."""
    written = Written()
    calls = make(written, cuda.device, PIECE, PIECE)
    compute = cuda.default
    produced = compute.tick()
    moved(calls, cuda, 5 * PIECE)
    for number, known in enumerate(written.behind):
        assert known[compute] == produced
        for stream in {stream for stream, _ in written.copies[:number]}:
            before = [each for each, _ in written.copies[:number]]
            assert known[stream] == before.count(stream)


def test_whoever_waits_for_the_load_stream_waits_for_all_pieces(
    cuda: FakeCuda, make: Make
) -> None:
    written = Written()
    load = cuda.device.load_stream
    calls = make(written, cuda.device, PIECE, PIECE)
    for num_bytes in (2 * PIECE, PIECE):
        moved(calls, cuda, num_bytes)
        cuda.default.wait_stream(load)
        for stream in {stream for stream, _ in written.copies}:
            count = [each for each, _ in written.copies].count(stream)
            assert cuda.default.known[stream] == count


def test_both_directions_are_apart(cuda: FakeCuda, make: Make) -> None:
    """Or a copy out would wait for one in."""
    written, device = Written(), cuda.device
    calls = make(written, device, PIECE, 2 * PIECE)
    assert moved(calls, cuda, 3 * PIECE, TO_HOST)
    assert moved(calls, cuda, 2 * PIECE)
    ways = [device.store_stream, device.store_side, device.load_stream]
    sizes = [2 * PIECE, PIECE, PIECE, PIECE]
    both = zip([*ways, device.load_side], sizes, strict=True)
    assert written.copies == list(both)
    outs, ins = {*ways[:2]}, {ways[2], device.load_side}
    assert not any(known.keys() & ins for known in written.behind[:2])
    assert not any(known.keys() & outs for known in written.behind[2:])


@pytest.mark.parametrize("name", ["record", "wait", "copy"])
def test_behind_a_failure_nothing_is_copied(
    cuda: FakeCuda, make: Make, name: str
) -> None:
    written = Written()
    own, left = getattr(written, name), [name != "copy"]

    def failing(*arguments: Any) -> int:
        """Only what comes behind the start."""
        return int(own(*arguments)) if left and left.pop() else 700

    setattr(written, name, failing)
    calls = make(written, cuda.device, PIECE, PIECE)
    source = torch.ones(4 * PIECE, dtype=torch.uint8)
    target = torch.zeros_like(source)
    assert status_of(calls, cuda, source, target, TO_DEVICE) == 700
    assert len(written.copies) == (name != "copy")
    assert target.sum() == sum(count for _, count in written.copies)


@pytest.mark.parametrize("num_bytes", [None, PIECE])
def test_a_way_without_pieces_is_whole(
    cuda: FakeCuda, make: Make, num_bytes: int | None
) -> None:
    written = Written()
    calls = make(written, cuda.device, num_bytes, None)
    assert moved(calls, cuda, 3 * PIECE)
    assert len(written.copies) == (1 if num_bytes is None else 3)
    written.copies.clear()
    assert moved(calls, cuda, 3 * PIECE, TO_HOST)
    assert len(written.copies) == 1
