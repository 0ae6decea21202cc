"""Runs that cannot go on, and what is said of them."""

import signal
from pathlib import Path
from shutil import copytree

import pytest
import torch

from ssdtrain.tools.cli import main
from ssdtrain.tools.cli.train import compose
from ssdtrain.train.runs import CHECKPOINT, FINISHED, RunDirectory
from ssdtrain.train.stop import Stop
from tests.ssdtrain.tools.cli.conftest import TINY, Refused


def made_run(
    name: str, words: list[str], *, checkpoint: str = "", status: str = FINISHED
) -> Path:
    """A run's directory as a run leaves it, without training."""
    path = Path("runs") / name
    path.mkdir(parents=True)
    directory = RunDirectory(path, resumed=False)
    directory.open(compose("ssdtrain.yaml", words), ["train", *words])
    directory.close(status)
    if checkpoint:
        (path / checkpoint).mkdir()
    return path


def test_a_run_that_ended_before_its_first_checkpoint(refused: Refused) -> None:
    """Not told to set what it had set."""
    made_run("1-gpt", [*TINY, "train.checkpoint_every=10"], status="stopped")
    told = refused("train", "resume=1-gpt")
    assert "it ended before its first (train.checkpoint_every=10)" in told
    made_run("2-gpt", [*TINY], status="stopped")
    told = refused("train", "resume=2-gpt")
    assert "a run writes them with train.checkpoint_every=N" in told


def test_latest_may_be_of_another_trainer(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says which run it is, and names those with a checkpoint."""
    language = made_run("1-gpt", [*TINY, "train.steps=6"], checkpoint="checkpoints")
    graph = made_run("2-rgcn", ["gnn=rgcn"])
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    which = f"(resume=latest is {graph}; of another trainer: {language})"
    told = refused("train", "resume=latest")
    assert "is finished and has no checkpoint to go on from" in told and which in told
    assert "a run writes them with trainer.run.checkpoint_epochs=N" in told
    told = refused("train", "resume=latest", "train.steps=8")
    assert "gnn=rgcn does not read train.steps=8" in told and which in told
    told = refused("train", f"resume={graph.name}")  # that one was meant
    assert "resume=latest" not in told
    torch.save({}, graph / CHECKPOINT)
    assert main(["train", "resume=latest"]) == 0
    told = capsys.readouterr().err
    assert "nothing to do; to train longer: ssdtrain train resume=runs/2-rgcn " in told
    assert f"trainer.epochs=100; of another trainer: {language}" in told
    assert {p: p.read_bytes() for p in before} == before


def test_runs_of_another_trainer_are_not_among_those_with_a_checkpoint(
    refused: Refused,
) -> None:
    made_run("1-rgcn", ["gnn=rgcn"])
    torch.save({}, Path("runs/1-rgcn") / CHECKPOINT)
    language = made_run("2-bert", [*TINY, "model=bert"], checkpoint="checkpoints")
    made_run("3-gpt", TINY)
    told = refused("train", "resume=latest")
    assert f"checkpoint: {language}; of another trainer: runs/1-rgcn)" in told


def test_a_run_that_does_not_exist(refused: Refused) -> None:
    for words in (("train", "resume=latest"), ("report", "latest")):
        told = refused(*words)  # as in another directory than the one that trained
        assert f"no such run, nor any other below {Path('runs').resolve()}" in told
        assert "`ssdtrain train` makes one there" in told
    made_run("1-gpt", [*TINY])
    told = "no such run; there are below runs: 1-gpt; did you mean 'latest'?"
    assert told in refused("train", "resume=latst")
    for number in range(2, 8):
        copytree("runs/1-gpt", f"runs/{number}-gpt")
    told = "runs: 7-gpt, 6-gpt, 5-gpt, 4-gpt, 3-gpt and 2 more"
    assert told in refused("train", "resume=nothing")  # and no name is cut
    assert "did you mean 'latest'?" in refused("report", "latst")


@pytest.mark.parametrize(
    ("every", "told"),
    [
        (0, "without train.checkpoint_every=N no step is saved; it starts anew"),
        (1, "steps without ssdtrain are not saved; it starts anew"),
    ],
)
def test_a_run_stopped_before_a_checkpoint_says_why_there_is_none(
    every: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of two compared runs the first one is without ssdtrain."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Stop, "agreed", lambda self, ranks: signal.SIGINT)
    words = [f"train.checkpoint_every={every}", f"data.cache_directory={tmp_path}"]
    assert main(["train", "-q", *TINY, *words]) == 128 + signal.SIGINT
    error = capsys.readouterr().err
    assert f"stopped by SIGINT after step 1, without ssdtrain; {told}" in error
