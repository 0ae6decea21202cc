"""Settings of a cell are measured in turns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_geometric")

from recipes.bench.harness.cli import run as bench
from recipes.bench.rgnn import turns as rgnn_turns
from recipes.bench.rgnn.turns import times_in_turns
from tests.recipes.test_rgnn_bench import few_steps

__all__ = ["few_steps"]

CPU = torch.device("cpu")
ARGS = (
    "--device cpu --scale 0.0001 --phases ablation --only mag/rgcn/* --budget-s 600 "
    "--limit-s 300"
).split()


def run(out: Path, *words: str) -> list[dict[str, Any]]:
    assert bench(["rgnn.layers", *ARGS, "--out", str(out), *words]) == 0
    return list(json.loads(out.read_text())["cells"].values())


def test_each_takes_a_few_steps_and_the_order_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rgnn_turns, "NUM_ROUNDS", 3)
    monkeypatch.setattr(rgnn_turns, "STEPS_A_ROUND", 2)
    seen: list[str] = []
    found = times_in_turns([lambda: seen.append("a"), lambda: seen.append("b")], CPU)
    assert "".join(seen) == "aabb" + "bbaa" + "aabb"
    assert [len(times) for times in found] == [6, 6]


def test_fast_settings_are_timed_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rgnn_turns, "FAST_MS", 1e9)
    monkeypatch.setattr(rgnn_turns, "NUM_ROUNDS", 2)
    monkeypatch.setattr(rgnn_turns, "STEPS_A_ROUND", 2)
    together: list[int] = []

    def times(steps: Any, device: torch.device) -> list[list[float]]:
        together.append(len(steps))
        return times_in_turns(steps, device)

    monkeypatch.setattr(rgnn_turns, "times_in_turns", times)
    records = run(tmp_path / "r.json")
    assert together == [4, 4] and len(records) == 8
    for r in records:
        assert r["status"] == "ok" and r["num_timed"] == 2 * 2
        assert r["ms_least"] <= r["ms"] <= r["ms_most"]
        assert {"setting", "first_ms", "took_s", "peak_bytes"} <= set(r)
    # Taken again, they are again taken together; what is there stays.
    again = run(tmp_path / "r.json", "--again", "*/hector-none/*", "*/hector-both/*")
    assert together == [4, 4, 2, 2]
    kept = [r for r in again if "compaction" in r["key"]["contender"]]
    assert all(r in records for r in kept) and len(again) == 8


def test_slow_settings_are_timed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rgnn_turns, "FAST_MS", 0.0)
    monkeypatch.setattr(rgnn_turns, "times_in_turns", lambda *_: pytest.fail())
    assert {r["status"] for r in run(tmp_path / "r.json")} == {"ok"}


def test_without_time_the_first_times_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rgnn_turns, "FAST_MS", 1e9)

    def slow(*_: object) -> None:
        raise rgnn_turns.OutOfTimeError

    monkeypatch.setattr(rgnn_turns, "times_in_turns", slow)
    records = run(tmp_path / "r.json")
    assert len(records) == 8 and all("ms" in r for r in records)
