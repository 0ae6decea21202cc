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


def c_compiler() -> str | None:
    """Return the path of `$CC`, or of cc; None: there is none."""
    return shutil.which(os.environ.get("CC") or "cc")
