"""What starts a layout with `ssdtrain train`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.plan.plan import PLAN_FILE
from ssdtrain.tools.cli import main
from ssdtrain.tools.foresight.device import DeviceCosts, load_device
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.search.launch import configurations
from ssdtrain.tools.search.own_trainer import plan_of, settings_of
from ssdtrain.tools.search.parallel_layout import Job, ParallelLayout

JOB = Job(layers=3, hidden=128, tokens=256, batch=8, gpus=1, heads=4, words=512)
OURS = "ssdtrain 5"


def layout(**more: Any) -> ParallelLayout:
    plain = {"data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "sequences": 4}
    return ParallelLayout(**{**plain, "way": OURS, **more})


def on_cpu() -> DeviceCosts:
    """What prices operators that a CPU runs."""
    device = load_device("h100")
    return replace(device, spec=replace(device.spec, kind=Kind.CPU))


def test_a_winner_trains_by_its_plan_from_the_first_step(tmp_path: Path) -> None:
    """The files are taken as they are, and what they name is what happens."""
    path, run = tmp_path / "plan.json", tmp_path / "run"
    plan = plan_of(layout(), JOB, on_cpu())
    assert plan is not None
    PLAN_FILE.write(path, plan)
    text = configurations(layout(), JOB, plan=path)["ssdtrain train"]
    (tmp_path / "train.yaml").write_text(text)
    words = ["train", "--config", str(tmp_path / "train.yaml"), "--quiet"]
    more = ["train.steps=2", "train.compare=false", f"run_directory={run}"]
    more.append(f"data.files=[{__file__}]")
    assert main([*words, *more]) == 0
    [leg] = json.loads((run / "result.json").read_text())["legs"].values()
    lanes = 2 * layout().micro_batches(JOB.batch)
    planned = plan.bytes_by_placement()
    assert planned["offload"] > 0
    assert leg["totals"]["bytes_offloaded"] == lanes * planned["offload"]
    assert leg["totals"]["bytes_kept"] == lanes * planned["keep"]
    assert leg["fallbacks"] == {}


def test_engines() -> None:
    def engine(**more: Any) -> dict[str, Any]:
        found = settings_of(layout(**more), JOB, drives=False)
        assert found is not None
        return {**found["engine"], **found.get("parallel", {})}

    assert engine() == {"kind": "plain"}
    zero = engine(data=4, zero=3)
    assert (zero["num_ranks"], zero["num_stages"], zero["zero_stage"]) == (4, 0, 3)
    assert engine(data=2, pipeline=2, zero=1)["num_stages"] == 2
    mixed = engine(tensor=2, pipeline=2, chunks=2, divided=True, way="selective")
    assert mixed["kind"] == "megatron" and mixed["num_ranks"] == 4
    assert (mixed["virtual_pipeline"], mixed["recompute"]) == (2, "selective")
    for more in ({"context": 2}, {"tensor": 2, "zero": 3}, {"way": "selective"}):
        assert settings_of(layout(**more), JOB, drives=False) is None


def test_activations() -> None:
    def offload(drives: bool = False, **more: Any) -> Any:
        found = settings_of(layout(**more), JOB, drives=drives)
        assert found is not None
        return found["offload"]

    assert offload(way="plain") == offload(way="checkpointing") == "none"
    fit = {"device_memory": "fit", "max_overhead": None}
    assert offload() == {"target": "host", **fit}
    assert offload(drives=True) == {"target": "tiered", **fit}
    own = settings_of(layout(way="checkpointing"), JOB, drives=False)
    assert own is not None and own["model"]["checkpointing"] == "non-reentrant"


@pytest.mark.parametrize(
    "more", [{"pipeline": 2}, {"tensor": 2}, {"zero": 3, "data": 2}, {"way": "plain"}]
)
def test_where_one_file_cannot_say_it(more: dict[str, Any]) -> None:
    assert plan_of(layout(**more), JOB, on_cpu()) is None
    assert plan_of(layout(), JOB, on_cpu(), drives=True) is None
