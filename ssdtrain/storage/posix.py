"""Slots in a preallocated file that has no name, read and written past the cache.

[Note: Files without a name]
O_TMPFILE makes a file that no directory lists; where the file system has none, a name
of 128 random bits is created with O_EXCL and removed at once. Either way it is mode
0600 in a directory of this process, mode 0700. The directory is removed as soon as it
is empty; NFS keeps a placeholder in it until the file is closed. So a crash or SIGKILL
leaves neither bytes nor names, and nobody else reads them.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ssdtrain.counters import Fallback
from ssdtrain.errors import ConfigError, StorageFullError
from ssdtrain.forks import Owner
from ssdtrain.storage.base import FULL_ERRNOS, Slot, StorageStats
from ssdtrain.storage.slots import ALIGNMENT_BYTES, SlotTable, round_up

EXTENT_BYTES = 256 * 1024 * 1024
"""Files grow by at least this much: few metadata changes, long contiguous runs."""
BLOCK_BYTES = 8 * 1024 * 1024
"""Bytes of one system call. Measured on a virtio disk with O_DIRECT and four threads:
4 to 8 MiB is the best at every record size, within 3 % of one call for all."""
_NO_ROOM = "free inodes or quota there (df -i, quota), or set directory to another disk"
_NO_DESCRIPTOR = "close files, or raise the limit of open ones (ulimit -n)"
HINTS = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EMFILE: _NO_DESCRIPTOR,
    errno.ENFILE: _NO_DESCRIPTOR,
}
"""What to do when a file cannot be created."""


class PosixStorage:
    """A `Storage` over one file without a name ([Note: Files without a name]).

    O_DIRECT where the file system allows it, else buffered (counted). System calls
    release the GIL, so the caller's threads set the queue depth.

    Args:
        directory: a checked one (see `directory.check_directory`).
        extent_bytes: least growth of the file.
        capacity_bytes: cap of the file; None: the disk's own.
        on_fallback: told `Fallback.BUFFERED_IO` where there is no O_DIRECT.

    Raises:
        ValueError: a size below 1.
        ConfigError: the directory has no inodes, no quota, or no descriptor is left.
        OSError: the file cannot be created for another reason.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        extent_bytes: int = EXTENT_BYTES,
        capacity_bytes: int | None = None,
        on_fallback: Callable[[Fallback], None] = lambda _: None,
    ) -> None:
        if extent_bytes < 1 or (capacity_bytes is not None and capacity_bytes < 1):
            raise ValueError(
                "extent_bytes and capacity_bytes expect at least 1, got "
                f"{extent_bytes} and {capacity_bytes}"
            )
        self.directory = str(directory)
        self._extent_bytes = round_up(extent_bytes)
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._table = SlotTable()
        self._transfers = 0
        self._closed = False
        self._owner = Owner()
        self._file = self.open_file()
        self._finalizer = weakref.finalize(self, self._file.close)
        self.is_direct = self._file.is_direct
        """Whether the file bypasses the page cache."""
        if not self.is_direct:
            on_fallback(Fallback.BUFFERED_IO)

    def open_file(self) -> "NamelessFile":
        """Make the file; called once."""
        return open_nameless(self.directory)

    @property
    def alignment_bytes(self) -> int:
        """4096, whatever the file system enforces."""
        return ALIGNMENT_BYTES

    def fileno(self) -> int:
        """Return the open descriptor; it stays this storage's own."""
        with self._lock:
            self._check_open()
            return self._file.fd

    def describe(self) -> str:
        """`posix O_DIRECT: /mnt/nvme0`, or `posix buffered: ...`."""
        kind = "O_DIRECT" if self.is_direct else "buffered"
        return f"posix {kind}: {self.directory}"

    def allocate(self, num_bytes: int) -> Slot:
        """Reserve a slot; the file grows if it must.

        Raises:
            ValueError: `num_bytes` is below 1.
            StorageFullError: it cannot (disk full, quota, or the cap).
        """
        self._owner.check("a storage")
        if num_bytes < 1:
            raise ValueError(f"a slot expects at least 1 byte, got {num_bytes}")
        capacity = round_up(num_bytes)
        with self._lock:
            self._check_open()
            slot = self._table.take(capacity)
            if slot is None and self._grow(capacity):
                slot = self._table.take(capacity)
        if slot is None:
            raise StorageFullError(
                errno.ENOSPC,
                f"no room for {capacity} bytes in {self.describe()} "
                f"({self._table.end_bytes} bytes held)",
            )
        return slot

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write the whole buffer to the slot; see `Storage.write`."""
        self._owner.check("a storage")
        check_buffer(slot, buffer)
        with self._transfer() as fd:
            _move_all(os.pwritev, fd, buffer, slot, f"write to {self.directory}")

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Fill the whole buffer from the slot; see `Storage.read`."""
        self._owner.check("a storage")
        check_buffer(slot, buffer)
        with self._transfer() as fd:
            _move_all(os.preadv, fd, buffer, slot, f"read from {self.directory}")

    def free(self, slot: Slot) -> None:
        """Give the slot back; after `close` there is nothing left to give back to."""
        if self._owner.is_elsewhere:
            return
        with self._lock:
            if not self._closed:
                self._table.give(slot)

    def stats(self) -> StorageStats:
        """Return the bytes held."""
        self._owner.check("a storage")
        with self._lock:
            return StorageStats(self._table.used_bytes, self._table.end_bytes)

    def close(self) -> None:
        """Release the file, at once or when the transfer in flight ends."""
        if self._owner.is_elsewhere:  # no transfer of this process is in flight
            self._finalizer()
            return
        with self._lock:
            self._closed = True
            idle = self._transfers == 0
        if idle:
            self._finalizer()

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, f"storage is closed: {self.describe()}")

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[int]:
        # Closing a descriptor under a running system call would let the next
        # open() take its number, and the rest of the transfer with it.
        with self._lock:
            self._check_open()
            self._transfers += 1
        try:
            yield self._file.fd
        finally:
            with self._lock:
                self._transfers -= 1
                last = self._closed and self._transfers == 0
            if last:
                self._finalizer()

    def _grow(self, capacity: int) -> bool:
        held, missing = self._table.end_bytes, self._table.missing_bytes(capacity)
        for step in (round_up(missing, self._extent_bytes), missing):
            if self._capacity_bytes is not None and held + step > self._capacity_bytes:
                continue
            if self._file.extend(held, step):
                self._table.extend(step)
                return True
        return False


