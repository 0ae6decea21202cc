"""The benchmark of stock models: its rows, and all of its paths on a tiny model."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from recipes.bench.harness.cli import run as bench
from recipes.bench.models import real_build, real_models, real_row
from recipes.bench.models.real_catalogue import (
    COLUMNS,
    Mode,
    Row,
    Tuned,
    catalogue,
    row_of,
    settings_of,
)
from recipes.bench.models.stock import shape_of
from recipes.bench.models.tables import real_entry
from tests.ranks import own_server

CELL = "tiny/full/32/eager"
EXPERTS = "tiny-moe/full/32/eager"


@pytest.fixture(autouse=True, scope="module")
def server() -> Iterator[None]:
    """The one that ranks of other tests come from imports transformers for each row."""
    with own_server():
        yield


def test_a_rows_name_says_all_of_it() -> None:
    rows = list(catalogue())
    assert len({row.name for row in rows}) == len(rows)
    assert [row_of(row.name) for row in rows] == rows
    assert {row.column for row in rows} >= set(COLUMNS)
    fewer = row_of("qwen3-4b:24/lora/32k/compiled/ours target=ssd")
    assert fewer == Row(
        "qwen3-4b:24", Tuned.LORA, "32k", Mode.LAYERS, "ours target=ssd"
    )
    assert shape_of(fewer.model).depth == 24 and fewer.is_ours
    assert fewer.baseline == "qwen3-4b:24/lora/32k/compiled/keep"


@pytest.mark.parametrize(
    "name",
    [
        "gpt-5/full/8k/eager/keep",
        "tiny:x/full/8k/eager/keep",
        "tiny/half/8k/eager/keep",
        "tiny/full/8q/eager/keep",
        "tiny/full/8k/lazy/keep",
        "tiny/full/8k/eager/theirs",
        "tiny/full/8k/eager/ours budget=0.4",
        "tiny/full/8k",
    ],
)
def test_a_row_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"expects|is not a valid"):
        row_of(name)


def test_a_column_of_ours_is_its_settings() -> None:
    assert settings_of("ours") == {}
    assert settings_of("ours memory_budget_bytes=12e9 max_overhead=0.1 plan=auto") == {
        "memory_budget_bytes": 12_000_000_000,
        "max_overhead": 0.1,
        "plan": "auto",
    }


def test_a_relative_budget_is_taken_from_another_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep, ours = f"{CELL}/keep", f"{CELL}/ours budget=0.5keep"
    assert settings_of(row_of(ours).column) == {}
    told = {keep: {"peak_gb": 4.0, "step_ms": 2.0}, ours: {"step_ms": 3.0}}
    runs: list[real_row.Run] = []

    def measured(row: Row, run: real_row.Run, *_: Any) -> dict[str, Any]:
        runs.append(run)
        return {"peak_gb": 2.0, **told[row.name]}

    monkeypatch.setattr(real_models, "in_process", measured)
    out = tmp_path / "out.json"
    words = ["models.real_models", "--device", "cpu", "--out", str(out), "--rows"]
    assert bench([*words, ours, keep]) == 0
    assert "needs the row" in capsys.readouterr().out
    assert bench([*words, ours]) == 0
    assert [run.budget_bytes for run in runs] == [None, 2_000_000_000]
    cell = json.loads(out.read_text())["cells"][ours]
    assert (cell["step_ratio"], cell["peak_gone"]) == (1.5, 0.5)


def test_steps_are_timed_when_the_warm_up_has_taken_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session that settles late costs the row its limit no more."""
    now = itertools.count().__next__
    monkeypatch.setattr(real_row.time, "perf_counter", lambda: float(now()))
    late = SimpleNamespace(is_settled=False)
    trainer: Any = SimpleNamespace(step=lambda num: num)
    least = real_row.LEAST_WARM_UP_STEPS
    assert len(real_row.warmed(trainer, 8, late, 7.0)) == least + 7
    assert len(real_row.warmed(trainer, 8, late)) == real_row.MOST_WARM_UP_STEPS
    assert len(real_row.warmed(trainer, 8, None)) == least


def test_all_ranks_time_the_same_steps() -> None:
    """A rank that is told of plans settles before the one that searches, and would
    leave it alone in a collective."""
    told = [True] * 7 + [False]
    asked: list[bool] = []

    def first(wanted: bool) -> bool:
        asked.append(wanted)
        return told[len(asked) - 1]

    settled = SimpleNamespace(is_settled=True)
    trainer: Any = SimpleNamespace(step=lambda num: num)
    steps = real_row.warmed(trainer, 8, settled, goes_on=first)
    assert len(steps) == 7
    least = real_row.LEAST_WARM_UP_STEPS
    assert asked == [True] * least + [False] * (8 - least)
    assert real_row.as_the_first(row_of(f"{CELL}/keep")) is bool


