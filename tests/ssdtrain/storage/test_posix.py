"""Real files: nameless, private, direct, full, short, closed under way."""

import contextlib
import ctypes
import errno
import gc
import os
import resource
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ssdtrain
from ssdtrain.counters import Fallback
from ssdtrain.errors import ConfigError, StorageFullError
from ssdtrain.storage import PosixStorage, open_storage, posix
from ssdtrain.storage import open as opening
from tests.ranks import SOON_S
from tests.ssdtrain.forking import OK, in_child

MIB = 1024 * 1024
PAGE = 4096
Aligned = Callable[..., torch.Tensor]


def open_below(directory: Path) -> list[str]:
    """Files of a directory, with or without a name, that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # somebody has closed it
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(f"{directory}/")]


def test_nothing_has_a_name_and_nobody_else_reads(directory: Path) -> None:
    store = PosixStorage(directory, extent_bytes=MIB)
    store.allocate(PAGE)
    status = os.fstat(store.fileno())
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert status.st_size == MIB
    assert list(directory.iterdir()) == []
    store.close()


def test_without_o_tmpfile_the_name_is_removed_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open
    seen = []

    def refuse(path: str, flags: int, *args: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        fd = real_open(path, flags, *args)
        seen.append((flags, stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode)))
        return fd

    monkeypatch.setattr(os, "open", refuse)
    store = PosixStorage(directory, extent_bytes=MIB)
    assert seen[0][0] & os.O_EXCL
    assert seen[0][1] == 0o700
    assert os.fstat(store.fileno()).st_nlink == 0
    assert list(directory.rglob("*")) == []
    store.close()


def test_a_killed_process_leaves_nothing(directory: Path, aligned: Aligned) -> None:
    def child() -> int:
        store = PosixStorage(directory)
        store.write(store.allocate(PAGE), aligned(PAGE))
        os.kill(os.getpid(), signal.SIGKILL)
        return OK

    assert in_child(child) == -signal.SIGKILL
    assert list(directory.rglob("*")) == []


def test_direct_io_is_direct(directory: Path, aligned: Aligned) -> None:
    store = PosixStorage(directory, extent_bytes=MIB)
    if not store.is_direct:
        pytest.skip("this file system has no O_DIRECT")
    assert "O_DIRECT" in store.describe()
    slot = store.allocate(MIB)
    before = _written_by_this_process()
    store.write(slot, aligned(MIB, seed=1))
    # The kernel's own count of bytes sent to the disk, not to its cache.
    assert _written_by_this_process() - before >= MIB
    store.close()


def _written_by_this_process() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("write_bytes:")[1].split()[0])


@pytest.mark.parametrize("refused_at", ["open", "first block"])
def test_buffered_where_direct_is_refused(
    refused_at: str, directory: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_pwritev = os.open, os.pwritev

    def open_refusing(path: str, flags: int, *args: int) -> int:
        if refused_at == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *args)

    def write_refusing(fd: int, *args: object) -> int:
        if refused_at == "first block" and posix.NamelessFile(fd).is_direct:
            raise OSError(errno.EINVAL, "no O_DIRECT after all")
        return real_pwritev(fd, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_refusing)
    monkeypatch.setattr(os, "pwritev", write_refusing)
    told: list[Fallback] = []
    store = PosixStorage(directory, on_fallback=told.append)
    assert told == [Fallback.BUFFERED_IO]
    assert not store.is_direct
    assert store.describe() == f"posix buffered: {directory}"
    sent, back, slot = aligned(PAGE, seed=2), aligned(PAGE), store.allocate(PAGE)
    store.write(slot, sent)
    store.read(slot, back)
    assert torch.equal(sent, back)
    store.close()


def test_a_file_size_limit_is_a_short_write_then_an_error(
    directory: Path, aligned: Aligned
) -> None:
    """RLIMIT_FSIZE gives a true short write; the rest then fails with EFBIG."""

    def child() -> int:
        store = PosixStorage(directory, extent_bytes=MIB)
        slot = store.allocate(MIB)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        with pytest.raises(OSError, match=f"failed after .* of {MIB} bytes") as told:
            store.write(slot, aligned(MIB))
        assert not isinstance(told.value, StorageFullError)
        return OK

    assert in_child(child) == OK


NO_NAMESPACE = 77
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
"""For `unshare`."""


def mount_tmpfs(directory: Path, options: bytes) -> bool:
    """In namespaces of this process alone, which must have one thread; False where they
    are not permitted."""
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_MOUNTS):
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return not libc.mount(b"tmpfs", str(directory).encode(), b"tmpfs", 0, options)


def test_a_full_disk_is_storage_full(directory: Path, aligned: Aligned) -> None:
    """A tmpfs of 4 MB: allocation fails, data stays."""

    def child() -> int:
        if not mount_tmpfs(directory, b"size=4m"):
            return NO_NAMESPACE
        store = PosixStorage(directory, extent_bytes=64 * MIB)
        slots, sent = [], []
        with pytest.raises(StorageFullError, match=f"no room for {MIB} bytes"):
            while True:
                slots.append(store.allocate(MIB))
                sent.append(aligned(MIB).fill_(len(slots)))
                store.write(slots[-1], sent[-1])
        assert len(slots) == 4
        for slot, expected in zip(slots, sent, strict=True):
            back = aligned(MIB)
            store.read(slot, back)
            assert torch.equal(back, expected)
        store.free(slots[0])
        assert store.allocate(MIB) == slots[0]
        return OK

    code = in_child(child)
    if code == NO_NAMESPACE:
        pytest.skip("namespaces with mounts are not permitted here")
    assert code == OK


def test_sparse_where_preallocation_is_unknown(
    directory: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store = PosixStorage(directory, extent_bytes=MIB)
    slot = store.allocate(MIB)
    sent, back = aligned(MIB, seed=3), aligned(MIB)
    store.write(slot, sent)
    store.read(slot, back)
    assert torch.equal(sent, back)

    def full(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageFullError, match="after 0 of 1048576 bytes"):
        store.write(slot, sent)
    store.close()


def test_a_file_that_ends_early_is_a_short_read(
    directory: Path, aligned: Aligned
) -> None:
    store = PosixStorage(directory, extent_bytes=MIB)
    slot = store.allocate(MIB)
    os.ftruncate(store.fileno(), 8 * PAGE)
    with pytest.raises(OSError, match=r"short read .* 32768 of 1048576 bytes"):
        store.read(slot, aligned(MIB))
    store.close()


def test_a_short_write_is_finished(
    directory: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may end a call early: the rest follows, nothing is lost."""
    real = os.pwritev
    store = PosixStorage(directory, extent_bytes=MIB)
    slot = store.allocate(MIB)

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][: 16 * PAGE]], offset)

    monkeypatch.setattr(os, "pwritev", some)
    sent, back = aligned(MIB, seed=4), aligned(MIB)
    store.write(slot, sent)
    store.read(slot, back)
    assert torch.equal(sent, back)
    store.close()


