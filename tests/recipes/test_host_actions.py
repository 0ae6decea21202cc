"""Host time by what becomes of a tensor (recipes/bench/offload/host_actions.py)."""

import json
from collections import Counter
from pathlib import Path

import pytest

from recipes.bench.harness.cli import run as bench
from recipes.bench.offload import host_actions, tables

ROWS = {
    "one a layer": Counter({"KeptRow": 90, "ParameterRow": 8, "HostRow": 2}),
    "all moved": Counter({"KeptRow": 10, "ParameterRow": 8, "HostRow": 82}),
    "rebuilt": Counter({"KeptRow": 40, "RecordRow": 8, "HostRow": 2, "RebuiltRow": 50}),
}


def test_three_plans_tell_three_figures() -> None:
    each = {"kept_us": 5.0, "moved_us": 40.0, "rebuilt_us": 100.0}
    over_us = {
        name: 40.0 * rows["HostRow"]
        + 100.0 * rows["RebuiltRow"]
        + 5.0 * (rows["KeptRow"] + rows["ParameterRow"] + rows["RecordRow"])
        for name, rows in ROWS.items()
    }
    assert host_actions.solved(over_us, ROWS) == pytest.approx(each)


@pytest.mark.parametrize("name", ["all moved", "rebuilt"])
def test_a_plan_that_did_nothing_is_refused(name: str) -> None:
    rows = {**ROWS, name: ROWS["one a layer"]}
    with pytest.raises(LookupError, match=name):
        host_actions.solved(dict.fromkeys(ROWS, 1.0), rows)


def test_a_tiny_model_runs_all_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_actions, "ROUNDS", 2)
    out = tmp_path / "host_actions.json"
    row = "tiny/full/16/eager/ours"
    words = ["--row", row, "--device", "cpu", "--steps", "1", "--budget-s", "200"]
    bench(["offload.host_actions", *words, "--out", str(out)])
    data = json.loads(out.read_text())
    cell = data["cells"][row]
    assert "error" not in cell, cell
    assert {"kept_us", "moved_us", "rebuilt_us", *host_actions.PLANS} <= cell.keys()
    assert cell["rows"]["all moved"]["HostRow"] > cell["rows"]["one a layer"]["HostRow"]
    assert cell["bare"]["num_moved"] >= cell["rows"]["all moved"]["HostRow"]
    assert "tiny/full/16/eager" in tables.host_actions(data)
