"""The results file of `rgnn.layers`: read once, rewritten after every measurement."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from recipes.bench.harness import records as files
from recipes.bench.harness.cells import environment
from recipes.bench.rgnn.cells import Contender, Phase, Work
from recipes.bench.rgnn.measure import FAST_MS

SETTING_OF = {
    Contender.HECTOR_NONE: "none",
    Contender.HECTOR_COMPACTION: "compact",
    Contender.HECTOR_REORDERING: "reorder",
    Contender.HECTOR_BOTH: "compact+reorder",
}
NAMED_BY = ("graph", "model", "task", "dtype", "width", "contender", "what")
"""Parts of a key that make the name of its cell."""


class Results:
    """Records by key; see `rgnn.layers`."""

    def __init__(
        self, path: Path, earlier: Path | None, *, keep_failed: bool = False
    ) -> None:
        self.path = path
        source = earlier or path
        self.data: files.Data = files.find(source) or {
            "environment": {},
            "settings": {},
            "runs": [],
            "graphs": {},
            "cells": {},
        }
        # What failed is tried again; what ran out of memory or time is not.
        self.by_key: dict[str, dict[str, Any]] = {
            name: record
            for name, record in self.data["cells"].items()
            if keep_failed or record["status"] != "failed"
        }
        self.data["cells"] = self.by_key

    @staticmethod
    def _text(key: dict[str, Any]) -> str:
        return "/".join(str(key[part]) for part in NAMED_BY)

    def start_run(self, about: dict[str, Any]) -> int:
        self.data["environment"] = environment()
        self.data["runs"].append(about)
        return len(self.data["runs"]) - 1

    def forget(
        self,
        contenders: list[str],
        uuid: str,
        dtypes: Collection[str] = ("float32",),
    ) -> None:
        """Take these contenders' cells of these dtypes again: times, kernels, profiles.

        On another device than before also the best other of each such cell: only
        records of one device are compared. A new record replaces the old one.
        """
        for text, record in list(self.by_key.items()):
            key = record["key"]
            mine = key["contender"] in contenders and key["dtype"] in dtypes
            if not mine or key["width"] != 64 or text not in self.by_key:
                continue
            del self.by_key[text]
            if key["what"] != "time":
                continue
            if self.data["runs"][record["run"]].get("uuid") == uuid:
                continue
            best = self._best_other(key)
            if best is not None:
                del self.by_key[self._text(best["key"])]

    def _best_other(self, key: dict[str, Any]) -> dict[str, Any] | None:
        others = (
            self.by_key.get(self._text({**key, "contender": c.value}))
            for c in Contender
            if not c.ours
        )
        timed = [r for r in others if r and "ms" in r]
        return min(timed, key=lambda r: r["ms"], default=None)

    def has(self, work: Work) -> bool:
        return self._text(work.key()) in self.by_key

    def find(self, work: Work, contender: Contender) -> dict[str, Any] | None:
        """What a contender did in the cell of `work`."""
        return self.by_key.get(self._text({**work.key(), "contender": contender.value}))

    def best_other_ms(self, work: Work) -> float | None:
        """The best time of a baseline in the cell of `work` so far."""
        best = self._best_other(work.key())
        return None if best is None else float(best["ms"])

    def same_setting(self, work: Work, run: int) -> dict[str, Any] | None:
        """The record of a fixed setting that the cost model chose anyway. Not of a fast
        step: the host bounds it, a host drifts by half in minutes, and the settings are
        compared with one another."""
        if work.phase is not Phase.ABLATION:
            return None
        chosen = self.find(work, Contender.HECTOR)
        if chosen is None or chosen.get("setting") != SETTING_OF[work.contender]:
            return None
        if chosen.get("ms", FAST_MS) < FAST_MS:
            return None
        runs = self.data["runs"]
        if runs[chosen["run"]].get("uuid") != runs[run].get("uuid"):
            return None
        same = {k: v for k, v in chosen.items() if k not in ("key", "run")}
        return {**same, "taken_from": Contender.HECTOR.value}

    def add(self, work: Work, run: int, values: dict[str, Any]) -> None:
        record = {"key": work.key(), "run": run, **values}
        name = self._text(work.key())
        self.by_key.pop(name, None)  # the newest is last
        self.by_key[name] = record
        self.write()

    def write(self) -> None:
        files.write(self.path, self.data)
