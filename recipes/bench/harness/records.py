"""The one format of results: where it ran, what was set, and cells by name.

`{"environment": {...}, "settings": {...}, "cells": {name: {...}}}`; what belongs to a
whole run stands beside these. An error is a cell with `error` in it.
"""

import json
import re
from pathlib import Path
from typing import Any

Data = dict[str, Any]
PARTS = ("environment", "settings", "cells")
ROOT = Path(__file__).resolve().parents[3]
"""The checkout."""
RESULTS = ROOT / "recipes" / "bench" / "results"
"""One folder a subject, one file a benchmark."""
ABSOLUTE = re.compile(r"(?<![\w./~-])/(?:[\w.+@-]+/)+[\w.+@-]*")
"""A path of two parts and more from the root of the file system."""
OF_EVERY_MACHINE = ("/dev/", "/proc/", "/sys/")
INSTALLED = ("site-packages/", "dist-packages/")


def public(value: Any) -> Any:
    """The value with no path of this machine in its strings, at any depth.

    A path below the checkout becomes relative to it, one of an installed package starts
    at `site-packages`, and of any other the last part stays.
    """
    if isinstance(value, str):
        return ABSOLUTE.sub(_relative, value) if "/" in value else value
    if isinstance(value, dict):
        return {public(key): public(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [public(part) for part in value]
    return value


def _relative(found: re.Match[str]) -> str:
    path = found.group()
    if path.startswith(OF_EVERY_MACHINE):
        return path
    if path.startswith(f"{ROOT}/"):
        return path.removeprefix(f"{ROOT}/")
    for folder in INSTALLED:
        before, _, inside = path.rpartition(folder)
        if before:
            return f"{folder}{inside}"
    return Path(path).name


def read(path: Path) -> Data:
    """Read a results file.

    Raises:
        OSError: there is none. ValueError: not of this format; says what it lacks.
    """
    data = json.loads(path.read_text())
    missing = [part for part in PARTS if not isinstance(data.get(part), dict)]
    if missing:
        raise ValueError(f"{path} expects {list(PARTS)}, has no {missing}")
    return data  # type: ignore[no-any-return]


def named(pattern: str, results: Path = RESULTS) -> list[Data]:
    """All records that a pattern such as `models/real_models*` names, in order; each
    knows its `file`."""
    paths = sorted(results.glob(f"{pattern}.json"))
    return [{**read(path), "file": path.stem} for path in paths]


def write(path: Path, data: Data) -> None:
    """Write a results file in one piece: a reader sees the old one or the new one.

    No path of this machine gets into it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(public(data), indent=1) + "\n")
    partial.replace(path)
