"""The user's directory: is it safe and sensible to put activations there?"""

import grp
import os
import pwd
import stat
import warnings
from pathlib import Path

from ssdtrain.errors import ConfigError

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
OVERLAY_FILE_SYSTEMS = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "lustre", "gpfs"}
    | {"beegfs", "ceph", "glusterfs", "afs", "fuse.glusterfs", "fuse.sshfs"}
    | {"fuse.s3fs", "fuse.gcsfuse", "wekafs", "vboxsf", "orangefs", "pvfs2"}
)


def check_directory(path: str | Path) -> Path:
    """Check a directory and warn where it is no SSD. Returns it made absolute.

    Raises:
        ConfigError: missing, no directory, a symbolic link, not writable, owned by
            somebody else, or writable by others without the sticky bit.
    """
    place = Path(path).absolute()
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(_why_not_opened(place, error)) from error
    try:
        status = os.fstat(fd)
        _check_rights(place, fd, status)
        kind = file_system_of(fd)
    finally:
        os.close(fd)
    _warn_if_no_disk(place, kind)
    return place


def user_cache() -> Path:
    """`ssdtrain` in the user's cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "ssdtrain"


def check_trusted(path: Path) -> None:
    """Refuse a file, or a directory, whose code this process would run although
    others could have written it.

    Raises:
        ConfigError: `path` or its directory is a link, belongs to neither this user
            nor root, or is writable by others (a sticky directory is fine).
    """
    for place in (path.absolute().parent, path.absolute()):
        status = place.lstat()
        if stat.S_ISLNK(status.st_mode):
            why = "is a symbolic link"
        elif status.st_uid not in (os.geteuid(), 0):
            why = f"belongs to user {status.st_uid}"
        elif _others_may_write(status):
            why = f"is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
        else:
            continue
        raise ConfigError(
            f"{place} {why}: code in it would run as user {os.geteuid()}; remove it, "
            "or set XDG_CACHE_HOME to a directory of your own (mode 700)."
        )


def file_system_of(fd: int) -> str:
    """Type of the file system of an open descriptor, `unknown` without /proc.

    The mount id leads to the right line of mountinfo also where device numbers do
    not (overlay, btrfs subvolumes, bind mounts over one another).
    """
    try:
        fdinfo = Path(f"/proc/self/fdinfo/{fd}").read_text()
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return "unknown"
    fields = dict(line.split(":", 1) for line in fdinfo.splitlines() if ":" in line)
    mount_id = fields.get("mnt_id", "").strip()
    for line in mounts.splitlines():
        words = line.split()
        if words[0] == mount_id:
            return words[words.index("-") + 1]
    return "unknown"


def _why_not_opened(place: Path, error: OSError) -> str:
    if place.is_symlink():
        return (
            f"directory={str(place)!r} is a symbolic link, which could be pointed "
            f"elsewhere; set directory={str(place.resolve())!r}."
        )
    if not place.exists():
        return (
            f"directory={str(place)!r} does not exist; create it on the SSD "
            f"(mkdir -m 700 {place}) or set directory to one that exists."
        )
    if not place.is_dir():
        return f"directory={str(place)!r} is not a directory; set directory to one."
    return (
        f"directory={str(place)!r} cannot be opened: {error.strerror}; set directory "
        "to one that this user can read and write."
    )


def _check_rights(place: Path, fd: int, status: os.stat_result) -> None:
    read_only = os.fstatvfs(fd).f_flag & os.ST_RDONLY
    if read_only or not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        why = "is on a read-only mount" if read_only else "is not writable"
        raise ConfigError(
            f"directory={str(place)!r} {why} for user {os.geteuid()}; set directory "
            "to one that is."
        )
    mode = stat.S_IMODE(status.st_mode)
    owners = {os.geteuid(), 0} if mode & stat.S_ISVTX else {os.geteuid()}
    if status.st_uid not in owners:
        raise ConfigError(
            f"directory={str(place)!r} belongs to user {status.st_uid}, not to "
            f"{os.geteuid()}: its owner could reach the activations; set directory to "
            f"one of your own (mkdir -m 700 {place}/$USER)."
        )
    if _others_may_write(status):
        raise ConfigError(
            f"directory={str(place)!r} is writable by others (mode {mode:o}); "
            f"chmod go-w {place}, or set directory to one of your own "
            f"(mkdir -m 700 {place}/$USER)."
        )


def _others_may_write(status: os.stat_result) -> bool:
    """Not into a sticky directory, such as /tmp: others cannot rename what is ours."""
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return False
    others = stat.S_IWOTH if _is_private_group(status) else stat.S_IWGRP | stat.S_IWOTH
    return bool(status.st_mode & others)


def _is_private_group(status: os.stat_result) -> bool:
    """Return whether the group has no other member: Ubuntu and Fedora give each user
    one, and make new directories writable for it."""
    try:
        group = grp.getgrgid(status.st_gid)
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def _warn_if_no_disk(place: Path, kind: str) -> None:
    if kind in MEMORY_FILE_SYSTEMS:
        what = "it is main memory, not an SSD (target='host' is faster)"
    elif kind in OVERLAY_FILE_SYSTEMS:
        what = "a container's writable layer: slow, and its size is often limited"
    elif kind in NETWORK_FILE_SYSTEMS:
        what = "a network file system: its bandwidth is shared with others"
    else:
        return
    warnings.warn(
        f"directory={str(place)!r} is on {kind}, {what}; set directory to a local "
        "SSD for speed.",
        stacklevel=2,
    )
