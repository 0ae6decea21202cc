"""Copies in that let small copies of others pass.

[Note: others' tables]
One engine of the device serves all copies in, and it serves a stream as long as that
has some. FSDP2 copies a small table to the device for each layer that it gathers or
reduces (`split_with_sizes_copy`, `chunk_cat`), in compute order. Where a plan loads as
much as the link takes, such a table came behind every load that had been started: up to
9 ms each, 45 to 70 ms a step (two H200, 4B), at no wait of ours.
So copies in go in pieces, by two streams in turns. Each stream waits for the other's
piece, and when a stream waits, the engine turns to whoever else is there.
For others nothing changes: what waits for the stream that was asked to copy waits for
all pieces.
(tests/ssdtrain/transfer/test_pieces.py)
"""

from typing import NoReturn

from ssdtrain.transfer.device import CudaDevice
from ssdtrain.transfer.runtime import TO_DEVICE, Calls

PIECE_BYTES = 8 * 1024 * 1024
"""0.15 ms of a link of 55 GB/s; the host starts a piece in some microseconds."""


class InPieces:
    """`Calls` whose copies in go in pieces: [Note: others' tables]."""

    def __init__(
        self, calls: Calls, device: CudaDevice, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._calls = calls
        self.record, self.wait = calls.record, calls.wait
        self._side_id: int = device.side_stream.cuda_stream
        self._begun, self._begun_id = device.event()
        self._ended, self._ended_id = device.event()
        self._piece_bytes = self._left_bytes = piece_bytes
        self._is_aside = False
        """Whether the next piece goes by the other stream."""

    def copy(self, to: int, source: int, count: int, kind: int, stream: int) -> int:
        """Copy in stream order; return the status."""
        if kind != TO_DEVICE:
            return self._calls.copy(to, source, count, kind, stream)
        status = done = 0
        while done < count and not status:
            piece = min(count - done, self._left_bytes)
            move = self._aside if self._is_aside else self._calls.copy
            status = move(to + done, source + done, piece, kind, stream)
            done += piece
            self._left_bytes -= piece
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

    def fail(self, status: int) -> NoReturn:
        """A call was not successful.

        Raises:
            RuntimeError: with what CUDA says.
        """
        self._calls.fail(status)
