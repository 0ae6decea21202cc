"""The user's cache directory: compiled kernels and measured times, private to the user.

[Note: Private caches] What lies here is loaded into the GPU and steers the process, so
nobody else may have put it there. The directory must belong to the user and be writable
for nobody else, and so must each file that is read; a link in its place is not
followed.
"""

import os
import stat
import tempfile
from pathlib import Path


class CacheDirectoryError(RuntimeError):
    """The cache directory, or a file in it, is open to other users."""


def cache_directory() -> Path:
    """Where compiled kernels and times rest, made with mode 0700 if it is not there.

    Raises:
        CacheDirectoryError: it belongs to, or can be written by, somebody else.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    place = Path(base) / "pydirect"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(place, place.lstat(), is_directory=True)
    return place


def read_private(path: Path) -> bytes:
    """The bytes of a file of `cache_directory`.

    Raises:
        FileNotFoundError: no such file.
        CacheDirectoryError: it belongs to, or can be written by, somebody else.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise CacheDirectoryError(
                f"{path} is a symbolic link: expects a file of the user's own; remove "
                "it, or set XDG_CACHE_HOME to a private directory"
            ) from error
        raise
    with os.fdopen(handle, "rb") as file:
        _require_private(path, os.fstat(handle), is_directory=False)
        return file.read()


def write_atomically(path: Path, data: bytes) -> None:
    """Write so that a reader, or a second process, never sees half a file; mode 0600.

    Raises:
        CacheDirectoryError: the directory is open to other users.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(path.parent, path.parent.lstat(), is_directory=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _require_private(path: Path, found: os.stat_result, *, is_directory: bool) -> None:
    """See [Note: Private caches]."""
    right_kind = stat.S_ISDIR if is_directory else stat.S_ISREG
    if not right_kind(found.st_mode):
        raise CacheDirectoryError(
            f"{path} is not a {'directory' if is_directory else 'file'} of its own (a "
            "link?): remove it, or set XDG_CACHE_HOME to a private directory"
        )
    user = os.geteuid()
    if found.st_uid != user:
        raise CacheDirectoryError(
            f"{path} belongs to user {found.st_uid}, not to user {user}, who runs "
            "this: remove it, or set XDG_CACHE_HOME to a private directory"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheDirectoryError(
            f"{path} can be written by other users (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): run chmod go-w on it after checking "
            "what is there, or set XDG_CACHE_HOME to a private directory"
        )
