"""A plain run and its twin: equal losses, fewer bytes, and a resume that is exact."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.tools.report.table import result_rows
from ssdtrain.train import trainer
from ssdtrain.train.comparison import COPIES, WORKED, Comparison, compare
from ssdtrain.train.settings import RunSettings
from ssdtrain.train.tally import StepTally, Tally
from ssdtrain.train.trainer import Trainer
from tests.ssdtrain.written import written_before_backward

Make = Callable[..., RunSettings]
# A window of a few tensors: the whole tiny model would fit into the default one.
ALL = {"min_bytes": 0, "plan": "offload-all", "window_bytes": 16384}


def losses(result: dict[str, Any], leg: str = "without ssdtrain") -> tuple[float, ...]:
    return tuple(result["legs"][leg]["losses"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast", "fp16"])
@pytest.mark.parametrize("how", ["none", "reentrant", "non-reentrant"])
def test_losses_are_equal_and_bytes_moved(
    tiny: Make, tmp_path: Path, precision: str, how: str
) -> None:
    settings = tiny(
        model={"checkpointing": how},
        train={"precision": precision},
        offload={
            "max_overhead": 0.01,
            "target": "ssd",
            "directory": str(tmp_path / "ssd"),
            **ALL,
        },
    )
    with written_before_backward():
        result = Trainer(settings).run()
    legs = result["legs"]
    assert result["verdict"] == {
        "losses_equal": True,
        "weights_equal": True,
        "writes_confirmed": True,
    }
    assert result["ok"]
    assert legs["with ssdtrain"]["totals"]["bytes_offloaded"] > 0
    assert len(set(losses(result))) == 3  # it does train
    if how == "none":
        peaks = [legs[name]["peak_bytes"][0] for name in legs]
        assert peaks[1] < peaks[0]


def test_metrics_are_one_json_line_a_step(
    tiny: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(tiny(offload={"max_overhead": 0.01, "target": "host", **ALL})).run()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    legs = ["without ssdtrain", "with ssdtrain"]
    assert [(v["leg"], v["step"]) for v in values] == [
        (leg, step) for leg in legs for step in range(3)
    ]
    assert values[0]["loss"] == values[3]["loss"]
    assert values[-1]["bytes_offloaded"] > 0
    out = capsys.readouterr().out  # before a first step, which may take minutes
    assert all(f"ssdtrain: {leg}: step 1/3, " in out for leg in legs)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"plan": "keep-all", "min_bytes": 0}, "plan='keep-all' moves nothing"),
        ({"plan": "keep-all"}, "plan='keep-all' moves nothing"),
        ({}, "everything was below min_bytes=1048576 (1.05 MB)"),
        ({"plan": "offload-all"}, "everything was below min_bytes=1048576"),
    ],
)
def test_an_ssd_target_that_writes_nothing_says_why(
    tiny: Make, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    directory = str(tmp_path / "ssd")
    offload = {
        "max_overhead": 0.01,
        "target": "ssd",
        "directory": directory,
        **settings,
    }
    result = Trainer(tiny(offload=offload)).run()
    assert result["ok"] and "writes_confirmed" not in result["verdict"]
    assert result["why_nothing_left"].startswith(why)
    table = {row.name: row for row in result_rows(result)}
    assert table["offloaded"].with_ == "0 B"
    assert table["offloaded"].note.startswith(why)
    if "min_bytes" in settings:
        assert table["written to SSD"].note == "nothing was offloaded"


def test_a_slower_step_is_explained_by_its_parts(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real steps, all of whose tensors go to a disk. The thread does not work while it
    is queued; it may be queued behind a wait for a copy."""
    seen: list[Tally] = []

    def comparing(without: Any, with_: Any, *, on_cpu: bool) -> Comparison:
        seen.extend([*without, *with_])
        return compare(without, with_, on_cpu=True)

    monkeypatch.setattr(trainer, "compare", comparing)
    model = {"hidden_size": 64, "num_layers": 4, "sequence_length": 64}
    offload = {"target": "ssd", "directory": str(tmp_path / "ssd"), **ALL}
    settings = tiny(model=model, train={"steps": 6}, offload=offload)
    result = Trainer(settings).run()
    for tally in seen:
        for step in tally.steps:
            told_ms = step.worked_ms + (step.queued_ms or 0.0)
            assert told_ms <= 1.05 * step.step_ms + 2.0, step
            assert step.stall_ms <= step.step_ms
    assert any(step.stall_ms for step in seen[1].steps)
    assert set(result["step_parts_ms"]) >= {WORKED, COPIES}
    if result["step_ratio"] is None:
        assert "not compared" in result["step_explained"]
    elif result["step_share_explained"] is not None:
        assert " explains " in result["step_explained"]