def check_buffer(slot: Slot, buffer: torch.Tensor) -> None:
    """Hold a buffer against the contract of `Storage.write` and `Storage.read`.

    Raises:
        ValueError: wrong dtype, device, layout, alignment, or longer than the slot.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device.type != "cpu":
        raise ValueError(
            "storage expects a 1-D uint8 CPU tensor, got "
            f"{buffer.dim()}-D {buffer.dtype} on {buffer.device}"
        )
    size = buffer.numel()
    if buffer.stride(0) != 1 and size > 1:
        raise ValueError(f"storage expects a contiguous buffer, got {buffer.stride()}")
    if not 0 < size <= slot.capacity_bytes:
        raise ValueError(f"buffer of {size} bytes does not fit {slot}")
    if size % ALIGNMENT_BYTES or buffer.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(
            f"storage expects address and length in multiples of {ALIGNMENT_BYTES}, "
            f"got address {buffer.data_ptr():#x} and {size} bytes"
        )


def _move_all(
    call: Callable[..., int], fd: int, buffer: torch.Tensor, slot: Slot, what: str
) -> None:
    """Move the whole buffer in calls of `BLOCK_BYTES`.

    Raises:
        StorageFullError: no space or no quota left.
        OSError: anything else, the end of the file among it; the text names place,
            offset and bytes.
    """
    view = buffer.numpy().data
    size, moved = len(view), 0
    # A short write is followed up: the rest either arrives after all (a signal came
    # between) or fails with the errno that tells a full disk from a broken one.
    while moved < size:
        try:
            count = call(fd, [view[moved : moved + BLOCK_BYTES]], slot.offset + moved)
        except OSError as error:
            kind = StorageFullError if error.errno in FULL_ERRNOS else OSError
            raise kind(
                error.errno,
                f"{what} at offset {slot.offset} failed after {moved} of {size} bytes: "
                f"{os.strerror(error.errno or errno.EIO)}",
            ) from error
        if count == 0:
            raise OSError(
                errno.EIO,
                f"short {what} at offset {slot.offset}: {moved} of {size} bytes",
            )
        moved += count


class NamelessFile:
    """An open file: extended, and closed once.

    Args:
        fd: its descriptor, this object's own.
        directory: removed as soon as it is empty; None: there is none.
    """

    def __init__(self, fd: int, directory: str | None = None) -> None:
        self.fd = fd
        self._directory = directory
        self._owner = Owner()
        self._remove_directory()

    @property
    def is_direct(self) -> bool:
        """Whether it is open for I/O past the page cache."""
        return bool(fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_DIRECT)

    def use_cache(self) -> None:
        """Read and write through the page cache from now on."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def extend(self, end: int, num_bytes: int) -> bool:
        """Reserve more room at the end; False when the disk has none."""
        try:
            os.posix_fallocate(self.fd, end, num_bytes)
        except OSError as error:
            if error.errno in FULL_ERRNOS or error.errno == errno.EFBIG:
                return False
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            # No preallocation here (some network file systems): a sparse file,
            # and a full disk shows itself at the write instead.
            os.ftruncate(self.fd, end + num_bytes)
        return True

    def close(self) -> None:
        """Close it; nothing of it stays on the disk."""
        os.close(self.fd)
        if not self._owner.is_elsewhere:  # a forked child's descriptor is its own
            self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._directory)


def open_nameless(parent: str) -> NamelessFile:
    """Make a file under `parent`: [Note: Files without a name].

    Raises:
        ConfigError: no inodes, no quota, or no descriptor is left.
        OSError: it cannot be made for another reason.
    """
    own = os.path.join(parent, f"ssdtrain-{os.getpid()}-{secrets.token_hex(8)}")
    made = False
    try:
        os.mkdir(own, 0o700)
        made = True
        try:
            fd = _open_nameless(own, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = _open_nameless(own, 0)
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(own)
        if error.errno in HINTS:
            raise ConfigError(
                f"directory={parent!r} takes no file ({error.strerror}); "
                f"{HINTS[error.errno]}."
            ) from error
        raise
    file = NamelessFile(fd, own)
    try:
        if file.is_direct and not _takes_direct(fd):
            file.use_cache()
    except BaseException:
        file.close()
        raise
    return file


def _open_nameless(directory: str, extra_flags: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | extra_flags
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    name = os.path.join(directory, secrets.token_hex(16))
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return fd


def _takes_direct(fd: int) -> bool:
    """Return whether one aligned block goes through: some accept the flag, then
    refuse."""
    with mmap.mmap(-1, ALIGNMENT_BYTES) as block:
        try:
            done = os.pwritev(fd, [block], 0) == ALIGNMENT_BYTES
            return done and os.preadv(fd, [block], 0) == ALIGNMENT_BYTES
        except OSError as error:
            if error.errno in FULL_ERRNOS:
                return True  # full already: allocate() will say so
            if error.errno != errno.EINVAL:
                raise
            return False
