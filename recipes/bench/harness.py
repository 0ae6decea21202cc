"""What every benchmark here shares: the record of where it ran, and resumable cells."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "deepspeed",
    "megatron-core",
    "torch-geometric",
    "kvikio-cu13",
)


def environment() -> dict[str, Any]:
    """Device, versions and command of this run."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name()
        if cuda
        else f"{os.cpu_count()} CPU cores",
        "num_devices": torch.cuda.device_count() if cuda else 0,
        "num_cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Cells:
    """Named results in one JSON file, written after every cell; a rerun goes on."""

    def __init__(self, path: Path, budget_s: float, settings: dict[str, Any]) -> None:
        self._path = path
        self._deadline = time.monotonic() + budget_s
        self.data: dict[str, Any] = {
            "environment": environment(),
            "settings": settings,
            "cells": {},
        }
        if path.exists():
            before = json.loads(path.read_text())
            if before.get("settings") == settings:
                self.data["cells"] = before["cells"]

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.data["cells"][name]  # type: ignore[no-any-return]

    def __contains__(self, name: str) -> bool:
        return name in self.data["cells"]

    def run(self, name: str, cell: Callable[[], dict[str, Any]]) -> None:
        """Run a cell unless it is there or the time is over; an error is a result."""
        if name in self or time.monotonic() > self._deadline:
            return
        start = time.monotonic()
        try:
            result = cell()
        except torch.OutOfMemoryError:
            result = {"error": "out of memory"}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        result["cell_s"] = round(time.monotonic() - start, 2)
        self.data["cells"][name] = result
        self.save()
        print(name, json.dumps(result), flush=True)

    def save(self) -> None:
        """Write the file in one piece."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".tmp")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self._path)