def test_close_waits_for_the_transfer_under_way(
    directory: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its descriptor's number could be somebody else's file already."""
    real = os.pwritev
    entered, go_on = threading.Event(), threading.Event()
    store = PosixStorage(directory, extent_bytes=MIB)
    slot = store.allocate(PAGE)

    def slow(*args: object) -> int:
        entered.set()
        go_on.wait(SOON_S)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", slow)
    writer = threading.Thread(target=store.write, args=(slot, aligned(PAGE)))
    writer.start()
    entered.wait(SOON_S)
    store.close()
    assert open_below(directory)
    go_on.set()
    writer.join()
    assert not open_below(directory)


def test_a_dropped_storage_closes_its_files(directory: Path) -> None:
    store = PosixStorage(directory)
    assert open_below(directory)
    del store
    gc.collect()
    assert not open_below(directory)


def test_one_bad_directory_leaves_no_file_open(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "missing"
    missing.mkdir(mode=0o700)
    monkeypatch.setattr(opening, "_checked", lambda names: (missing.rmdir(), names)[1])
    with pytest.raises(FileNotFoundError):
        open_storage([directory, missing])
    assert not open_below(directory)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_no_inodes_is_a_clear_error(
    number: int, call: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At attach, with everything as it was: the second directory has no inode left."""
    other = directory / "other"
    other.mkdir(mode=0o700)
    real = getattr(os, call)

    def refuse(path: object, *arguments: int, **named: int) -> object:
        if str(path).startswith(str(other / "ssdtrain-")):
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(ConfigError, match=r"other' takes no file .*; free inodes"):
        open_storage([directory, other])
    net = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="set directory to another disk"):
        ssdtrain.offload(net, max_overhead=0.01, target="ssd", directory=str(other))
    assert "forward" not in vars(net)
    assert not open_below(directory)
    assert list(directory.iterdir()) == [other] and not list(other.iterdir())


def test_no_descriptor_is_a_clear_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **named: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"ulimit -n"):
        PosixStorage(directory)
    assert not list(directory.iterdir())


def test_impossible_arguments(directory: Path) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        PosixStorage(directory, extent_bytes=0)
