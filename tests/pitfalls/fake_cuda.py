"""CUDA streams as vector clocks, for the order of `CudaDevice`'s calls without a GPU.

An event knows of every stream how far it had come; waiting for it makes a stream know
that too. Copies are done at once: only the order is simulated.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from ssdtrain.transfer.cuda import CudaDevice
from ssdtrain.transfer.native import TO_DEVICE, TO_HOST, Ordering, Part


class Stream:
    """`known[s]`: how much of stream `s` is certainly done before what comes next."""

    made: ClassVar[dict[int, "Stream"]] = {}
    device_index, device_type = 0, 1

    def __new__(cls, device: Any = None, stream_id: int = -1, **_: Any) -> "Stream":
        """A new stream, or the one of this number."""
        return cls.made[stream_id] if stream_id >= 0 else super().__new__(cls)

    def __init__(self, device: Any = None, stream_id: int = -1, **_: Any) -> None:
        if stream_id < 0:
            self.known: dict[Stream, int] = {self: 0}
            self.stream_id = len(self.made)
            self.made[self.stream_id] = self

    @property
    def cuda_stream(self) -> int:
        """CUDA's number of it: never 0."""
        return self.stream_id + 1

    @property
    def ids(self) -> tuple[int, int, int]:
        """As torch numbers a stream."""
        return self.stream_id, self.device_index, self.device_type

    def tick(self) -> int:
        """An operator is enqueued; its number."""
        self.known[self] += 1
        return self.known[self]

    def wait_event(self, event: "Event") -> None:
        for stream, count in event.known.items():
            self.known[stream] = max(self.known.get(stream, 0), count)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        """All that was simulated is done."""


class Event:
    """A point of a stream."""

    made: ClassVar[list["Event"]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        self.known: dict[Stream, int] = {}
        self.made.append(self)
        self.cuda_event = len(self.made)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or torch.cuda.current_stream()
        self.known = dict(stream.known)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        """Never yet: the host runs ahead."""
        return False

    def after(self, stream: Stream, number: int) -> bool:
        """Whether it is ordered behind operator `number` of `stream`."""
        return self.known.get(stream, 0) >= number


class ErrorText:
    """`cudaGetErrorString`, as `ctypes` gives it."""

    restype: Any = None
    argtypes: Any = None

    def __call__(self, status: int) -> bytes:
        return b"out of luck"


class FakeRuntime:
    """The library of CUDA's own calls; and a batch of them in Python, as `Native` has
    it."""

    def __init__(self) -> None:
        self.record, self.wait, self.copy = self._record, self._wait, self._copy
        self.cudaGetErrorString = ErrorText()
        # For C, which calls whatever these are by then.
        address, integer = ctypes.c_void_p, ctypes.c_int
        self.cudaEventRecord = ctypes.CFUNCTYPE(integer, address, address)(
            lambda *each: self.record(*each)
        )
        wait = ctypes.CFUNCTYPE(integer, address, address, ctypes.c_uint)
        self.cudaStreamWaitEvent = wait(lambda *each: self.wait(*each))
        copy = ctypes.CFUNCTYPE(
            integer, address, address, ctypes.c_size_t, integer, address
        )
        self.cudaMemcpyAsync = copy(lambda *each: self.copy(*each))

    def batch(self, order: Ordering, parts: Sequence[Part]) -> None:
        kind, ready, compute, stream, more, done = order
        status = self.record(ready, compute) or self.wait(stream, ready, 0)
        if more:
            status = status or self.wait(stream, more, 0)
        for to, source, count in parts:
            status = status or self.copy(to, source, count, kind, stream)
        if status or self.record(done, stream):
            raise RuntimeError(f"CUDA error {status}")

    def _record(self, event: int, stream: int) -> int:
        Event.made[event - 1].record(Stream.made[stream - 1])
        return 0

    def _wait(self, stream: int, event: int, flags: int) -> int:
        assert not flags
        Stream.made[stream - 1].wait_event(Event.made[event - 1])
        return 0

    def _copy(self, to: int, source: int, count: int, kind: int, stream: int) -> int:
        assert kind in (TO_DEVICE, TO_HOST) and stream
        ctypes.memmove(to, source, count)
        Stream.made[stream - 1].tick()
        return 0


class FakeCuda:
    """Streams of one device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.default = self.current = Stream()
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_stream", self._set)
        patch.setattr(torch.cuda, "stream", self.on)
        for name, function in {
            "_cuda_getDevice": lambda: 0,
            "_cuda_getCurrentStream": lambda device: self.current.ids,
            "_cuda_getCurrentRawStream": lambda device: self.current.cuda_stream,
            "_CudaEventBase": Event,
        }.items():
            patch.setattr(torch._C, name, function, raising=False)
        patch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace())
        self.device = CudaDevice(torch.device("cuda", 0))

    def _set(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
