"""Copies made in C, whole and by pieces, and what happens where C cannot be built."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdtrain.counters import Fallback
from ssdtrain.transfer import copies, native
from ssdtrain.transfer.native import TO_DEVICE, TO_HOST, Native, Ordering
from tests.compilers import needs_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "pitfalls"))
from fake_cuda import FakeCuda, FakeRuntime, Stream

PIECE = 64


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class Heard(FakeRuntime):
    """Writes down what it is asked for, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def _record(self, event: int, stream: int) -> int:
        self.calls.append(("record", event, stream))
        return super()._record(event, stream)

    def _wait(self, stream: int, event: int, flags: int) -> int:
        self.calls.append(("wait", stream, event))
        return super()._wait(stream, event, flags)

    def _copy(self, to: int, source: int, count: int, kind: int, stream: int) -> int:
        self.calls.append(("copy", to, source, count, kind, stream))
        return super()._copy(to, source, count, kind, stream)


@needs_compiler
@pytest.mark.parametrize("kind", [TO_DEVICE, TO_HOST])
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("has_more", [False, True])
def test_c_makes_the_calls_that_python_would(
    cuda: FakeCuda, kind: int, num: int, has_more: bool
) -> None:
    device = cuda.device
    stream = device.load_stream if kind == TO_DEVICE else device.store_stream
    heard, own = Heard(), Heard()
    calls = Native(own, device, None, None)
    (_, ready), (_, more), (_, done) = (device.event() for _ in range(3))
    sources = [torch.randn(5 + number) for number in range(num)]
    found = []
    for runtime in (heard, calls):
        targets = [torch.zeros_like(source) for source in sources]
        pairs = zip(sources, targets, strict=True)
        parts = [(to.data_ptr(), of.data_ptr(), of.nbytes) for of, to in pairs]
        order = Ordering(
            kind,
            ready,
            cuda.current.cuda_stream,
            stream.cuda_stream,
            more * has_more,
            done,
        )
        runtime.batch(order, parts)  # type: ignore[attr-defined]
        assert all(map(torch.equal, targets, sources))
        found.append({part[0]: number for number, part in enumerate(parts)})
    for runtime, numbers in zip((heard, own), found, strict=True):
        runtime.calls = [
            (name, numbers[first], *rest) if name == "copy" else (name, first, *rest)
            for name, first, *rest in runtime.calls
        ]
    assert heard.calls == own.calls
    assert len(own.calls) == 3 + has_more + num


