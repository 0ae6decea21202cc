"""Versions of installed packages, from their metadata: nothing is imported."""

from importlib import metadata


def installed(package: str) -> str | None:
    """The version, or None where the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
