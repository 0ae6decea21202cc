"""Slots that GPU memory is written to and read from directly, through kvikio.

The file is that of `PosixStorage`; host buffers take its path, CUDA buffers take
kvikio's, in one of three modes (see [Note: Three modes] in `kvikio_shim`).
"""

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ssdtrain.errors import StorageFullError
from ssdtrain.storage.base import FULL_ERRNOS, ForwardingStorage, Slot, StorageStats
from ssdtrain.storage.kvikio_shim import DeviceBytes, GdsMode, KvikioFile
from ssdtrain.storage.posix import PosixStorage

TASK_BYTES = 8 * 1024 * 1024
"""kvikio splits a transfer into tasks of this size for its threads."""


class GdsStorage(ForwardingStorage):
    """A `Storage` that takes CUDA buffers too.

    A CUDA buffer is 1-D uint8 of any length (kvikio takes whole blocks the direct way
    and the rest through a bounce buffer). `write` and `read` block and know no
    streams: the bytes must be there (and the buffer unused) when they are called.

    Args:
        posix: the file; closed with this storage.
        mode: one of `kvikio_shim.availability().modes`.
        task_bytes: share of a transfer that one of kvikio's threads takes.

    Raises:
        OSError: kvikio cannot open the file in this mode.
    """

    def __init__(
        self, posix: PosixStorage, mode: GdsMode, task_bytes: int = TASK_BYTES
    ) -> None:
        super().__init__(posix)
        self.mode = mode
        self._directory = posix.directory
        self._task_bytes = task_bytes
        self._lock = threading.Lock()
        self._written_bytes = self._read_bytes = 0
        self._file: KvikioFile | None = _open(posix.fileno(), posix.directory, mode)

    def describe(self) -> str:
        """Return the mode and the directory."""
        return f"{self.mode.value}: {self._directory}"

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write the whole buffer, host or CUDA; see `Storage.write`."""
        if not buffer.is_cuda:
            self.inner.write(slot, buffer)
            return
        self._move(slot, buffer, "write to", lambda file, *part: file.write(*part))
        with self._lock:
            self._written_bytes += buffer.numel()

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Fill the whole buffer, host or CUDA; see `Storage.read`."""
        if not buffer.is_cuda:
            self.inner.read(slot, buffer)
            return
        self._move(slot, buffer, "read from", lambda file, *part: file.read(*part))
        with self._lock:
            self._read_bytes += buffer.numel()

    def stats(self) -> StorageStats:
        """Return the bytes held and moved so far, on both paths."""
        held = self.inner.stats()
        with self._lock:
            return StorageStats(
                used_bytes=held.used_bytes,
                allocated_bytes=held.allocated_bytes,
                written_bytes=held.written_bytes + self._written_bytes,
                read_bytes=held.read_bytes + self._read_bytes,
            )

    def close(self) -> None:
        """Release kvikio's side, then close the file."""
        self.release()
        self.inner.close()

    def release(self) -> None:
        """Deregister the file with kvikio; the file itself stays open. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _move(
        self, slot: Slot, buffer: torch.Tensor, verb: str, move: Callable[..., int]
    ) -> None:
        """Move all bytes between a CUDA buffer and its slot.

        Raises:
            ValueError: the buffer does not fit.
            StorageFullError: no space or no quota is left.
            OSError: anything else, a short transfer among it.
        """
        size = buffer.numel()
        if buffer.dtype != torch.uint8 or buffer.dim() != 1:
            raise ValueError(
                f"expected a 1-D uint8 CUDA tensor, got {buffer.dim()}-D "
                f"{buffer.dtype} on {buffer.device}"
            )
        if not 0 < size <= slot.capacity_bytes:
            raise ValueError(f"buffer of {size} bytes does not fit {slot}")
        file = self._file
        if file is None:
            raise OSError(errno.EBADF, f"storage is closed: {self.describe()}")
        what = f"{verb} {self._directory} at offset {slot.offset} ({self.mode.value})"
        data = DeviceBytes(buffer.data_ptr(), size)
        try:
            moved = move(file, data, size, slot.offset, self._task_bytes)
        except Exception as error:  # kvikio has one class: the errno is in its text
            text = str(error).strip()
            if any(os.strerror(number) in text for number in FULL_ERRNOS):
                raise StorageFullError(
                    errno.ENOSPC, f"{what} failed: {text}"
                ) from error
            raise OSError(errno.EIO, f"{what} failed: {text}") from error
        if moved != size:
            raise OSError(errno.EIO, f"short {what}: {moved} of {size} bytes")


def _open(fd: int, directory: str, mode: GdsMode) -> KvikioFile:
    """Open a nameless file a second time, through kvikio.

    /proc's link leads to it. Where cuFile insists on a name that exists, the file
    gets one for the moment of opening: 128 random bits in a private directory.
    """
    try:
        return KvikioFile(f"/proc/self/fd/{fd}", mode)
    except OSError:
        with _named(fd, directory) as path:
            return KvikioFile(path, mode)


@contextmanager
def _named(fd: int, directory: str) -> Iterator[str]:
    own = os.path.join(directory, f"ssdtrain-{os.getpid()}-{secrets.token_hex(8)}")
    path = os.path.join(own, secrets.token_hex(16))
    os.mkdir(own, 0o700)
    place = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a directory descriptor Python calls linkat, which alone follows /proc's
        # link to the file; link would make a second link to that link.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=place, follow_symlinks=True)
        try:
            yield path
        finally:
            os.unlink(path)
    finally:
        os.close(place)
        os.rmdir(own)
