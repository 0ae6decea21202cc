"""Copies made in C, and what happens where C cannot be built."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdtrain.counters import Fallback
from ssdtrain.transfer import copies, native
from ssdtrain.transfer.native import (
    TO_DEVICE,
    TO_HOST,
    Native,
    Ordering,
    Runtime,
    library,
    loaded_runtime,
)
from tests.compilers import needs_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "pitfalls"))
from fake_cuda import FakeCuda, FakeRuntime


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
        assert runtime.batch(order, parts) == 0
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
    monkeypatch.setattr(copies, "loaded_runtime", FakeRuntime)
    told: list[tuple[Fallback, str]] = []
    found: Any = copies.copies_of(cuda.device, lambda *each: told.append(each))
    assert found.calls is None
    ((reason, detail),) = told
    assert reason is Fallback.COPIES_FROM_PYTHON and "set CC" in detail


@needs_compiler
def test_what_others_could_have_written_is_not_loaded(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(copies, "loaded_runtime", FakeRuntime)
    native.LIBRARY.build().chmod(0o777)
    told: list[tuple[Fallback, str]] = []
    found: Any = copies.copies_of(cuda.device, lambda *each: told.append(each))
    assert found.calls is None
    ((_, detail),) = told
    assert "writable by others" in detail


@needs_compiler
def test_with_a_compiler_c_makes_them(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Built once, for later sessions as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(copies, "loaded_runtime", FakeRuntime)
    told: list[tuple[Fallback, str]] = []
    for _ in range(2):
        found: Any = copies.copies_of(cuda.device, lambda *each: told.append(each))
        assert isinstance(found.calls, Native)
        monkeypatch.setenv("CC", "no-such-compiler")
    assert not told
    assert native.LIBRARY.path.stat().st_mode & 0o777 == 0o700


class Text:
    """`cudaGetErrorString`, as `ctypes` gives it."""

    restype: Any = None
    argtypes: Any = None

    def __call__(self, status: int) -> bytes:
        return b"out of luck"


def test_what_cuda_says_is_raised() -> None:
    runtime = Runtime(SimpleNamespace(cudaGetErrorString=Text()))
    with pytest.raises(RuntimeError, match=r"out of luck \(CUDA error 700\)"):
        runtime.fail(700)


def test_without_a_runtime_torch_copies() -> None:
    if library() is None:
        assert loaded_runtime() is None
    else:
        assert isinstance(loaded_runtime(), Runtime)
