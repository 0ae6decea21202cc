"""Cells that the ranks of `megatron.core` run together, and what ends them."""

import datetime
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recipes.bench.harness.cells import Cells
from recipes.bench.megatron.cells import GPU

PATIENCE = datetime.timedelta(seconds=25)
"""What a rank waits for the other; pinning memory may take one of them seconds more."""
CELL_S = 45.0
"""No cell may take longer."""
LEAST_S = 6
"""No cell is begun with less time than this."""
HUNG = 14


@dataclass(frozen=True)
class Options:
    """What `core` tells its ranks.

    until: seconds since the epoch
    command: to write down
    """

    until: float
    out: Path
    only: tuple[str, ...] = ()
    command: str = ""


class Shared:
    """Cells that all ranks run together; the first rank keeps the file."""

    def __init__(self, options: Options) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._only = options.only
        self._cells: Cells | None = None
        self._begun = options.out.with_suffix(".begun")
        self._words = [
            options.out.with_suffix(f".rank{n}") for n in range(dist.get_world_size())
        ]
        self._until = options.until
        if self.rank == 0:
            settings = {"batch": 16, "sequence": 1024, "dtype": "bf16", "tiny": not GPU}
            self._cells = Cells(options.out, options.until - time.time(), settings)
            self._cells.data["environment"]["command"] = options.command
            self._leave_out_the_fatal()

    def _leave_out_the_fatal(self) -> None:
        """A cell that was begun and never ended killed a rank, or hung."""
        if self._cells is None or not self._begun.exists():
            return
        name = self._begun.read_text()
        if name and name not in self._cells:
            said = [path.read_text() for path in self._words if path.exists()]
            error = " | ".join(said) or "a rank died in it"
            self._cells.data["cells"][name] = {"error": error}
            self._cells.save()

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def wanted(self, names: list[str]) -> list[str]:
        """Which of these are to be run, as the first rank sees it."""
        late = time.time() > self._until - LEAST_S
        mine = [
            name
            for name in names
            if self._cells is not None
            and name not in self._cells
            and not late
            and (not self._only or any(fnmatchcase(name, p) for p in self._only))
        ]
        return self.gather(mine)[0]  # type: ignore[no-any-return]

    def _hung(self) -> None:
        """End this rank, from another thread: its own may be inside the driver."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        where = " ".join(traceback.format_stack(frame)[-3:])
        text = f"rank {self.rank}: longer than {CELL_S} s, at {where}"
        self._words[self.rank].write_text(text[-1500:])
        os._exit(HUNG)

    def _result(self, cell: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """One cell; an error is a result, and is on disk before the peer is told."""
        try:
            return cell()
        except Exception:
            text = f"rank {self.rank}: {traceback.format_exc()[-1200:]}"
        self._words[self.rank].write_text(text)
        return {"error": text}

    def run(self, name: str, cell: Callable[[], dict[str, Any]]) -> None:
        """Run one cell on all ranks. Where only one of them fails, the gathering
        times out, all end, and the next start records it."""
        if not self.wanted([name]):
            return
        for path in self._words:
            path.unlink(missing_ok=True)
        if self.rank == 0:
            self._begun.write_text(name)
        start = time.monotonic()
        watchdog = threading.Timer(CELL_S, self._hung)
        watchdog.daemon = True
        watchdog.start()
        found = self.gather(self._result(cell))
        watchdog.cancel()
        errors = [one["error"] for one in found if "error" in one]
        merged = {"error": " | ".join(errors)} if errors else merge(found)
        merged["cell_s"] = round(time.monotonic() - start, 2)
        if self._cells is not None:
            self._cells.data["cells"][name] = merged
            self._cells.save()
            self._begun.write_text("")
            print(name, json.dumps(merged)[:1500], flush=True)

    def get(self, name: str) -> dict[str, Any]:
        """A result, on the first rank; empty elsewhere or when missing."""
        cells = {} if self._cells is None else self._cells.data["cells"]
        return cells.get(name, {})  # type: ignore[no-any-return]


def merge(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One result from all ranks: the slowest time, all peaks, equal if all are."""
    merged: dict[str, Any] = {}
    for name, value in found[0].items():
        values = [one.get(name) for one in found]
        if isinstance(value, bool):
            merged[name] = all(values)
        elif name.endswith("_ms"):
            merged[name] = max(values)
        else:
            merged[name] = values
    return merged
