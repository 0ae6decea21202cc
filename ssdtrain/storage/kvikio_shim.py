"""The one place that imports kvikio: what it can do here, and why not more.

[Note: Three modes]
kvikio moves bytes between GPU memory and files in three ways that are often taken for
one another:

* GDS: cuFile with the nvidia-fs kernel module; the disk reads and writes GPU memory.
* cuFile's own compatibility mode: cuFile without nvidia-fs, which needs
  `allow_compat_mode` in cufile.json (the default); it copies through its own pinned
  buffers. kvikio `CompatMode.OFF`, the same as for GDS: kvikio cannot tell them apart.
* kvikio's POSIX mode: no cuFile at all, kvikio's threads copy through bounce buffers
  and call pread and pwrite. kvikio `CompatMode.ON`.
"""

import ctypes
import threading
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

UDEV_DATABASE = Path("/run/udev/data")
LEAST_VERSION = (25, 2)
"""First kvikio with `CompatMode` as an enumeration."""


class GdsMode(str, Enum):
    """How kvikio moves the bytes; see [Note: Three modes]."""

    GDS = "GDS"
    """nvidia-fs is loaded: the CPU and its memory are not touched."""
    CUFILE_COMPAT = "cuFile compatibility mode"
    """cuFile without nvidia-fs, through its pinned buffers."""
    KVIKIO_POSIX = "kvikio POSIX mode"
    """kvikio's own threads and bounce buffers, without cuFile."""


class Refusal(NamedTuple):
    """A mode that is not to be had here."""

    mode: GdsMode
    reason: str
    """What is missing, in one line."""


@dataclass(frozen=True, kw_only=True)
class Availability:
    """What kvikio can do on this machine."""

    modes: tuple[GdsMode, ...]
    """Usable modes, the most direct first."""
    refusals: tuple[Refusal, ...]
    """The others, each with its reason."""

    def why_not(self, mode: GdsMode) -> str | None:
        """Return the reason against a mode; None if it is usable."""
        return next((r.reason for r in self.refusals if r.mode is mode), None)


def availability() -> Availability:
    """Look at the libraries and the driver; opens cuFile where there is one."""
    reason = _why_no_kvikio()
    if reason is not None:
        return _without({mode: reason for mode in GdsMode})
    reason, has_nvidia_fs = _open_cufile()
    if reason is not None:
        return _without({GdsMode.GDS: reason, GdsMode.CUFILE_COMPAT: reason})
    if has_nvidia_fs:
        # cuFile then decides for each file; there is no way to ask for less.
        return _without({GdsMode.CUFILE_COMPAT: "nvidia-fs is loaded: GDS is"})
    refused = {GdsMode.GDS: "the nvidia-fs kernel module is missing"}
    if not UDEV_DATABASE.is_dir():
        # Every cuFileHandleRegister would fail with 5027 (seen on an H200).
        refused[GdsMode.CUFILE_COMPAT] = (
            f"cuFile asks udev for file systems; {UDEV_DATABASE} is missing"
        )
    return _without(refused)


def _without(refused: dict[GdsMode, str]) -> Availability:
    return Availability(
        modes=tuple(mode for mode in GdsMode if mode not in refused),
        refusals=tuple(Refusal(*each) for each in refused.items()),
    )


def kvikio_version() -> tuple[int, ...]:
    """As installed.

    Raises:
        ImportError: there is none.
    """
    import kvikio

    return tuple(int(part) for part in kvikio.__version__.split(".")[:2])


def kvikio_installed() -> bool:
    """Return whether the package is there; says nothing about the driver."""
    return find_spec("kvikio") is not None


def _why_no_kvikio() -> str | None:
    if not kvikio_installed():
        return "kvikio is not installed (pip install 'ssdtrain[gds]')"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 is missing: no NVIDIA driver on this machine"
    try:
        version = kvikio_version()
    except (ImportError, OSError, RuntimeError) as error:
        return f"kvikio does not load: {error}"
    if version < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return f"kvikio {'.'.join(map(str, version))} is older than {least}"
    return None


def _open_cufile() -> tuple[str | None, bool]:
    """Open cuFile; why it does not (None: it does), and whether nvidia-fs is there."""
    import kvikio.cufile_driver as driver

    # Opened for good: once closed, cuFile registers no further file in this process.
    try:
        driver.initialize()
    except Exception as error:  # kvikio has no exception class of its own
        return f"cuFile does not open: {_first_line(error)}", False
    if driver.get("is_gds_available"):
        return None, True
    if driver.get("allow_compat_mode"):
        return None, False
    return "no nvidia-fs, and allow_compat_mode is off in cufile.json", False


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


class KvikioFile:
    """One open file in one mode.

    Args:
        path: a path that can be opened for reading and writing.
        mode: one of `availability().modes`.

    Raises:
        OSError: kvikio cannot open the file in this mode; the text has its reason.
    """

    # kvikio takes the mode from a process-wide default when it opens a file.
    _opening = threading.Lock()

    def __init__(self, path: str, mode: GdsMode) -> None:
        import kvikio
        import kvikio.defaults

        posix = mode is GdsMode.KVIKIO_POSIX
        wanted = kvikio.CompatMode.ON if posix else kvikio.CompatMode.OFF
        with self._opening, kvikio.defaults.set("compat_mode", wanted):
            try:
                self._file: Any = kvikio.CuFile(path, "r+")
            except Exception as error:
                raise OSError(
                    f"kvikio cannot open {path} in {mode.value}: {_first_line(error)}"
                ) from error

    def write(self, data: DeviceBytes, num_bytes: int, offset: int, task: int) -> int:
        """Write in kvikio's threads, in tasks of `task` bytes; return the bytes."""
        return int(self._file.pwrite(data, num_bytes, offset, task).get())

    def read(self, data: DeviceBytes, num_bytes: int, offset: int, task: int) -> int:
        """Read as above; return the bytes."""
        return int(self._file.pread(data, num_bytes, offset, task).get())

    def close(self) -> None:
        """Deregister and close."""
        self._file.close()


def set_threads(num_threads: int) -> None:
    """Size kvikio's thread pool, and have its POSIX mode bypass the page cache.

    Both are settings of the whole process. Through the page cache a write would end
    in main memory, which is not where activations are meant to go.
    """
    import kvikio.defaults

    kvikio.defaults.set("num_threads", num_threads)
    kvikio.defaults.set("auto_direct_io_read", True)
    kvikio.defaults.set("auto_direct_io_write", True)
