"""Named results in one JSON file, written after every cell; a rerun goes on."""

import contextlib
import gc
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from recipes.bench.harness import records
from recipes.bench.harness.processes import TOO_LONG

NOT_ENDED = "was not ended"
"""Error of a cell whose process was ended while it ran; it is run again."""
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
    # Here: processes that measure others' ways must not have loaded ssdtrain.
    from ssdtrain.versions import installed

    cuda = torch.cuda.is_available()
    cpus = f"{os.cpu_count()} CPU cores"
    return {
        "device": torch.cuda.get_device_name() if cuda else cpus,
        "num_devices": torch.cuda.device_count() if cuda else 0,
        "num_cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(["python -m recipes.bench", *sys.argv[1:]]),
    }


class Cells:
    """Cells of one file."""

    def __init__(
        self,
        path: Path,
        budget_s: float,
        settings: dict[str, Any] | None = None,
        *,
        only: tuple[str, ...] = (),
        again: tuple[str, ...] = (),
    ) -> None:
        """Read what is there.

        Args:
            only: patterns of names; other cells are not run.
            again: patterns of names; earlier cells of these are forgotten.
        """
        settings = settings or {}
        self.path = path
        self.only = only
        self._deadline = time.monotonic() + budget_s
        self._lock = threading.Lock()
        self.data: dict[str, Any] = {
            "environment": environment(),
            "settings": settings,
            "cells": {},
        }
        if path.exists():
            before = records.read(path)
            if before["settings"] == records.public(settings):
                cells = {
                    name: cell
                    for name, cell in before["cells"].items()
                    if cell.get("error") != NOT_ENDED and not matches(name, again)
                }
                self.data = {**before, **self.data, "cells": cells}

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._deadline - time.monotonic()

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.data["cells"][name]  # type: ignore[no-any-return]

    def __contains__(self, name: str) -> bool:
        return name in self.data["cells"]

    def is_wanted(self, name: str) -> bool:
        """Whether the cell is to be run, is not there yet, and there is time."""
        asked = not self.only or matches(name, self.only)
        return asked and name not in self and self.left_s() > 0

    def run(
        self,
        name: str,
        cell: Callable[..., dict[str, Any]],
        *arguments: Any,
        limit_s: float | None = None,
    ) -> None:
        """Run `cell(*arguments)` if it is wanted; an error is a result.

        Between cells the device's cache is emptied.
        """
        if not self.is_wanted(name):
            return
        start = time.monotonic()
        if sys.stderr.isatty():
            print(f"{name}: {self.left_s():.0f} s left ...", file=sys.stderr)
        error: dict[str, Any] = {}
        result: dict[str, Any] = {}
        try:
            with limited(limit_s):
                result = cell(*arguments)
        except torch.OutOfMemoryError:
            error = {"error": "out of memory"}
        except Exception as caught:
            text = f"{type(caught).__name__}: {caught}"[:500]
            if isinstance(caught, TimeoutError) and self.left_s() <= 0:
                text = NOT_ENDED  # by the end of this run, not by its own limit
            where = traceback.format_exc().splitlines()[-12:]
            error = {"error": text, "traceback": where}
        if result.get("error") == TOO_LONG and self.left_s() <= 0:
            error = {"error": NOT_ENDED}
        result = {**result, **error}
        gc.collect()  # the frames of a failure hold the model
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            with contextlib.suppress(RuntimeError):  # a broken device shows below
                torch.cuda.empty_cache()
        result["cell_s"] = round(time.monotonic() - start, 2)
        self.record(name, result)

    def record(self, name: str, result: dict[str, Any]) -> None:
        """Write and print a cell that was measured elsewhere, by any thread."""
        with self._lock:
            self.data["cells"][name] = result
            self.save()
            print(name, json.dumps(result), flush=True)

    def revise(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change cells that are there, in any thread."""
        with self._lock:
            change(self.data["cells"])
            self.save()

    def fact(self, name: str, value: Any) -> None:
        """Write what belongs to the whole run."""
        self.data[name] = value
        self.save()

    def save(self) -> None:
        """Write the file in one piece."""
        records.write(self.path, self.data)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns fits."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextlib.contextmanager
def limited(
    limit_s: float | None, error: type[BaseException] = TimeoutError
) -> Iterator[None]:
    """Raise the error in the main thread when the time is over."""

    def over(*_: object) -> None:
        raise error(f"took more than {limit_s} s")

    if limit_s is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
