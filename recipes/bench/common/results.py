"""The one format of results: where it ran, what was set, and cells by name.

`{"environment": {...}, "settings": {...}, "cells": {name: {...}}}`; what belongs to a
whole run stands beside these. An error is a cell with `error` in it.
"""

import json
from pathlib import Path
from typing import Any

Data = dict[str, Any]
PARTS = ("environment", "settings", "cells")


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


def find(path: Path) -> Data | None:
    """Read a results file; None if there is none."""
    return read(path) if path.exists() else None


def write(path: Path, data: Data) -> None:
    """Write a results file in one piece: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)
