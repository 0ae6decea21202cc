"""Slots in preallocated files that have no name, read and written past the cache."""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ssdtrain.counters import Fallback
from ssdtrain.errors import ConfigError, StorageFullError
from ssdtrain.forks import Owner
from ssdtrain.storage.base import Slot, StorageStats
from ssdtrain.storage.blockio import BLOCK_BYTES, FULL_ERRNOS, check_buffer
from ssdtrain.storage.slots import ALIGNMENT_BYTES, SlotTable, round_up

EXTENT_BYTES = 256 * 1024 * 1024
"""Files grow by at least this much: few metadata changes, long contiguous runs."""

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
    """A `Storage` over one nameless file in each directory.

    O_DIRECT where the file system allows it, else buffered (counted). Consecutive
    slots alternate between the directories. System calls release the GIL, so the
    caller's threads set the queue depth. [Note: Files without a name]

    Args:
        directories: checked directories (see `directory.check_directory`).
        extent_bytes: least growth of a file.
        capacity_bytes: cap over all files; None: the disks' own.
        on_fallback: told `Fallback.BUFFERED_IO` once for each directory without
            O_DIRECT.

    Raises:
        ValueError: no directory, or a size below 1.
        ConfigError: a directory has no inodes, no quota, or no descriptor is left.
        OSError: a file cannot be created for another reason.
    """

    def __init__(
        self,
        directories: Sequence[str | Path],
        *,
        extent_bytes: int = EXTENT_BYTES,
        capacity_bytes: int | None = None,
        on_fallback: Callable[[Fallback], None] = lambda _: None,
    ) -> None:
        if not directories:
            raise ValueError("PosixStorage expects at least one directory, got none")
        if extent_bytes < 1 or (capacity_bytes is not None and capacity_bytes < 1):
            raise ValueError(
                "extent_bytes and capacity_bytes expect at least 1, got "
                f"{extent_bytes} and {capacity_bytes}"
            )
        self._extent_bytes = round_up(extent_bytes, ALIGNMENT_BYTES)
        self._capacity_bytes = capacity_bytes
        self._places = tuple(str(d) for d in directories)
        self._lock = threading.Lock()
        self._table = SlotTable()
        self._written_bytes = [0] * len(self._places)
        self._read_bytes = [0] * len(self._places)
        self._transfers = 0
        self._closed = False
        self._owner = Owner()
        self._files = _Files()
        self._finalizer = weakref.finalize(self, self._files.close)
        try:
            for place in self._places:
                if not self._files.open(place):
                    on_fallback(Fallback.BUFFERED_IO)
                self._table.add_file()
        except BaseException:
            self._finalizer()
            raise

    @property
    def alignment_bytes(self) -> int:
        """4096, whatever the file system enforces."""
        return ALIGNMENT_BYTES

    @property
    def direct(self) -> tuple[bool, ...]:
        """For each directory, whether its file bypasses the page cache."""
        return tuple(self._files.direct)

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories, in the order of `Slot.file`."""
        return self._places

    def fileno(self, file: int) -> int:
        """Return the open descriptor behind `Slot.file`; it stays this storage's
        own."""
        with self._lock:
            self._check_open()
            return self._files.fds[file]

    def describe(self) -> str:
        """`posix O_DIRECT: /mnt/nvme0, /mnt/nvme1`, or what each directory got."""
        modes = {True: "O_DIRECT", False: "buffered"}
        kinds = "/".join(sorted({modes[d] for d in self._files.direct}))
        return f"posix {kinds}: {', '.join(self._places)}"

    def allocate(self, num_bytes: int) -> Slot:
        """Reserve a slot, in the least used file that has room or can grow.

        Raises:
            StorageFullError: no file can grow (disk full, quota, or the cap).
        """
        self._owner.check("a storage")
        capacity = self._table.capacity_for(num_bytes)
        with self._lock:
            self._check_open()
            # Grow the least used file before packing another one: one busy disk
            # beside idle ones costs more than the room does.
            for file in self._table.by_use():
                slot = self._table.take(file, capacity)
                if slot is None and self._grow(file, capacity):
                    slot = self._table.take(file, capacity)
                if slot is not None:
                    return slot
        raise StorageFullError(
            errno.ENOSPC,
            f"no room for {capacity} bytes in {self.describe()} "
            f"({self._table.allocated_bytes} bytes held)",
        )

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write the whole buffer to the slot; see `Storage.write`."""
        self._owner.check("a storage")
        check_buffer(slot, buffer, ALIGNMENT_BYTES)
        with self._transfer():
            fd = self._files.fds[slot.file]
            what = f"write to {self._places[slot.file]}"
            _move_all(os.pwritev, fd, buffer, slot.offset, what)
        with self._lock:
            self._written_bytes[slot.file] += buffer.numel()

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Fill the whole buffer from the slot; see `Storage.read`."""
        self._owner.check("a storage")
        check_buffer(slot, buffer, ALIGNMENT_BYTES)
        with self._transfer():
            fd = self._files.fds[slot.file]
            what = f"read from {self._places[slot.file]}"
            _move_all(os.preadv, fd, buffer, slot.offset, what)
        with self._lock:
            self._read_bytes[slot.file] += buffer.numel()

    def free(self, slot: Slot) -> None:
        """Give the slot back; after `close` there is nothing left to give back to."""
        if self._owner.is_elsewhere:
            return
        with self._lock:
            if not self._closed:
                self._table.give(slot)

    def stats(self) -> StorageStats:
        """Return the bytes held and moved so far."""
        self._owner.check("a storage")
        with self._lock:
            return self._table.stats(
                written_bytes=sum(self._written_bytes), read_bytes=sum(self._read_bytes)
            )

    def close(self) -> None:
        """Release the files, at once or when the transfer in flight ends."""
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
    def _transfer(self) -> Iterator[None]:
        # Closing a descriptor under a running system call would let the next
        # open() take its number, and the rest of the transfer with it.
        with self._lock:
            self._check_open()
            self._transfers += 1
        try:
            yield
        finally:
            with self._lock:
                self._transfers -= 1
                last = self._closed and self._transfers == 0
            if last:
                self._finalizer()

    def _grow(self, file: int, capacity: int) -> bool:
        missing = self._table.missing_bytes(file, capacity)
        for step in (round_up(missing, self._extent_bytes), missing):
            held = self._table.allocated_bytes
            if self._capacity_bytes is not None and held + step > self._capacity_bytes:
                continue
            if self._files.extend(file, step):
                self._table.extend(file, step)
                return True
        return False


def _move_all(
    call: Callable[..., int], fd: int, buffer: torch.Tensor, offset: int, what: str
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
            count = call(fd, [view[moved : moved + BLOCK_BYTES]], offset + moved)
        except OSError as error:
            kind = StorageFullError if error.errno in FULL_ERRNOS else OSError
            raise kind(
                error.errno,
                f"{what} at offset {offset} failed after {moved} of {size} bytes: "
                f"{os.strerror(error.errno or errno.EIO)}",
            ) from error
        if count == 0:
            raise OSError(
                errno.EIO, f"short {what} at offset {offset}: {moved} of {size} bytes"
            )
        moved += count


class _Files:
    """The open files: created without a name, extended, closed.

    [Note: Files without a name]
    O_TMPFILE makes a file that no directory lists; where the file system has none,
    a name of 128 random bits is created with O_EXCL and removed at once. Either way
    it is mode 0600 in a directory of this process, mode 0700, that is removed as
    soon as it is empty (NFS keeps a placeholder in it until the file is closed). So
    a crash or SIGKILL leaves neither bytes nor names, and nobody else reads them.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.direct: list[bool] = []
        self._sizes: list[int] = []
        self._left_over: list[str] = []  # directories still to be removed
        self._owner = Owner()

    def open(self, parent: str) -> bool:
        """Add a file under `parent`; whether it has O_DIRECT."""
        own = os.path.join(parent, f"ssdtrain-{os.getpid()}-{secrets.token_hex(8)}")
        try:
            os.mkdir(own, 0o700)
            self._left_over.append(own)
            try:
                fd = _open_nameless(own, os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fd = _open_nameless(own, 0)
        except OSError as error:
            if error.errno in HINTS:
                raise ConfigError(
                    f"directory={parent!r} takes no file ({error.strerror}); "
                    f"{HINTS[error.errno]}."
                ) from error
            raise
        self.fds.append(fd)
        self._sizes.append(0)
        self.direct.append(is_direct_file(fd) and _probe_direct(fd))
        if not self.direct[-1]:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._remove_directories()
        return self.direct[-1]

    def extend(self, file: int, num_bytes: int) -> bool:
        """Reserve more room at the end; False when the disk has none."""
        fd, size = self.fds[file], self._sizes[file]
        try:
            os.posix_fallocate(fd, size, num_bytes)
        except OSError as error:
            if error.errno in FULL_ERRNOS or error.errno == errno.EFBIG:
                return False
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            # No preallocation here (some network file systems): a sparse file,
            # and a full disk shows itself at the write instead.
            os.ftruncate(fd, size + num_bytes)
        self._sizes[file] += num_bytes
        return True

    def close(self) -> None:
        """Close everything; nothing of it stays on the disk."""
        while self.fds:
            os.close(self.fds.pop())
        if not self._owner.is_elsewhere:  # a forked child's descriptors are its own
            self._remove_directories()

    def _remove_directories(self) -> None:
        kept = []
        for path in self._left_over:
            try:
                os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError:
                kept.append(path)
        self._left_over = kept


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


def is_direct_file(fd: int) -> bool:
    """Return whether the file is open for I/O past the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _probe_direct(fd: int) -> bool:
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
