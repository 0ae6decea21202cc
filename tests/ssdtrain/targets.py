"""All choices of `target=`, for tests that try each."""

from pathlib import Path
from typing import Any

from ssdtrain.config import Target

TARGETS = tuple(target.value for target in Target)
STAGED = tuple(target.value for target in Target if target.behind.is_staged)


def all_written(directory: Path) -> dict[str, Any]:
    """What `ssdtrain.offload` is given so that every tensor goes to the disk."""
    return {
        "target": "ssd",
        "directory": str(directory),
        "min_bytes": 0,
        "plan": "offload-all",
        "recompute": "off",
        "window_bytes": 1,
    }


def settings_of(target: str, directory: Path) -> dict[str, Any]:
    """What `ssdtrain.offload` is given for a target: a directory if it has a disk."""
    if not Target(target).behind.is_disk:
        return {"max_overhead": 0.01, "target": target}
    directory.chmod(0o700)
    return {"max_overhead": 0.01, "target": target, "directory": str(directory)}
