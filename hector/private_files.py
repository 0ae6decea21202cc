"""Files that only their user writes: generated modules and tuned schedules.

[Note: private files] Generated modules are executed, so whoever can write one can do
what the user can. They lie in a directory that belongs to the user, that nobody else
may write or read, and that is no link; a file is used only if it holds exactly the text
that was generated in this process.
"""

import os
import stat
import tempfile
from pathlib import Path


class UnsafeCacheError(RuntimeError):
    """A cache directory that others could have written to."""


def cache_directory() -> Path:
    """`$HECTOR_CACHE`, else the user's cache; made if it is missing.

    Raises:
        UnsafeCacheError: it does not belong to this user alone.
    """
    chosen = os.environ.get("HECTOR_CACHE")
    place = Path(chosen) if chosen else Path.home() / ".cache" / "hector"
    return private_directory(place)


def private_directory(place: Path) -> Path:
    """`place` as a directory of this user with mode 0700; see [Note: private files].

    Raises:
        UnsafeCacheError: it belongs to somebody else, is no directory, or others could
            write to it.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.mkdir(mode=0o700)
    except FileExistsError:
        pass
    found = place.lstat()
    wrong = None
    if not stat.S_ISDIR(found.st_mode):
        wrong = "it is a link or a file"
    elif found.st_uid != os.geteuid():
        wrong = f"it belongs to user {found.st_uid}"
    elif found.st_mode & 0o022:
        wrong = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    if wrong is not None:
        raise UnsafeCacheError(
            f"expected {place} as a directory of user {os.geteuid()} alone, but "
            f"{wrong}; generated code in it is executed. Remove it, or set "
            f"HECTOR_CACHE to another directory"
        )
    if found.st_mode & 0o077:
        place.chmod(0o700)
    return place


def read_private(path: Path) -> str | None:
    """The text of a file of this user; None if there is none, or another's or a link
    is in its place."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return None
        return file.read().decode(errors="replace")


def write_private(path: Path, text: str) -> None:
    """Write next to `path` and rename over it: a reader never sees half a file."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
    ) as out:
        out.write(text)
    os.replace(out.name, path)
