"""Copies that let small copies of others pass.

[Note: others' small copies]
The device has one engine for copies in and one for copies out, and an engine serves a
stream as long as that has something to copy. FSDP2 copies a small table to the device
for each layer that it gathers or reduces (`split_with_sizes_copy`, `chunk_cat`), in
compute order. Such a table came behind every load that had been started, and compute
waited for it: up to 10 ms each, 6 to 38 ms a step (two H200, 4B, 6 to 8 GB moved), at
no wait of ours. A result that the host reads back (`item`, in a loss) waits for all
copies out likewise.
So copies go in pieces, by two streams in turns. Each stream waits for the other's
piece, and when a stream waits, the engine turns to whoever else is there: 0.5 to 2.4 ms
a step were left.
For the rest nothing changes: what waits for the stream that was asked to copy waits for
all pieces.
(tests/ssdtrain/transfer/test_pieces.py)
"""

from typing import Any, NoReturn

from ssdtrain.transfer.device import CudaDevice
from ssdtrain.transfer.runtime import TO_DEVICE, TO_HOST, InSteps, Runtime

IN_BYTES = 8 * 1024 * 1024
"""Of a piece: 0.15 ms of a link of 55 GB/s. The host starts one in 5 microseconds, and
the link loses 3 more than between copies of one stream."""
OUT_BYTES = 32 * 1024 * 1024
"""Likewise of copies out, where fewer small copies wait, and the host has less time."""


class InPieces(InSteps):
    """`Calls` whose copies go in pieces: [Note: others' small copies]. What native.py
    does in C, where there is no compiler."""

    def __init__(
        self,
        calls: Runtime,
        device: CudaDevice,
        in_bytes: int | None = IN_BYTES,
        out_bytes: int | None = OUT_BYTES,
    ) -> None:
        """Take the size of a piece in each direction; None: copies are whole."""
        self._calls = calls
        self.record, self.wait, self.copy = calls.record, calls.wait, self._copy
        sides = {
            TO_DEVICE: (device.load_side, in_bytes),
            TO_HOST: (device.store_side, out_bytes),
        }
        self._ways = {
            kind: _Way(calls, device, side, piece_bytes)
            for kind, (side, piece_bytes) in sides.items()
            if piece_bytes is not None
        }

    def _copy(self, to: int, source: int, count: int, kind: int, stream: int) -> int:
        """Copy in stream order; return the status."""
        way = self._ways.get(kind, self._calls)
        return way.copy(to, source, count, kind, stream)

    def fail(self, status: int) -> NoReturn:
        """A call was not successful.

        Raises:
            RuntimeError: with what CUDA says.
        """
        self._calls.fail(status)


class _Way:
    """Copies in one direction."""

    def __init__(
        self, calls: Runtime, device: CudaDevice, side: Any, piece_bytes: int
    ) -> None:
        self._calls = calls
        self._side_id: int = side.cuda_stream
        self._begun, self._begun_id = device.event()
        self._ended, self._ended_id = device.event()
        self._piece_bytes = self._left_bytes = piece_bytes
        """Of each piece, and of the one that copies fill now."""
        self._is_aside = False
        """Whether that one goes by the other stream."""

    def copy(self, to: int, source: int, count: int, kind: int, stream: int) -> int:
        """Copy in stream order; return the status."""
        status = done = 0
        while done < count and not status:
            part = min(count - done, self._left_bytes)
            move = self._aside if self._is_aside else self._calls.copy
            status = move(to + done, source + done, part, kind, stream)
            done += part
            self._left_bytes -= part
            if not self._left_bytes:
                self._left_bytes = self._piece_bytes
                self._is_aside = not self._is_aside
        return status

    def _aside(self, to: int, source: int, count: int, kind: int, stream: int) -> int:
        """Copy by the other stream, behind this one, and let this one wait for it."""
        calls, side = self._calls, self._side_id
        return (
            calls.record(self._begun_id, stream)
            or calls.wait(side, self._begun_id, 0)
            or calls.copy(to, source, count, kind, side)
            or calls.record(self._ended_id, side)
            or calls.wait(stream, self._ended_id, 0)
        )
