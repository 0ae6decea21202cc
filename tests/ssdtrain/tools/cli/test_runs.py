"""Runs on disk, resuming, signals and sweeps."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ssdtrain.tools.cli import main
from ssdtrain.train import launch
from tests.ranks import LONGEST_S, server
from tests.ssdtrain.tools.cli.conftest import ROOT, TINY

LONG = ("train.steps=100000", "train.compare=false", "train.checkpoint_every=50000")


class Done(NamedTuple):
    """What a command in this process left."""

    returncode: int
    stdout: str
    stderr: str


Train = Callable[..., Done]


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Train:
    """`ssdtrain train` in a directory of its own; importing torch takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*words: str) -> Done:
        capfd.readouterr()
        cache = [f"data.cache_directory={tmp_path / 'cache'}"] * (TINY[0] in words)
        code = main(["train", *words, *cache])  # `resume` repeats it
        return Done(code, *capfd.readouterr())

    return run


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def metrics(run: Path) -> list[dict[str, Any]]:
    text = (run / "metrics.jsonl").read_text()
    whole, _, _ = text.rpartition("\n")  # behind it one may just be written
    return [json.loads(line) for line in whole.splitlines()]


def losses(run: Path) -> dict[int, float]:
    with_ = [v for v in metrics(run) if v["leg"] == "with ssdtrain"]
    return {v["step"]: v["loss"] for v in with_}


def stopped(
    directory: Path, signum: int, *words: str, run: str = "latest"
) -> tuple[int, str, Path]:
    """Start a long run, and signal it once a step of the run with ssdtrain is over.

    run: a pattern of its directory below `runs`.
    """
    log = directory / "log"
    process = server().Process(target=_trains, args=(words, dict(os.environ), log))
    process.start()
    deadline = time.monotonic() + LONGEST_S
    path = directory / "runs" / run
    try:
        while time.monotonic() < deadline and process.exitcode is None:
            path = next((directory / "runs").glob(run), path)
            if (path / "metrics.jsonl").exists() and len(losses(path)) > 1:
                break
            time.sleep(0.1)
        assert process.pid is not None
        os.kill(process.pid, signum)
        process.join(LONGEST_S)
    finally:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode, log.read_text(), path


