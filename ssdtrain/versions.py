"""What is installed: versions of packages, from their metadata, and a C compiler.
Nothing is imported.
"""

import os
import shutil
from importlib import metadata


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


def c_compiler() -> str | None:
    """Return the path of `$CC`, or of cc; None: there is none."""
    return shutil.which(os.environ.get("CC") or "cc")
