"""Files that come with ssdtrain: in a wheel inside the package, in a checkout next to
it."""

from pathlib import Path


def packaged_directory(name: str = "configs") -> Path:
    """Return where the configs, launch wrappers or recipes are."""
    package = Path(__file__).resolve().parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