def _trains(words: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
    """`ssdtrain train` in a fork of a process that has imported torch; it starts
    processes of its own as ever. Prints to `log`, in whose directory it runs."""
    os.environ.clear()
    os.environ.update(environment, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)  # OpenMP has read the server's environment
    os.chdir(log.parent)
    out = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(out, 2)
    os.setsid()
    sys.exit(main(["train", *words]))


def test_a_signal_ends_the_step_and_the_run_goes_on(
    tmp_path: Path, train: Train
) -> None:
    code, error, path = stopped(tmp_path, signal.SIGINT, *TINY, *LONG)
    assert code == 128 + signal.SIGINT
    first, line = (one for one in error.splitlines() if one.startswith("ssdtrain"))
    assert first == "ssdtrain: SIGINT: finishing the step, again ends it at once"
    run = path.resolve()
    assert "stopped by SIGINT after step" in line
    assert f"go on with: ssdtrain train resume=runs/{run.name}" in line
    assert "Traceback" not in error
    assert record(path)["status"] == "stopped"
    assert not (path / "result.json").exists()
    before = losses(path)
    # Other settings are refused with their names, and nothing is written.
    state = sorted((p.name, p.stat().st_mtime_ns) for p in run.iterdir())
    refused = train("resume=latest", "size.num_layers=3", "train.seed=7")
    assert refused.returncode == 2
    assert "model.num_layers: 2 in the run, 3 now" in refused.stderr
    assert "train.seed: 0 in the run, 7 now" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert sorted((p.name, p.stat().st_mtime_ns) for p in run.iterdir()) == state
    # The rest is what a run without the signal does, in the same directory.
    done = train(f"resume={run.name}", f"train.steps={len(before) + 2}")
    assert done.returncode == 0, done.stderr
    after = losses(path)
    assert len(after) == len(before) + 2
    assert {step: after[step] for step in before} == before
    assert record(path)["status"] == "finished" and record(path)["resumed"]
    assert [one["status"] for one in record(path)["earlier"]] == ["stopped"]


def files(run: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()
    }


def test_a_run_that_went_on_has_the_result_of_all_its_steps(
    tmp_path: Path, train: Train
) -> None:
    """Its figures, its plan and its length; and what is finished is left alone."""
    words = ("offload.min_bytes=1000", "train.checkpoint_every=2", "-q")
    assert train(*TINY, *words, "train.steps=3").returncode == 0
    run = (tmp_path / "runs" / "latest").resolve()
    first = json.loads((run / "result.json").read_text())
    again = train("resume=latest", "-q", "train.steps=5")
    assert again.returncode == 0, again.stderr
    result = json.loads((run / "result.json").read_text())
    assert (result["first_step"], result["last_step"]) == (1, 5)
    assert result["picture"]["step"] == 5 and "5 steps" in again.stdout
    for leg, before in first["legs"].items():
        after, lines = result["legs"][leg], metrics(run)
        own = [line for line in lines if line["leg"] == leg]
        assert [line["step"] for line in own] == [0, 1, 2, 3, 4]  # none of them twice
        assert after["losses"] == [line["loss"] for line in own]
        assert after["losses"][:3] == before["losses"]
        assert after["peak_bytes"] == [max(line["peak_bytes"] for line in own)]
        for name, total in after["totals"].items():
            assert total == pytest.approx(sum(line[name] for line in own))
    assert result["ok"] and result["legs"]["with ssdtrain"]["totals"]["bytes_saved"] > 0
    ratio = result["step_ratio"]
    told = result["why_no_ratio"] if ratio is None else f"with it, x {ratio:.3f}"
    assert told and told in result["step_explained"]

    before = files(run)
    for words in ((), ("train.steps=4",)):
        finished = train("resume=latest", *words)
        assert finished.returncode == 0
        assert "is finished (train.steps=5), nothing to do; to" in finished.stderr
        assert f"ssdtrain train resume=runs/{run.name} train.steps=10" in (
            finished.stderr
        )
        assert files(run) == before


def test_what_a_run_leaves(tmp_path: Path, train: Train) -> None:
    """Two runs, two directories; the link; refusals that leave nothing."""
    first = train(*TINY, "train.steps=2", "--json")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)  # and nothing else
    path = tmp_path / "runs" / "latest"
    one = path.resolve()
    assert result == json.loads((path / "result.json").read_text())
    names = {p.name for p in path.iterdir()}
    assert names >= {"config.yaml", "run.json", "log.txt", "metrics.jsonl"}
    page = (ROOT / "docs" / "runs.md").read_text()
    for name in names | {"activations", "tensorboard", "report.html", "error.txt"}:
        assert f"`{name}" in page, name
    assert "num_layers: 2" in (path / "config.yaml").read_text()
    found = record(path)
    assert found["status"] == "finished" and found["versions"]["torch"]
    assert found["command"][:2] == ["ssdtrain", "train"]

    second = train(*TINY, "train.steps=2", "--quiet", "name=mine")
    assert second.returncode == 0, second.stderr
    assert "step 1/2" not in second.stdout and "verified" in second.stdout
    assert path.resolve() != one and path.resolve().name.endswith("-mine")
    assert (one / "result.json").exists()

    for words, told in (
        (["resume=latest"], "has no checkpoint to go on from"),
        (["resume=none"], f"there are below runs: {path.resolve().name}"),
        ([f"run_directory={one}"], "holds a run already"),
        (["offload.target=ssd", "offload.directory=/nonexistent/x"], "does not exist"),
        (["trainer._target_=nowhere.Trainer"], "needs nowhere, which is not installed"),
    ):
        refused = train(*TINY, *words)
        assert refused.returncode == 2, words
        assert told in refused.stderr and "Traceback" not in refused.stderr
    assert not Path("/nonexistent").exists()


