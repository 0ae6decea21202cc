"""Copies beside compute, made in C: one call of Python for all that one takes.

A tensor that moves takes five calls of CUDA each way, and five more for every second
piece of it. On an H200 with a fast loop around them they take 3 microseconds, and 26
called from Python between the operators of a step: a 4B under FSDP2 spent 190 on each
load. So csrc/copies.c makes them in a row. It is built with the user's compiler when
the first session on a GPU begins; without one, pieces.py makes the same calls.
(tests/ssdtrain/transfer/test_native.py, test_pieces.py)
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ssdtrain.storage.clibrary import CLibrary
from ssdtrain.transfer.device import CudaDevice
from ssdtrain.transfer.pieces import IN_BYTES, OUT_BYTES
from ssdtrain.transfer.runtime import ADDRESS, TO_DEVICE, TO_HOST, Ordering, Part

LIBRARY = CLibrary(Path(__file__).parent / "csrc" / "copies.c")


class Addressed(Protocol):
    """Whose functions are called."""

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of those that record, wait and copy."""

    def fail(self, status: int) -> NoReturn:
        """See `Calls`."""


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
    """`Calls` in C, in pieces: [Note: others' small copies]. Of one thread at a time:
    the cache calls it under its lock."""

    def __init__(
        self,
        runtime: Addressed,
        device: CudaDevice,
        in_bytes: int | None = IN_BYTES,
        out_bytes: int | None = OUT_BYTES,
    ) -> None:
        """Take the size of a piece in each direction; None: copies are whole.

        Raises:
            BuildError: the library cannot be built. ConfigError: others could have
                written it. OSError: it cannot be loaded.
        """
        library = ctypes.CDLL(str(LIBRARY.built()))
        self.fail = runtime.fail
        self._calls = _Calls(*runtime.addresses)
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

    def batch(self, order: Ordering, parts: Sequence[Part]) -> int:
        """See `Calls`."""
        kind, *between = order
        head = self._calls_at, self._ways_at[kind], *between
        num = len(parts)
        if num == 1:
            one: int = self._one(*head, *parts[0])
            return one
        to, source, counts = zip(*parts, strict=True)
        addresses, sizes = ADDRESS * num, ctypes.c_size_t * num
        status: int = self._batch(
            *head, num, addresses(*to), addresses(*source), sizes(*counts)
        )
        return status
