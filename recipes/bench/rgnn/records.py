"""What `rgnn.layers` recorded, by graph, model, task and contender; what the cost model
took, against the fixed settings measured in turns with it."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

MODELS = ("rgcn", "rgat", "hgt")
TASKS = ("inference", "training")
DTYPES = ("float32", "bfloat16")
PARTS = ("graph", "model", "task", "dtype")
"""Of a cell."""

SETTINGS = ("none", "compaction", "reordering", "both")
SETTING_NAMES = {
    "none": "none",
    "compact": "compaction",
    "reorder": "reordering",
    "compact+reorder": "both",
}
"""Contenders by the setting that a record names."""

Record = dict[str, Any]
Named = tuple[str, dict[str, str]]


class Records:
    """The records, found by their key; only those of one machine are compared."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.graphs: dict[str, dict[str, Any]] = data["graphs"]
        self.runs = data["runs"]
        self.modelled: dict[str, str] = data.get("modelled", {})
        """What the present cost model takes, by cell where that is another setting."""
        self.by_key = {
            tuple(sorted(r["key"].items())): r for r in data["cells"].values()
        }

    def find(self, contender: str, **cell: Any) -> Record | None:
        key = {"width": 64, "what": "time", **cell, "contender": contender}
        return self.by_key.get(tuple(sorted(key.items())))

    def ms(self, contender: str, **cell: Any) -> float | None:
        record = self.find(contender, **cell)
        return record.get("ms") if record else None

    def contenders(self, **cell: Any) -> list[Record]:
        """All but ours in a cell, on the machine of ours; out of memory on any."""
        ours = self.find("hector", **cell)
        wanted = {"width": 64, "what": "time", **cell}
        return [
            r
            for r in self.by_key.values()
            if all(r["key"][k] == v for k, v in wanted.items())
            and not r["key"]["contender"].startswith("hector")
            and (ours is None or r["status"] == "oom" or self.same(r, ours))
        ]

    def same(self, one: Record, other: Record) -> bool:
        return self.machine(one) == self.machine(other)

    def machine(self, record: Record) -> str:
        run = self.runs[record["run"]]
        return str(run.get("uuid", run["device"]))


class Comparison(NamedTuple):
    """Ours against the fastest other in one cell."""

    ours: Record | None
    best: Record | None
    num_oom: int
    """Others that ran out of memory."""

    @property
    def speedup(self) -> float | None:
        if not (self.ours and self.best and "ms" in self.ours):
            return None
        return float(self.best["ms"] / self.ours["ms"])


def compare(records: Records, **cell: Any) -> Comparison:
    others = records.contenders(**cell)
    timed = [r for r in others if r["status"] == "ok"]
    best = min(timed, key=lambda r: r["ms"], default=None)
    num_oom = sum(r["status"] == "oom" for r in others)
    return Comparison(records.find("hector", **cell), best, num_oom)


def used_mib(record: Record | None) -> float | None:
    if not record or not record.get("peak_bytes"):
        return None
    return float(record["peak_bytes"] - (record["resident_bytes"] or 0)) / 2**20


def cells(records: Records, dtypes: tuple[str, ...] = DTYPES) -> list[Named]:
    """(text, cell) of every cell of 64 channels."""
    parts = itertools.product(records.graphs, MODELS, TASKS, dtypes)
    found = (dict(zip(PARTS, own, strict=True)) for own in parts)
    return [(cell_name(cell), cell) for cell in found]


def geometric_mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.geometric_mean(found) if found else math.nan


def cell_name(cell: Mapping[str, Any]) -> str:
    """Such as `fb15k rgcn inference float32`."""
    return " ".join(cell[part] for part in PARTS)


def taken(results: Records, **cell: str) -> dict[str, Any]:
    """The record of the fixed setting that the cost model took, where there is one;
    the one under the model's own name was taken minutes earlier, and a host that bounds
    a step drifts more in minutes than settings differ."""
    chosen = results.find("hector", **cell) or {}
    setting = results.modelled.get(cell_name(cell), chosen.get("setting", ""))
    name = SETTING_NAMES.get(setting)
    return (results.find(f"hector-{name}", **cell) if name else None) or chosen


def over_best(results: Records, **cell: str) -> float | None:
    """Time of the setting taken over the best one's, of one machine."""
    mine = taken(results, **cell)
    if "ms" not in mine:
        return None
    found = [results.find(f"hector-{s}", **cell) or {} for s in SETTINGS]
    known = [r["ms"] for r in found if "ms" in r and results.same(r, mine)]
    return float(mine["ms"] / min(known)) if len(known) > 1 else None