@pytest.mark.parametrize("name", ["drive{local_rank}/me", "drive{rank}"])
def test_a_drive_of_the_rank_is_found(tiny: Make, tmp_path: Path, name: str) -> None:
    (tmp_path / "drive0").mkdir()
    offload = {
        "max_overhead": 0.01,
        "target": "ssd",
        "directory": str(tmp_path / name),
        **ALL,
    }
    with written_before_backward():
        result = Trainer(tiny(train={"steps": 1}, offload=offload)).run()
    assert result["verdict"]["writes_confirmed"]
    assert [p.name for p in tmp_path.iterdir() if "drive" in p.name] == ["drive0"]


def test_a_missing_drive_is_not_made_up(tiny: Make, tmp_path: Path) -> None:
    """The rank works in host memory, is counted, and is no success."""
    name = str(tmp_path / "drive{rank}" / "me")
    offload = {"max_overhead": 0.01, "target": "ssd", "directory": name, **ALL}
    result = Trainer(tiny(train={"steps": 1}, offload=offload)).run()
    assert not result["verdict"]["writes_confirmed"]
    assert "wrote nothing to it" in result["why_failed"]["writes_confirmed"]
    assert result["legs"]["with ssdtrain"]["totals"]["bytes_offloaded"] > 0
    assert not list(tmp_path.glob("drive*"))


def test_a_missing_directory_is_refused_as_offload_does(
    tiny: Make, tmp_path: Path
) -> None:
    """Before anything trains, and without making it up."""
    import torch

    import ssdtrain

    missing = tmp_path / "ssd"
    settings = tiny(
        offload={
            "max_overhead": 0.01,
            "target": "ssd",
            "directory": str(missing),
            **ALL,
        }
    )
    missing.rmdir()
    text = f"'{missing}' does not exist"
    with pytest.raises(ConfigError, match=text):
        Trainer(settings).run()
    with pytest.raises(ConfigError, match=text):
        ssdtrain.offload(
            torch.nn.Linear(2, 2), max_overhead=0.01, target="ssd", directory=missing
        )
    assert not missing.exists()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resume_is_exact(tiny: Make, tmp_path: Path, precision: str) -> None:
    """Four steps in one go, or stopped after two: the same losses."""
    common = {"steps": 4, "precision": precision}
    whole = Trainer(tiny(train=common)).run()
    Trainer(tiny(train={**common, "checkpoint_every": 2})).run()
    # The last checkpoint is that of step 4; write that of step 2 by stopping there.
    first = tiny(train={**common, "checkpoint_every": 2})
    stopped = _stopped_after(first, 2, tmp_path)
    rest = Trainer(tiny(train={**common, "resume": stopped})).run()
    assert bits_of(*losses(whole)) == bits_of(*losses(rest))


def _stopped_after(settings: RunSettings, step: int, tmp_path: Path) -> str:
    """Interrupt a run when it reaches `step`, as a user's Ctrl-C does."""
    from ssdtrain.train.plain import PlainRunner

    original = PlainRunner.step

    def interrupted(self: PlainRunner, number: int) -> float:
        if number == step:
            raise KeyboardInterrupt
        return original(self, number)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PlainRunner, "step", interrupted)
        Trainer(settings).run()
    return str(tmp_path / "run" / "checkpoints")


def test_resume_without_a_checkpoint_is_refused(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.resume expects"):
        tiny(train={"resume": str(tmp_path / "none")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"train\.resume expects"):
        Trainer(tiny(train={"resume": str(tmp_path / "empty")})).run()


def test_a_finished_run_has_nothing_to_go_on_with(tiny: Make, tmp_path: Path) -> None:
    Trainer(tiny(train={"checkpoint_every": 3})).run()
    done = str(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match=r"set train\.steps above 3"):
        Trainer(tiny(train={"resume": done})).run()


def bits_of(*losses: float) -> tuple[str, ...]:
    steps = (StepTally(loss_hex=x.hex(), step_ms=0, peak_bytes=0) for x in losses)
    return Tally(steps=tuple(steps)).loss_bits


def test_losses_are_compared_by_their_bits() -> None:
    nan = float("nan")
    assert bits_of(1.0, nan) == bits_of(1.0, nan)
    assert bits_of(0.0) != bits_of(-0.0)
    assert bits_of(1.0) != bits_of(1.0, 2.0)


def test_a_signal_collects_no_rank_that_has_ended() -> None:
    """It was `ChildProcessError`, where the last one ended as the signal came."""
    script = """
import os, signal, subprocess
from ssdtrain.train import launch
child = subprocess.Popen(["true"])
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
with launch._handing_on([child]):
    os.kill(os.getpid(), signal.SIGTERM)
    assert launch._wait([child]) == [0]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
