"""What a benchmark writes down beside its numbers, and how: JSON, after every cell."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.bench.common.cells import environment


class Record:
    """Cells of one benchmark; the file is complete after every `add`."""

    def __init__(self, path: Path, budget_s: float) -> None:
        self._path = path
        self._start = time.monotonic()
        self._budget_s = budget_s
        self._content: dict[str, Any] = {"environment": environment(), "cells": []}

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget_s - (time.monotonic() - self._start)

    def note(self, name: str, value: Any) -> None:
        """A fact that belongs to the whole run."""
        self._content[name] = value
        self._save()

    def add(self, cell: dict[str, Any]) -> None:
        """A finished cell: printed, and on disk."""
        self._content["cells"].append(cell)
        print(json.dumps(cell), flush=True)
        self._save()

    def cells(self) -> Sequence[dict[str, Any]]:
        """All cells so far."""
        return list(self._content["cells"])

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._content, indent=1)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(self._path)
