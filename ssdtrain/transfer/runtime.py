"""Calls into the CUDA runtime that torch has loaded, past torch's objects.

A tensor that moves costs five calls for its copy out and five for its copy in. Through
torch's events and copies each takes the host several microseconds, most of them not in
CUDA. The functions are as old as streams; their arguments are in the CUDA Runtime API's
reference: "Event Management", "Stream Management", "Memory Management".
(tests/ssdtrain/transfer/test_runtime.py)
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

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


class Calls(Protocol):
    """The calls of a copy that runs beside compute.

    Streams, events and addresses are plain numbers. Each call returns a status, 0 for
    success; other threads run meanwhile, as it may wait for room in a device's queue.
    """

    @property
    def record(self) -> Callable[[int, int], int]:
        """Of an event, on a stream."""

    @property
    def wait(self) -> Callable[[int, int, int], int]:
        """Of a stream, for an event, with flags (0)."""

    @property
    def copy(self) -> Callable[[int, int, int, int, int], int]:
        """To an address, from an address, bytes, `TO_DEVICE` or `TO_HOST`, a stream."""

    def fail(self, status: int) -> NoReturn:
        """A call was not successful.

        Raises:
            RuntimeError: with what CUDA says.
        """


class Runtime:
    """`Calls` of CUDA itself."""

    def __init__(self, functions: Any) -> None:
        self._text = functions.cudaGetErrorString
        self._text.restype, self._text.argtypes = ctypes.c_char_p, [ctypes.c_int]
        self.record: Callable[[int, int], int] = _typed(
            functions.cudaEventRecord, ADDRESS, ADDRESS
        )
        self.wait: Callable[[int, int, int], int] = _typed(
            functions.cudaStreamWaitEvent, ADDRESS, ADDRESS, ctypes.c_uint
        )
        self.copy: Callable[[int, int, int, int, int], int] = _typed(
            functions.cudaMemcpyAsync,
            *(ADDRESS, ADDRESS, ctypes.c_size_t, ctypes.c_int, ADDRESS),
        )

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
