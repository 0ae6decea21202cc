"""Copies while compute runs, made in C: one call of Python for all that one takes.

A tensor that moves takes five calls of CUDA each way, and five more for every second
piece of it. csrc/copies.c makes them in a row, in an eighth of the host's time. It is
built with the user's compiler when the first session on a GPU begins. The functions are
of the CUDA runtime that torch has loaded.
(tests/ssdtrain/transfer/test_native.py)

[Note: others' small copies]
The device has one engine for copies in and one for copies out. An engine serves a
stream as long as that has something to copy. FSDP2 copies a small table to the device
for each layer that it gathers or reduces, in compute order, and compute would wait
until every load was done. A result that the host reads back would wait for all copies
out. So copies go in pieces, by two streams in turns: each stream waits for the other's
piece, and meanwhile the engine turns to whoever else is there. What waits for the
stream that was asked to copy waits for all pieces.
(tests/ssdtrain/transfer/test_native.py)
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssdtrain.storage.clibrary import CLibrary
from ssdtrain.transfer.cuda import CudaDevice

LIBRARY = CLibrary(Path(__file__).parent / "csrc" / "copies.c")
TO_DEVICE, TO_HOST = 1, 2
"""cudaMemcpyHostToDevice and its opposite. With cudaMemcpyDefault the driver looks both
addresses up, at three times the host's time."""
ADDRESS = ctypes.c_void_p
IN_BYTES = 8 * 1024 * 1024
"""Of a piece: 0.15 ms of a link of 55 GB/s. The host starts one in 5 microseconds, and
the link loses 3 more than between copies of one stream."""
OUT_BYTES = 32 * 1024 * 1024
"""Of a piece of a copy out: fewer small copies wait, and the host has less time."""


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
    """An event that is recorded after them."""


class _Calls(ctypes.Structure):
    _fields_ = [("record", ADDRESS), ("wait", ADDRESS), ("copy", ADDRESS)]


class _Way(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int64),
        ("side", ADDRESS),
        ("begun", ADDRESS),
        ("ended", ADDRESS),
        ("piece_bytes", ctypes.c_uint64),
        ("left_bytes", ctypes.c_uint64),
        ("is_aside", ctypes.c_int64),
    ]


class Native:
    """Copies in C, in pieces: [Note: others' small copies]. Of one thread at a time:
    the cache calls it under its lock."""

    def __init__(
        self,
        runtime: ctypes.CDLL,
        device: CudaDevice,
        in_bytes: int | None = IN_BYTES,
        out_bytes: int | None = OUT_BYTES,
    ) -> None:
        """Take CUDA's runtime (`library`), and the size of a piece in each direction;
        None: copies are whole.

        Raises:
            BuildError: the library cannot be built. ConfigError: others could have
                written it. OSError: it cannot be loaded.
        """
        library = ctypes.CDLL(str(LIBRARY.built()))
        self._runtime = runtime  # C has addresses alone
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        runtime.cudaGetErrorString.argtypes = [ctypes.c_int]
        calls = runtime.cudaEventRecord, runtime.cudaStreamWaitEvent
        every = (*calls, runtime.cudaMemcpyAsync)
        self._calls = _Calls(*(ctypes.cast(each, ADDRESS).value for each in every))
        self._events: list[Any] = []
        """Whose numbers C knows."""
        self._ways = {
            TO_DEVICE: self._way(TO_DEVICE, device, in_bytes or 0),
            TO_HOST: self._way(TO_HOST, device, out_bytes or 0),
        }
        # Made once: a call of Python for each would cost as much as CUDA's.
        self._calls_at = ctypes.addressof(self._calls)
        self._ways_at = {kind: ctypes.addressof(w) for kind, w in self._ways.items()}
        head = [ADDRESS] * 7  # the calls, the way, and an `Ordering` but for its kind
        self._one = library.ssdtrain_one
        self._one.argtypes = [*head, ADDRESS, ADDRESS, ctypes.c_size_t]
        self._batch = library.ssdtrain_batch
        self._batch.argtypes = [*head, ctypes.c_size_t, *[ADDRESS] * 3]

    def _way(self, kind: int, device: CudaDevice, piece_bytes: int) -> _Way:
        side = device.load_side if kind == TO_DEVICE else device.store_side
        begun, ended = device.event(), device.event()
        self._events += [begun[0], ended[0]]
        return _Way(
            kind=kind,
            side=side.cuda_stream,
            begun=begun[1],
            ended=ended[1],
            piece_bytes=piece_bytes,
            left_bytes=piece_bytes,
        )

    def batch(self, order: Ordering, parts: Sequence[Part]) -> None:
        """Copy, one part after the other; other threads run meanwhile, as it may wait
        for room in a device's queue.

        Raises:
            RuntimeError: with what CUDA says.
        """
        kind, *between = order
        head = self._calls_at, self._ways_at[kind], *between
        num = len(parts)
        if num == 1:
            status = self._one(*head, *parts[0])
        else:
            to, source, counts = zip(*parts, strict=True)
            addresses, sizes = ADDRESS * num, ctypes.c_size_t * num
            status = self._batch(
                *head, num, addresses(*to), addresses(*source), sizes(*counts)
            )
        if status:
            said = self._runtime.cudaGetErrorString(status).decode()
            raise RuntimeError(
                f"a copy could not be started: {said} (CUDA error {status})"
            )
