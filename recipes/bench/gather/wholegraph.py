#!/usr/bin/env python
"""pylibwholegraph's gather from CPU memory, for comparison with `gather.sweep`.

    python -m recipes.bench.gather.wholegraph --budget-s 30

Needs pylibwholegraph-cu13 (with libwholegraph-cu13, rmm-cu13, librmm-cu13 and
rapids-logger; it imports without the rest of its dependencies). One process, memory
type "continuous", location "cpu"; random rows of float32. Without the package the
record says so.
"""

import functools
import statistics
import time
from typing import Any

import torch

from recipes.bench.common.cells import Cells, arguments
from recipes.bench.gather.timing import (
    DEVICE,
    check_rows,
    dma_peak_gbps,
    indices,
    once_ms,
)

GIB = 1 << 30
ROWS = (128, 512, 2052, 256, 4096)
BATCHES = (1_000_000, 200_000, 50_000)


class WholeGraph:
    """One process's communicator, and tables in its CPU memory."""

    def __init__(self) -> None:
        import pylibwholegraph
        import pylibwholegraph.torch as library

        self.version = pylibwholegraph.__version__
        self._library = library
        self._comm, _ = library.init_torch_env_and_create_wm_comm(0, 1, 0, 1)

    def table(self, row_bytes: int, num_bytes: int) -> tuple[Any, torch.Tensor]:
        """A table, and its rows as a CPU tensor."""
        sizes = [num_bytes // row_bytes, row_bytes // 4]
        made = self._library.create_wholememory_tensor(
            self._comm, "continuous", "cpu", sizes, torch.float32, None
        )
        rows, _ = made.get_local_tensor(host_view=True)
        block = torch.rand(1 << 16, sizes[1])
        for start in range(0, sizes[0], len(block)):
            part = rows[start : start + len(block)]
            part.copy_(block[: len(part)] + start)
        return made, rows

    def drop(self, table: Any) -> None:
        self._library.destroy_wholememory_tensor(table)


def measure(table: Any, rows: torch.Tensor, batch: int, peak: float) -> dict[str, Any]:
    """Median of five runs on fresh indices; the rows are checked."""
    sets = indices(batch, len(rows), 5)
    out = table.gather(sets[0])
    times = []
    for index in sets:
        times.append(once_ms(functools.partial(table.gather, index)))
    check_rows(rows, sets[0], out)
    took = statistics.median(times)
    gb_s = out.nbytes / took / 1e6
    return {"ms": round(took, 4), "share": round(gb_s / peak, 4)}


def main() -> None:
    parser = arguments(__doc__, 30.0, "gather/gather_wholegraph")
    parser.add_argument("--table-gib", type=int, default=4)
    given = parser.parse_args()
    cells = Cells(given.out, given.budget_s, {"table_gib": given.table_gib})
    deadline = time.monotonic() + given.budget_s
    found: list[WholeGraph] = []

    def load() -> dict[str, Any]:
        found.append(WholeGraph())
        return {"version": found[0].version}

    cells.data["cells"].pop("library", None)
    cells.run("library", load)
    if not found or DEVICE == "cpu":
        return
    peak = dma_peak_gbps()
    for row_bytes in ROWS:
        if time.monotonic() + 6 > deadline:
            break
        table, rows = found[0].table(row_bytes, given.table_gib * GIB)
        for batch in BATCHES:
            cells.run(
                f"{batch}/{row_bytes}",
                functools.partial(measure, table, rows, batch, peak),
            )
        del rows
        found[0].drop(table)


if __name__ == "__main__":
    main()
