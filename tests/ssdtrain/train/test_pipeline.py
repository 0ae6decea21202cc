"""DeepSpeed's pipeline on two real ranks (gloo), started as a user starts them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.cli import main
from ssdtrain.train.launch import free_port
from tests.ranks import LONGEST_S, ROOT
from tests.ssdtrain.cli.stopping import LONG, losses, stopped

pytest.importorskip("deepspeed")

TINY = (
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.num_heads=2",
    "model.sequence_length=16",
    "data.max_bytes=100000",
    "data.cache_directory=cache",
    "train.micro_batch_size=2",
    # As high at a step, however many there are.
    "train.min_learning_rate_ratio=1",
    "train.tensorboard=false",
    "offload.min_bytes=0",
)
TRAIN = (sys.executable, "-m", "ssdtrain", "train")
EVERYTHING = ("offload.window_bytes=16384", "offload.plan=offload-all")


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of a user, in a directory of its own."""
    path = os.pathsep.join(
        [str(ROOT / "launch"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words,
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        executable=shutil.which(words[0], path=path),
    )


def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "runs" / "latest" / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_headline_and_exact_resumes(tmp_path: Path) -> None:
    """`deepspeed --config ssdtrain.yaml model=gpt offload=ssd`, smaller; then without
    its launcher and under the plan that is the default, twice, from a checkpoint."""
    headline = f"deepspeed --master_port {free_port()} --config ssdtrain.yaml model=gpt"
    words = ["offload=ssd", *TINY, *EVERYTHING]
    words += ["train.steps=4", "train.checkpoint_every=2"]
    done = run(tmp_path, *headline.split(), *words)
    assert done.returncode == 0, done.stderr
    found = result(tmp_path)
    assert found["num_ranks"] == 2
    assert found["verdict"] == {
        "losses_equal": True,
        "weights_equal": True,
        "writes_confirmed": True,
    }
    with_ = found["legs"]["with ssdtrain"]
    assert with_["totals"]["bytes_written"] > 0
    without = found["legs"]["without ssdtrain"]
    for less, more in zip(with_["peak_bytes"], without["peak_bytes"], strict=True):
        assert 0 < less < more
    told = "verified: losses equal, weights equal, writes confirmed"
    assert told in done.stdout

    # From the checkpoint of step 2 the last two steps come out as they did; both ranks
    # stop behind the same step.
    checkpoints = (tmp_path / "runs" / "latest" / "checkpoints").resolve()
    (checkpoints / "latest").write_text("step2")
    words = [*TINY, *LONG, f"train.resume={checkpoints}", "name=stopped"]
    code, error, path = stopped(tmp_path, signal.SIGTERM, *words, run="*-stopped")
    assert code == 128 + signal.SIGTERM, error
    told = [one for one in error.splitlines() if one.startswith("ssdtrain")]
    first, line = told
    assert first == "ssdtrain: SIGTERM: finishing the step"
    assert "stopped by SIGTERM" in line and "go on with" in line
    before = losses(path)
    assert [before[2], before[3]] == with_["losses"][2:]
    again = run(tmp_path, *TRAIN, "resume=latest", f"train.steps={max(before) + 2}")
    assert again.returncode == 0, again.stderr
    after = losses(path)
    assert {step: after.pop(step) for step in before} == before
    assert list(after) == [max(before) + 1]


def test_stages_that_do_not_fit_fail_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "engine.num_stages=3", "engine.num_ranks=2"
    assert main(["train", *TINY, *words]) == 2
    error = capsys.readouterr().err
    assert "engine.num_stages=3 must divide the number of ranks, got 2" in error