def test_without_a_compiler_torch_makes_them(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Counted, with what to set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(copies, "library", FakeRuntime)
    told: list[tuple[Fallback, str]] = []
    found: Any = copies.copies_of(cuda.device, lambda *each: told.append(each))
    assert type(found) is copies.Copies
    ((reason, detail),) = told
    assert reason is Fallback.COPIES_FROM_PYTHON and "set CC" in detail


@needs_compiler
def test_what_others_could_have_written_is_not_loaded(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(copies, "library", FakeRuntime)
    native.LIBRARY.build().chmod(0o777)
    told: list[tuple[Fallback, str]] = []
    found: Any = copies.copies_of(cuda.device, lambda *each: told.append(each))
    assert type(found) is copies.Copies
    ((_, detail),) = told
    assert "writable by others" in detail


@needs_compiler
def test_with_a_compiler_c_makes_them(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Built once, for later sessions as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(copies, "library", FakeRuntime)
    told: list[tuple[Fallback, str]] = []
    for _ in range(2):
        found: Any = copies.copies_of(cuda.device, lambda *each: told.append(each))
        assert isinstance(found, copies.CudaCopies)
        monkeypatch.setenv("CC", "no-such-compiler")
    assert not told
    assert native.LIBRARY.path.stat().st_mode & 0o777 == 0o700


def test_without_a_runtime_torch_copies(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "library", lambda: None)
    told: list[Any] = []
    found = copies.copies_of(cuda.device, lambda *each: told.append(each))
    assert type(found) is copies.Copies and not told


# -- by pieces --------------------------------------------------------------------


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


def copy(
    calls: Native, cuda: FakeCuda, source: Tensor, target: Tensor, kind: int
) -> None:
    """Behind compute."""
    device = cuda.device
    stream = device.load_stream if kind == TO_DEVICE else device.store_stream
    (_, ready), (_, done) = device.event(), device.event()
    part = target.data_ptr(), source.data_ptr(), source.nbytes
    own = cuda.current.cuda_stream
    order = Ordering(kind, ready, own, stream.cuda_stream, more=0, done=done)
    calls.batch(order, [part])


def moved(calls: Native, cuda: FakeCuda, num_bytes: int, kind: int = TO_DEVICE) -> bool:
    """Copy so many bytes, and say whether they came."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy(calls, cuda, source, target, kind)
    return torch.equal(target, source)


@needs_compiler
def test_pieces_go_by_two_streams_in_turns(cuda: FakeCuda) -> None:
    """However large each copy is: no stream has more than a piece at a time."""
    written = Written()
    load, side = cuda.device.load_stream, cuda.device.load_side
    calls = Native(written, cuda.device, PIECE, PIECE)
    for num_bytes in (PIECE // 2, PIECE, 3 * PIECE, 7):
        assert moved(calls, cuda, num_bytes)
    half = PIECE // 2
    assert written.copies == [
        *[(load, half), (load, half), (side, half)],
        *[(side, half), (load, PIECE), (side, PIECE), (load, half), (load, 7)],
    ]


@needs_compiler
def test_each_piece_waits_for_the_one_before(cuda: FakeCuda) -> None:
    """Or both streams would fill the engine; and all keep the order of one stream."""
    written = Written()
    calls = Native(written, cuda.device, PIECE, PIECE)
    compute = cuda.default
    produced = compute.tick()
    moved(calls, cuda, 5 * PIECE)
    for number, known in enumerate(written.behind):
        assert known[compute] == produced
        for stream in {stream for stream, _ in written.copies[:number]}:
            before = [each for each, _ in written.copies[:number]]
            assert known[stream] == before.count(stream)


@needs_compiler
def test_whoever_waits_for_the_load_stream_waits_for_all_pieces(cuda: FakeCuda) -> None:
    written = Written()
    load = cuda.device.load_stream
    calls = Native(written, cuda.device, PIECE, PIECE)
    for num_bytes in (2 * PIECE, PIECE):
        moved(calls, cuda, num_bytes)
        cuda.default.wait_stream(load)
        for stream in {stream for stream, _ in written.copies}:
            count = [each for each, _ in written.copies].count(stream)
            assert cuda.default.known[stream] == count


@needs_compiler
def test_both_directions_are_apart(cuda: FakeCuda) -> None:
    """Or a copy out would wait for one in."""
    written, device = Written(), cuda.device
    calls = Native(written, device, PIECE, 2 * PIECE)
    assert moved(calls, cuda, 3 * PIECE, TO_HOST)
    assert moved(calls, cuda, 2 * PIECE)
    ways = [device.store_stream, device.store_side, device.load_stream]
    sizes = [2 * PIECE, PIECE, PIECE, PIECE]
    both = zip([*ways, device.load_side], sizes, strict=True)
    assert written.copies == list(both)
    outs, ins = {*ways[:2]}, {ways[2], device.load_side}
    assert not any(known.keys() & ins for known in written.behind[:2])
    assert not any(known.keys() & outs for known in written.behind[2:])


@needs_compiler
@pytest.mark.parametrize("name", ["record", "wait", "copy"])
def test_behind_a_failure_nothing_is_copied(cuda: FakeCuda, name: str) -> None:
    written = Written()
    own, left = getattr(written, name), [name != "copy"]

    def failing(*arguments: Any) -> int:
        """Only what comes behind the start."""
        return int(own(*arguments)) if left and left.pop() else 700

    setattr(written, name, failing)
    calls = Native(written, cuda.device, PIECE, PIECE)
    source = torch.ones(4 * PIECE, dtype=torch.uint8)
    target = torch.zeros_like(source)
    with pytest.raises(RuntimeError, match=r"out of luck \(CUDA error 700\)"):
        copy(calls, cuda, source, target, TO_DEVICE)
    assert len(written.copies) == (name != "copy")
    assert target.sum() == sum(count for _, count in written.copies)


@needs_compiler
@pytest.mark.parametrize("num_bytes", [None, PIECE])
def test_a_way_without_pieces_is_whole(cuda: FakeCuda, num_bytes: int | None) -> None:
    written = Written()
    calls = Native(written, cuda.device, num_bytes, None)
    assert moved(calls, cuda, 3 * PIECE)
    assert len(written.copies) == (1 if num_bytes is None else 3)
    written.copies.clear()
    assert moved(calls, cuda, 3 * PIECE, TO_HOST)
    assert len(written.copies) == 1
