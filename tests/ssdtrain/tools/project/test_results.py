"""The recorded comparisons: with llm-analysis, and with a GPU's measurements."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.cases import CaseSet, bert, cases
from ssdtrain.tools.project.layer import saved_bytes
from ssdtrain.tools.project.model import Case, layer_seconds
from ssdtrain.tools.project.tables import GPUS, find

RESULTS = Path(__file__).resolve().parents[4] / "recipes/bench/results/planner"
ASSUME = Assumptions()


def recorded(name: str) -> Any:
    path = RESULTS / name
    if not path.exists():
        pytest.skip(f"{name} is not recorded yet")
    return json.loads(path.read_text())


def test_the_differences_from_llm_analysis_are_explained() -> None:
    rows = recorded("project_peers.json")["cells"]
    both = (*cases(CaseSet.FIGURE_5_10), *cases(CaseSet.TABLE_5_4))
    assert set(rows) == {case.name for case in both}
    for case in both:
        row = rows[case.name]
        ours, theirs = row["ours"], row["theirs"]
        # The record is of this code.
        now = saved_bytes(case.model, case.split())
        assert ours["layer_saved_bytes"] == pytest.approx(now)
        assert ours["layer_seconds"] == pytest.approx(layer_seconds(case, ASSUME))
        assert theirs["layer_flops"] == pytest.approx(ours["layer_flops"])
        assert theirs["parameters"] == pytest.approx(ours["parameters"], rel=0.004)
        assert 1.2 < theirs["layer_saved_bytes"] / now < 1.24
        assert row["adjusted_saved_bytes"] == pytest.approx(now, rel=1e-6)
        ratio = theirs["layer_seconds"] / ours["layer_seconds"]
        assert 0.97 < ratio < 1.0


def test_measured_activations_and_times() -> None:
    record = recorded("project_device.json")
    h200 = find(GPUS, "h200-sxm", "GPU")
    assert record["cells"]
    for cell in record["cells"].values():
        model = replace(bert(cell["hidden"], cell["layers"]), sequence=cell["sequence"])
        case = Case(
            name="device",
            model=model,
            gpu=h200,
            gpus=1,
            batch=cell["batch"],
            micro_batch=cell["batch"],
            tflops=record["matmul_tflops"]["sustained"],
        )
        estimate = model.layers * saved_bytes(model, case.split())
        assert cell["saved_bytes"] == pytest.approx(estimate, rel=0.02)
        forward = 1e3 * model.layers * layer_seconds(case, ASSUME)
        assert forward == pytest.approx(cell["forward_ms"], rel=0.25)
        backward_share = cell["backward_ms"] / cell["forward_ms"]
        assert backward_share == pytest.approx(2.0, rel=0.25)
