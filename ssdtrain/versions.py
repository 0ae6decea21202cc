"""What is installed: versions of packages, from their metadata, a C compiler, and
GPUDirect Storage's driver. Nothing is imported.
"""

import os
import shutil
from importlib import metadata
from pathlib import Path


def installed(package: str) -> str | None:
    """The version, or None where the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `2.13.0+cpu` gives (2, 13, 0)."""
    found = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def nvidia_fs_loaded() -> bool:
    """Return whether the kernel module of GPUDirect Storage is loaded."""
    try:
        lines = Path("/proc/modules").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("nvidia_fs ") for line in lines)


def c_compiler() -> str | None:
    """Return the path of `$CC`, or of cc; None: there is none."""
    return shutil.which(os.environ.get("CC") or "cc")
