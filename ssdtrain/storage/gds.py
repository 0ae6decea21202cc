"""Slots that GPU memory is written to and read from directly, through kvikio.

The one place that imports kvikio. The file is that of `PosixStorage`: host buffers take
its path, CUDA buffers take cuFile's, where the nvidia-fs kernel module lets the SSD
read and write GPU memory (GPUDirect Storage). kvikio and cuFile have other modes, which
copy through host memory: staging does that as fast (docs/results/storage.md).
"""

import ctypes
import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from ssdtrain.errors import StorageFullError
from ssdtrain.storage.base import FULL_ERRNOS, ForwardingStorage, Slot
from ssdtrain.storage.posix import PosixStorage

GDS = "GDS"
TASK_BYTES = 8 * 1024 * 1024
"""kvikio splits a transfer into tasks of this size for its threads."""
LEAST_VERSION = (25, 2)
"""First kvikio with `CompatMode` as an enumeration."""


def kvikio_installed() -> bool:
    """Return whether the package is there; says nothing about the driver."""
    return find_spec("kvikio") is not None


def why_no_gds() -> str:
    """Why GPUDirect Storage is not to be had here; "" if it is. Opens cuFile, if that
    can be."""
    if not kvikio_installed():
        return "kvikio is not installed (pip install 'ssdtrain[gds]')"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 is missing: no NVIDIA driver on this machine"
    try:
        import kvikio
        import kvikio.cufile_driver as driver
    except (ImportError, OSError, RuntimeError) as error:
        return f"kvikio does not load: {error}"
    version = tuple(int(part) for part in kvikio.__version__.split(".")[:2])
    if version < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return f"kvikio {'.'.join(map(str, version))} is older than {least}"
    # Opened for good: once closed, cuFile registers no further file in this process.
    try:
        driver.initialize()
    except Exception as error:  # kvikio has no exception class of its own
        return f"cuFile does not open: {_first_line(error)}"
    if not driver.get("is_gds_available"):
        return "the nvidia-fs kernel module is missing"
    return ""


def set_threads(num_threads: int) -> None:
    """Size kvikio's thread pool, which is the process's."""
    import kvikio.defaults

    kvikio.defaults.set("num_threads", num_threads)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class DeviceBytes:
    """A CUDA tensor as kvikio reads it: pointer and length, and no stream.

    torch's own `__cuda_array_interface__` names a stream to wait on; the order of
    these transfers is the caller's business (an event before, a result after).
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


_opening = threading.Lock()


def open_cufile(path: str) -> Any:
    """Open a file for reading and writing, for cuFile alone: `kvikio.CuFile`.

    Raises:
        OSError: it cannot be opened so; the text has kvikio's reason.
    """
    import kvikio
    import kvikio.defaults

    # kvikio takes the mode from a process-wide default when it opens a file.
    with _opening, kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
        try:
            return kvikio.CuFile(path, "r+")
        except Exception as error:
            text = f"kvikio cannot open {path} in {GDS}: {_first_line(error)}"
            raise OSError(text) from error


class GdsStorage(ForwardingStorage):
    """A `Storage` that takes CUDA buffers too.

    A CUDA buffer is 1-D uint8 of any length (kvikio takes whole blocks the direct way
    and the rest through a bounce buffer). `write` and `read` block and know no
    streams: the bytes must be there (and the buffer unused) when they are called.

    Args:
        posix: the file; closed with this storage.

    Raises:
        OSError: kvikio cannot open the file.
    """

    def __init__(self, posix: PosixStorage) -> None:
        super().__init__(posix)
        self._directory = posix.directory
        self._file: Any = _open(posix.fileno(), posix.directory)
        """None once it is released."""

    def describe(self) -> str:
        """`GDS: /mnt/nvme0`."""
        return f"{GDS}: {self._directory}"

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write the whole buffer, host or CUDA; see `Storage.write`."""
        if not buffer.is_cuda:
            self.inner.write(slot, buffer)
            return
        self._move(slot, buffer, "write to", lambda file: file.pwrite)

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Fill the whole buffer, host or CUDA; see `Storage.read`."""
        if not buffer.is_cuda:
            self.inner.read(slot, buffer)
            return
        self._move(slot, buffer, "read from", lambda file: file.pread)

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
        self, slot: Slot, buffer: torch.Tensor, verb: str, call: Callable[[Any], Any]
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
        what = f"{verb} {self._directory} at offset {slot.offset} ({GDS})"
        data = DeviceBytes(buffer.data_ptr(), size)
        try:
            moved = int(call(file)(data, size, slot.offset, TASK_BYTES).get())
        except Exception as error:  # kvikio has one class: the errno is in its text
            text = str(error).strip()
            if any(os.strerror(number) in text for number in FULL_ERRNOS):
                raise StorageFullError(
                    errno.ENOSPC, f"{what} failed: {text}"
                ) from error
            raise OSError(errno.EIO, f"{what} failed: {text}") from error
        if moved != size:
            raise OSError(errno.EIO, f"short {what}: {moved} of {size} bytes")


def _open(fd: int, directory: str) -> Any:
    """Open a nameless file a second time, through kvikio.

    /proc's link leads to it. Where cuFile insists on a name that exists, the file
    gets one for the moment of opening: 128 random bits in a private directory.
    """
    try:
        return open_cufile(f"/proc/self/fd/{fd}")
    except OSError:
        with _named(fd, directory) as path:
            return open_cufile(path)


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