def test_rows_on_a_mesh(tmp_path: Path) -> None:
    """Two ranks that settle at other times come to the same end."""
    out = tmp_path / "sharded.json"
    rows = [f"tiny/full/32/tp/{column}" for column in ("keep", "ours max_overhead=0.1")]
    words = ["models.real_models", "--device", "cpu"]
    words += ["--steps", "2"]
    assert bench([*words, "--out", str(out), "--rows", *rows]) == 0
    found = json.loads(out.read_text())["cells"]
    assert not [cell["error"] for cell in found.values() if "error" in cell]
    plain, ours = (found[row] for row in rows)
    shared = min(len(plain["losses"]), len(ours["losses"]))
    assert ours["losses"][:shared] == plain["losses"][:shared]
    assert ours["report"]["bytes_parameters"] > 0
    assert all(row_of(name).mode.has_mesh for name in rows)
    assert not row_of(f"{CELL}/keep").mode.has_mesh


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two runs of the command into one file."""
    out = tmp_path_factory.mktemp("real") / "real.json"
    words = ["models.real_models", "--device", "cpu", "--steps", "2"]
    words += ["--out", str(out), "--rows"]
    columns = ("keep", "gc", "gc every 2nd", "selective", "ours max_overhead=0.1")
    own = [f"{CELL}/{column}" for column in columns]
    own += [f"{EXPERTS}/{column}" for column in ("keep", columns[-1])]
    assert bench([*words, *own[:2], "tiny/lora/32/eager/keep"]) == 0
    written = json.loads(out.read_text())["cells"]
    assert bench([*words, *own]) == 0
    found: dict[str, Any] = json.loads(out.read_text())["cells"]
    assert found[own[0]]["steps_ms"] == written[own[0]]["steps_ms"]  # not run again
    return found


def test_every_column_trains_alike(cells: dict[str, Any]) -> None:
    assert not [name for name, cell in cells.items() if "error" in cell]
    for place in (CELL, EXPERTS):
        plain = cells[f"{place}/keep"]["losses"]
        assert len(set(plain)) > 3
        for name, cell in cells.items():
            if name.startswith(f"{place}/"):
                shared = min(len(plain), len(cell["losses"]))
                assert cell["losses"][:shared] == plain[:shared], name


def test_a_mixture_of_experts_is_one() -> None:
    """12 layers of 2048, 32 experts of which a token has 8, chosen at random."""
    shape = shape_of("moe")
    config = shape.config(32)
    assert (config.hidden_size, shape.depth) == (2048, 12)
    assert (config.num_experts, config.num_experts_per_tok) == (32, 8)
    model = real_build.build(row_of(f"{EXPERTS}/keep"), torch.device("cpu"), 32)
    x = torch.randn(512, 64, dtype=torch.bfloat16)
    for layer in model.model.layers:
        *_, chosen = layer.mlp.gate(x)
        counts = torch.bincount(chosen.flatten(), minlength=8)
        assert counts.min() > 512 * 2 / 8 / 4


def test_a_row_says_what_it_cost_and_what_was_predicted(cells: dict[str, Any]) -> None:
    plain, ours = cells[f"{CELL}/keep"], cells[f"{CELL}/ours max_overhead=0.1"]
    assert ours["predicted_ms"] > 0 and ours["report"]["num_records"] > 10
    assert ours["step_ratio"] == pytest.approx(ours["step_ms"] / plain["step_ms"])


def test_what_takes_too_long_or_fails_is_a_result(tmp_path: Path) -> None:
    row = row_of(f"{CELL}/keep")
    late = real_models.in_process(row, real_row.Run(device="cpu"), 0.0)
    assert late == {"error": "took too long"}
    other = replace(row, model="none")
    found = real_models.in_process(other, real_row.Run(device="cpu"), 60)
    assert "expects one of" in found["error"] and found["traceback"]


def test_a_peer_must_not_see_ssdtrain() -> None:
    import ssdtrain  # noqa: F401

    with pytest.raises(RuntimeError, match="imported ssdtrain"):
        real_row.measure(row_of(f"{CELL}/keep"), real_row.Run(1, device="cpu"))


def test_a_row_says_that_its_plan_was_not_settled() -> None:
    cell = {"step_ms": 200.0, "step_ratio": 1.25, "peak_gb": 3.0, "settled": False}
    assert real_entry(cell) == "1.250x, 3.0 GB, plan not settled"
    assert real_entry({**cell, "settled": True}) == "1.250x, 3.0 GB"
    assert real_entry({**cell, "settled": None}) == "1.250x, 3.0 GB"
