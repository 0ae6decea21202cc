"""Calls into the CUDA runtime that torch has loaded, past torch's objects.

A tensor that moves costs five calls for its copy out and five for its copy in. Through
torch's events and copies each takes the host several microseconds, most of them not in
CUDA. The functions are as old as streams; their arguments are in the CUDA Runtime API's
reference: "Event Management", "Stream Management", "Memory Management". Here each is
called from Python; native.py has them called from C.
(tests/ssdtrain/transfer/test_runtime.py)
"""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

TO_DEVICE, TO_HOST = 1, 2
"""cudaMemcpyHostToDevice and its opposite. With cudaMemcpyDefault the driver looks both
addresses up, at three times the host's time."""
ADDRESS = ctypes.c_void_p


def library() -> ctypes.CDLL | None:
    """The runtime's library, from the file that torch has loaded; None: it has loaded
    none, as without CUDA or where the runtime is linked into torch itself."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libcudart" in path:
            return ctypes.CDLL(path)
    return None


Part = tuple[int, int, int]
"""A copy: to an address, from an address, bytes."""


class Ordering(NamedTuple):
    """Between what copies of one direction are; streams and events are numbers."""

    kind: int
    """`TO_DEVICE` or `TO_HOST`."""
    ready: int
    """An event that is recorded in compute, for the copies to wait for."""
    compute: int
    """Its stream."""
    stream: int
    """Of the copies."""
    more: int
    """One more event that they wait for; 0: none."""
    done: int
    """An event that is recorded behind them."""


class Calls(Protocol):
    """Copies that run beside compute."""

    def batch(self, order: Ordering, parts: Sequence[Part]) -> int:
        """Copy, one part behind the other; other threads run meanwhile, as it may wait
        for room in a device's queue. Return a status, 0 for success."""

    def fail(self, status: int) -> NoReturn:
        """A call was not successful.

        Raises:
            RuntimeError: with what CUDA says.
        """


class InSteps:
    """`Calls` that are made one by one."""

    record: Callable[[int, int], int]
    """Of an event, on a stream."""
    wait: Callable[[int, int, int], int]
    """Of a stream, for an event, with flags (0)."""
    copy: Callable[[int, int, int, int, int], int]
    """To an address, from an address, bytes, the kind, a stream."""

    def batch(self, order: Ordering, parts: Sequence[Part]) -> int:
        """See `Calls`."""
        kind, ready, compute, stream, more, done = order
        status = self.record(ready, compute) or self.wait(stream, ready, 0)
        if more:
            status = status or self.wait(stream, more, 0)
        for to, source, count in parts:
            status = status or self.copy(to, source, count, kind, stream)
        return status or self.record(done, stream)


class Runtime(InSteps):
    """The calls of CUDA itself."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        self._text = functions.cudaGetErrorString
        self._text.restype, self._text.argtypes = ctypes.c_char_p, [ctypes.c_int]
        self.record = _typed(functions.cudaEventRecord, ADDRESS, ADDRESS)
        self.wait = _typed(
            functions.cudaStreamWaitEvent, ADDRESS, ADDRESS, ctypes.c_uint
        )
        self.copy = _typed(
            functions.cudaMemcpyAsync,
            *(ADDRESS, ADDRESS, ctypes.c_size_t, ctypes.c_int, ADDRESS),
        )

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the functions that record, wait and copy."""
        own = self._functions
        every = own.cudaEventRecord, own.cudaStreamWaitEvent, own.cudaMemcpyAsync
        record, wait, copy = (ctypes.cast(each, ADDRESS).value or 0 for each in every)
        return record, wait, copy

    def fail(self, status: int) -> NoReturn:
        """A call was not successful.

        Raises:
            RuntimeError: with what CUDA says.
        """
        said = self._text(status).decode()
        raise RuntimeError(f"a copy could not be started: {said} (CUDA error {status})")


def _typed(function: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = ctypes.c_int, list(arguments)
    return function


def loaded() -> Runtime | None:
    """The runtime of this process; None: see `library`."""
    functions = library()
    return None if functions is None else Runtime(functions)