def test_graph_trainers_go_on_too(tmp_path: Path, train: Train) -> None:
    """Their keys exist in their own group alone, which `resume` brings along."""
    some = ("trainer.run.checkpoint_epochs=1", "trainer.data.scale=0.1", "-q")
    first = train("gnn=rgcn", *some, "trainer.epochs=2")
    assert first.returncode == 0, first.stderr
    path = (tmp_path / "runs" / "latest").resolve()
    assert path.name.endswith("-rgcn")
    for word, differs in (
        ("trainer.model.hidden_channels=3", "hidden_channels: 16 in the run, 3 now"),
        ("gnn=hgt", "trainer.model.layer: rgcn in the run, hgt now"),
    ):
        other = train("resume=latest", word)
        assert other.returncode == 2 and differs in other.stderr
    again = train("resume=latest", "-q")
    assert again.returncode == 0, again.stderr
    epochs = [line["epoch"] for line in metrics(path) if "epoch" in line]
    assert epochs == [0, 1]  # nothing was trained twice
    assert main(["report", "latest"]) == 0


SMALL_GRAPH = ("gnn=rgcn", "trainer.data.scale=0.05", "trainer.data.num_labelled=20")


@pytest.mark.parametrize(
    ("words", "checkpoint"),
    [
        (
            (*TINY, "train.steps=1", "train.compare=false", "train.checkpoint_every=1"),
            "checkpoints/checkpoint.pt",
        ),
        (
            (*SMALL_GRAPH, "trainer.epochs=1", "trainer.run.checkpoint_epochs=1"),
            "checkpoint.pt",
        ),
    ],
    ids=["gpt", "rgcn"],
)
def test_a_resume_that_fails_writes_nothing(
    words: tuple[str, ...], checkpoint: str, tmp_path: Path, train: Train
) -> None:
    """Neither the metrics nor the record of the run that is there."""
    assert train("-q", *words).returncode == 0
    run = (tmp_path / "runs" / "latest").resolve()
    whole = (run / checkpoint).read_bytes()
    (run / checkpoint).write_bytes(whole[: len(whole) // 2])
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"finished"', '"stopped"'))

    def state() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}

    before = state()
    assert before[run / "metrics.jsonl"]
    again = train(
        "-q", "resume=latest", *(["train.steps=2"] if words[0] in TINY else [])
    )
    assert again.returncode == 2
    assert "checkpoint" in again.stderr and "Traceback" not in again.stderr
    assert state() == before


def test_a_sweep_compares_its_runs(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs are in this process; the next test has them in their own."""
    monkeypatch.setattr(launch, "run_in_order", lambda words, stdout: main(words))
    one = ("train.steps=1", "train.compare=false", "-q")
    done = train("-m", *TINY, "offload=host,none", *one)
    assert done.returncode == 0, done.stderr
    [sweep] = (tmp_path / "runs").glob("*-sweep")
    found = json.loads((sweep / "sweep.json").read_text())
    assert [one["overrides"] for one in found] == ["offload=host", "offload=none"]
    assert found[0]["last_loss"] == found[1]["last_loss"]
    assert found[0]["peak_bytes"] < found[1]["peak_bytes"]
    assert {p.name for p in sweep.iterdir()} == {"0", "1", "sweep.json"}
    assert "offload=none" in done.stdout
    assert f"in pictures: ssdtrain report runs/{sweep.name}\n" in done.stdout


def test_a_sweep_that_is_stopped_waits_for_its_run(tmp_path: Path) -> None:
    """It killed the run a quarter of a second later, without a checkpoint."""
    words = ("-m", *TINY, "train.seed=0,1", *LONG)
    code, error, path = stopped(tmp_path, signal.SIGTERM, *words, run="*-sweep/0")
    assert code == 128 + signal.SIGTERM
    first, line, last = (o for o in error.splitlines() if o.startswith("ssdtrain"))
    assert first.startswith("ssdtrain: SIGTERM: finishing the step")
    run = path.relative_to(tmp_path)
    assert "stopped by SIGTERM" in line and f"ssdtrain train resume={run}" in line
    assert last == (
        f"ssdtrain: 0 of 2 runs of the sweep have ended; they are in {run.parent}"
    )
    assert record(path)["status"] == "stopped"
    assert (path / "checkpoints").is_dir()


def test_the_config_is_shown_and_nothing_runs(tmp_path: Path, train: Train) -> None:
    done = train("--cfg", "job", "model=bert")
    assert done.returncode == 0
    assert "family: bert" in done.stdout and not (tmp_path / "runs").exists()
