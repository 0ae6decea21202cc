"""Copies by pieces: the bytes, the order, and that the engine is left to others."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.transfer.pieces import InPieces
from ssdtrain.transfer.places import CudaCopies
from ssdtrain.transfer.runtime import TO_DEVICE, TO_HOST

sys.path.insert(0, str(Path(__file__).parents[2] / "pitfalls"))
from fake_cuda import FakeCuda, FakeRuntime, Stream

PIECE = 64


class Written(FakeRuntime):
    """Writes its copies down: the stream, and the bytes."""

    def __init__(self) -> None:
        self.copies: list[tuple[Stream, int]] = []
        self.behind: list[dict[Stream, int]] = []
        """Of each copy, what its stream was behind when it came."""

    def copy(self, to: int, source: int, count: int, kind: int, stream: int) -> int:
        self.copies.append((Stream.made[stream - 1], count))
        self.behind.append(dict(Stream.made[stream - 1].known))
        return super().copy(to, source, count, kind, stream)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def moved(calls: Any, stream: Stream, num_bytes: int, kind: int = TO_DEVICE) -> bool:
    """Copy so many bytes, and say whether they came."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    calls.copy(
        target.data_ptr(), source.data_ptr(), num_bytes, kind, stream.cuda_stream
    )
    return torch.equal(target, source)


def test_pieces_go_by_two_streams_in_turns(cuda: FakeCuda) -> None:
    """However large each copy is: no stream has more than a piece at a time."""
    written = Written()
    load, side = cuda.device.load_stream, cuda.device.load_side
    calls = InPieces(written, cuda.device, PIECE, PIECE)
    for num_bytes in (PIECE // 2, PIECE, 3 * PIECE, 7):
        assert moved(calls, load, num_bytes)
    half = PIECE // 2
    assert written.copies == [
        *[(load, half), (load, half), (side, half)],
        *[(side, half), (load, PIECE), (side, PIECE), (load, half), (load, 7)],
    ]


def test_each_piece_waits_for_the_one_before(cuda: FakeCuda) -> None:
    """Or both streams would fill the engine; and all keep the order of one stream."""
    written = Written()
    load = cuda.device.load_stream
    calls = InPieces(written, cuda.device, PIECE, PIECE)
    compute = cuda.default
    produced = compute.tick()
    calls.record(cuda.device.event()[1], compute.cuda_stream)
    load.wait_stream(compute)
    moved(calls, load, 5 * PIECE)
    for number, known in enumerate(written.behind):
        assert known[compute] == produced
        for stream in {stream for stream, _ in written.copies[:number]}:
            before = [each for each, _ in written.copies[:number]]
            assert known[stream] == before.count(stream)


def test_whoever_waits_for_the_load_stream_waits_for_all_pieces(cuda: FakeCuda) -> None:
    written = Written()
    load = cuda.device.load_stream
    calls = InPieces(written, cuda.device, PIECE, PIECE)
    for num_bytes in (2 * PIECE, PIECE):
        moved(calls, load, num_bytes)
        cuda.default.wait_stream(load)
        for stream in {stream for stream, _ in written.copies}:
            count = [each for each, _ in written.copies].count(stream)
            assert cuda.default.known[stream] == count


def test_both_directions_are_apart(cuda: FakeCuda) -> None:
    """Or a copy out would wait for one in."""
    written, device = Written(), cuda.device
    calls = InPieces(written, device, PIECE, 2 * PIECE)
    assert moved(calls, device.store_stream, 3 * PIECE, TO_HOST)
    assert moved(calls, device.load_stream, 2 * PIECE)
    ways = [device.store_stream, device.store_side, device.load_stream]
    sizes = [2 * PIECE, PIECE, PIECE, PIECE]
    both = zip([*ways, device.load_side], sizes, strict=True)
    assert written.copies == list(both)
    outs, ins = {*ways[:2]}, {ways[2], device.load_side}
    assert not any(known.keys() & ins for known in written.behind[:2])
    assert not any(known.keys() & outs for known in written.behind[2:])


@pytest.mark.parametrize("name", ["record", "wait", "copy"])
def test_behind_a_failure_nothing_is_copied(cuda: FakeCuda, name: str) -> None:
    written = Written()
    failing: Callable[..., int] = lambda *arguments: 700  # noqa: E731
    setattr(written, name, failing)
    calls = InPieces(written, cuda.device, PIECE, PIECE)
    source = torch.ones(4 * PIECE, dtype=torch.uint8)
    target, load = torch.zeros_like(source), cuda.device.load_stream.cuda_stream
    both = target.data_ptr(), source.data_ptr()
    assert calls.copy(*both, source.nbytes, TO_DEVICE, load) == 700
    assert len(written.copies) == (name != "copy")
    assert target.sum() == sum(count for _, count in written.copies)


@pytest.mark.parametrize("num_bytes", [None, PIECE])
def test_a_way_without_pieces_is_whole(cuda: FakeCuda, num_bytes: int | None) -> None:
    written, load = Written(), cuda.device.load_stream
    calls = InPieces(written, cuda.device, num_bytes, None)
    assert moved(calls, load, 3 * PIECE)
    assert len(written.copies) == (1 if num_bytes is None else 3)
    written.copies.clear()
    assert moved(calls, cuda.device.store_stream, 3 * PIECE, TO_HOST)
    assert len(written.copies) == 1


def test_plans_hear_of_pieces(cuda: FakeCuda) -> None:
    calls = FakeRuntime()
    assert CudaCopies(cuda.device, InPieces(calls, cuda.device)).small_pass
    assert not CudaCopies(cuda.device, calls).small_pass
    assert not CudaCopies(cuda.device, None).small_pass


@pytest.mark.parametrize("target", ["host", "ssd"])
def test_what_goes_to_a_drive_is_copied_whole(target: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target": target, "directory": str(tmp_path)}
    if target == "host":
        del settings["directory"]
    with ssdtrain.offload(nn.Linear(2, 2), **settings) as session:
        assert not session.cache.small_copies_pass
        session.cache.copies.small_pass = True  # as on a GPU
        assert session.cache.small_copies_pass == (target == "host")
