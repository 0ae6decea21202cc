"""A trainer that writes down which libraries its process has loaded."""

import os
from pathlib import Path


class Mapped:
    """Runs as `num_ranks` ranks, 0: in this process."""

    def __init__(self, out: str, num_ranks: int = 0) -> None:
        self._out, self._num_ranks = Path(out), num_ranks

    def ranks_to_start(self) -> int:
        return 0 if "RANK" in os.environ else self._num_ranks

    def run(self) -> dict[str, bool]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        found = {line.split()[-1] for line in maps if "malloc_hook" in line}
        rank = os.environ.get("RANK", "alone")
        (self._out / f"rank-{rank}").write_text("\n".join(sorted(found)))
        return {"ok": True}
