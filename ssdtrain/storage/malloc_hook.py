"""The malloc hook from Python: build it, decide on it, load it, read its counters.

`ssdtrain train` starts with it where it is of use (`preload=auto`); for other commands
`ssdtrain env` prints what a shell sets. It needs a C compiler, no CUDA.

The hook registers CUDA allocations with cuFile (Wu 5.3.1; csrc/malloc_hook.c). It
is switched by the environment: `SSDTRAIN_HOOK=0` turns it off,
`SSDTRAIN_HOOK_MIN_BYTES` sets the least allocation worth registering (1 MiB).
"""

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ssdtrain.storage.clibrary import BuildError, CLibrary
from ssdtrain.storage.directory import check_trusted
from ssdtrain.versions import nvidia_fs_loaded

SOURCE = Path(__file__).parent / "csrc" / "malloc_hook.c"
LIBRARY = CLibrary(SOURCE, ("-ldl", "-lpthread"))


@dataclass(frozen=True, kw_only=True)
class HookCounters:
    """What the hook has seen since the process started; all are counts."""

    malloc_calls: int
    malloc_async_calls: int
    free_calls: int
    free_async_calls: int
    failed_calls: int
    """The runtime returned an error."""
    below_threshold: int
    """Smaller than `SSDTRAIN_HOOK_MIN_BYTES`."""
    reentrant: int
    """Calls made by cuFile itself while it registered a buffer."""
    registered: int
    """cuFile took the allocation."""
    deregistered: int
    refused: int
    """cuFile did not; `last_cufile_error` says why."""
    without_cufile: int
    """libcufile was not found, or its driver did not open."""
    unregistered_async: int
    """Large enough, but from cudaMallocAsync: a registration of every tensor would
    take milliseconds each."""
    live: int
    """Allocations that are in use now."""
    live_bytes: int
    """Their bytes."""
    live_registered: int
    last_cufile_error: int
    """CUfileOpError of the last refusal; 0: there was none."""


class _Counters(ctypes.Structure):
    _fields_ = [
        (f.name, ctypes.c_int64 if f.name.startswith("last") else ctypes.c_uint64)
        for f in fields(HookCounters)
    ]


class Hook:
    """The hook in this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @property
    def enabled(self) -> bool:
        """False when `SSDTRAIN_HOOK=0` switched it off."""
        return bool(self._library.ssdtrain_hook_enabled())

    def counters(self) -> HookCounters:
        """Read all counters at one moment."""
        raw = _Counters()
        self._library.ssdtrain_hook_read(ctypes.byref(raw))
        names = (field.name for field in fields(HookCounters))
        return HookCounters(**{name: getattr(raw, name) for name in names})


def loaded() -> Hook | None:
    """Return the hook, if it was preloaded into this process."""
    process = ctypes.CDLL(None)
    return Hook(process) if hasattr(process, "ssdtrain_hook_read") else None


def preload(
    environment: Mapping[str, str], library: Path | None = None
) -> dict[str, str]:
    """Return a copy of an environment in which a process starts with the hook.

    Raises:
        BuildError: the library was not built.
        ConfigError: others could have written it.
    """
    path = library or LIBRARY.path
    if not path.exists():
        raise BuildError(f"{path} is missing; build it: ssdtrain env --preload always")
    check_trusted(path)
    before = environment.get("LD_PRELOAD")
    return {**environment, "LD_PRELOAD": f"{path} {before}" if before else str(path)}


class Preload(str, Enum):
    """Whether a training process starts with the hook."""

    AUTO = "auto"
    """Where it is of use: nvidia-fs and kvikio are there, tensors go to an SSD, and
    the allocator's segments are not expandable."""
    ALWAYS = "always"
    NEVER = "never"


class PreloadDecision(NamedTuple):
    """Whether to preload, and why."""

    library: Path | None
    """What to preload; None: nothing."""
    why: str


def decide(
    choice: Preload, *, to_ssd: bool, environment: Mapping[str, str] = os.environ
) -> PreloadDecision:
    """Decide whether a process of this environment starts with the hook; builds it.

    Raises:
        BuildError: ``always``, and it cannot be built.
        ConfigError: others could have written it.
    """
    if choice is Preload.NEVER:
        return PreloadDecision(None, "preload=never")
    if choice is Preload.AUTO and (reason := _of_no_use(to_ssd, environment)):
        return PreloadDecision(None, reason)
    try:
        library = LIBRARY.built()
    except BuildError as error:
        if choice is Preload.ALWAYS:
            raise
        return PreloadDecision(None, f"it cannot be built: {error}")
    if choice is Preload.ALWAYS:
        return PreloadDecision(library, "preload=always")
    return PreloadDecision(library, "nvidia-fs is loaded and tensors go to an SSD")


def _of_no_use(to_ssd: bool, environment: Mapping[str, str]) -> str:
    """Return why the hook would do nothing; "" if it would."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    text = ",".join(environment.get(name, "") for name in names)
    allocator = text.replace(" ", "").lower()
    if environment.get("SSDTRAIN_HOOK") == "0":
        return "SSDTRAIN_HOOK=0"
    if not to_ssd:
        return "no tensor goes to an SSD"
    if not nvidia_fs_loaded():
        return "nvidia-fs is not loaded"
    if find_spec("kvikio") is None:
        return "kvikio is not installed"
    if "expandable_segments:true" in allocator:
        return "expandable segments pass it by (PYTORCH_ALLOC_CONF)"
    return ""
