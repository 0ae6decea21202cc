"""The command line: exit statuses, refusals, trainers by `_target_`."""

import json
import logging
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssdtrain.tools.cli import main
from ssdtrain.tools.cli.train import FIRST_RANK_S
from ssdtrain.train.ranks import RUN_DIRECTORY
from tests.ssdtrain.tools.cli.conftest import TINY, Refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "offload=sdd"], "did you mean 'ssd'?\nchoices: host, none"),
        (["train", "gnn=foo"], "unknown choice gnn=foo"),
        (["trian"], "unknown command trian; did you mean 'train'?\ncommands: train,"),
        (["model=bert"], "settings stand behind a command: ssdtrain train model=bert"),
        (["train", "data=text"], "set data.files=[book.txt]"),
        (["train", "train.resume=true"], "resume=latest goes on with"),
        (["train", "resume=nothing"], "resume=nothing: no such run"),
        (["train", "train.steps=many"], "train.steps expects an integer, got 'many'"),
        (["train", "train.steps=null"], "train.steps expects a value, got 'null'"),
        (["train", "train.learning_rate=x"], "learning_rate expects a number, got 'x'"),
        (["train", "train.compare=x"], "compare expects true or false, got 'x'"),
        (["train", "train.steps"], "expects key=value such as train.steps=100, got"),
        (["train", "offload=false"], "did you mean 'none'?\nchoices: host, none"),
        (["train", "model=3"], "unknown choice model=3\nchoices: bert, gpt, t5"),
        (["train", "--config", "none.yaml"], "--config expects a YAML file"),
        (
            ["train", "engine=plain", "offload=host", "offload.io_threads=0"],
            "io_threads",
        ),
        (["train", "engine.zero_stage=3"], "set engine.num_stages=0"),
        (["--local_rank=1", "train", "nonsense=1"], "unknown setting nonsense"),
        (["train", "gnn=[rgcn,hgt]"], "gnn expects one choice"),
        (["train", *TINY, "engine.num_ranks=4"], "set engine=deepspeed"),
        (["train", *TINY, "train.learning_rate=-1"], "train.learning_rate expects"),
        (["train", *TINY, "name=a/b"], "name expects a directory's name without '/'"),
        (["train", *TINY, "run_directory=/proc/x"], "run_directory=/proc/x cannot be"),
        (["train", *TINY, "run_directory=/etc/passwd"], "(File exists)"),
        (["plan"], "expects --profile runs/latest/profile.json or --model blocks:4096"),
        (["plan", "--profile=a", "--model=b"], "got --profile and --model"),
        (["rok"], "(hidden size, layers; or FILE.py:FUNCTION), got nothing"),
    ],
)
def test_impossible_input_is_status_2(
    words: list[str], message: str, refused: Refused
) -> None:
    assert message in refused(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("offload: false", "unknown choice offload=false; did you mean 'none'?"),
        ("offload:", "unknown choice offload=null\nchoices: host, none"),
        ("offload: [host, ssd]", "offload expects one choice, or its settings, got"),
    ],
)
def test_a_file_that_chooses_no_name_is_told_what_there_is(
    text: str, message: str, refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "my.yaml").write_text(f"model: bert\n{text}\n")
    assert message in refused("train", "--cfg", "job", "--config", "my.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*TINY, "data.files=[/proc/self/mem]"], "data.files: /proc/self/mem cannot"),
        ([*TINY, "data.cache_directory=/proc/x"], "data.cache_directory=/proc/x"),
        ([*TINY, "size.hidden_size=100000000000"], "set a smaller model"),
        ([*TINY, "model=bert", "model.vocab_size=5"], "model.vocab_size (ids of this"),
        ([*TINY, "model=t5", "train.resume=."], "expects a checkpoint, got none"),
        ([*TINY, "offload.directory=/proc", "offload=ssd"], "offload.directory=/proc"),
        (["gnn=rgcn", "trainer.data.scale=0.02"], "[2, 134]"),
        (["gnn=rgcn", "trainer.data.scale=0.0001"], "set a larger data.scale"),
        (["gnn=rgat", "trainer.data.name=none"], "in ['aifb', 'am'"),
        (["gnn=rgat", "trainer.data.directory=/proc"], "expected one .nt, .nt.gz"),
        (["gnn=hgt", "trainer.model.num_bases=2"], "num_bases=null for hgt"),
        (["gnn=rgcn", "trainer.run.resume=must"], "expected a checkpoint at"),
        (["gnn=rgcn", "trainer.run.device=cuda:99"], "got 'cuda:99'"),
        (["gnn=rgcn", "trainer.run.output_directory=/proc/x"], "output_directory"),
        (["gnn=rgcn", "trainer.batch=2", "trainer.fanouts=[0,0]"], "of at least 1"),
        (["gnn=rgcn", "trainer.model.hidden_channels=a"], "an integer, got 'a'"),
    ],
)
def test_what_cannot_be_prepared_is_told_and_leaves_nothing(
    words: list[str], message: str, refused: Refused, tmp_path: Path
) -> None:
    """Data, models and places are looked at before a file of the run is written."""
    cache = [f"data.cache_directory={tmp_path / 'cache'}"] * (words[0] == TINY[0])
    *_, line = refused("train", "-q", *cache, *words).strip().splitlines()
    assert line.startswith("ssdtrain: ") and message in line
    assert [*(tmp_path / "runs").iterdir()] == []


def test_ranks_of_a_launcher_leave_the_word_to_the_first(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight GPUs said eight times that a name is wrong: a launcher ends the others
    when one has failed, so the others wait for that before they speak."""
    waited: list[float] = []
    clock = SimpleNamespace(sleep=waited.append)
    monkeypatch.setattr("ssdtrain.tools.cli.train.time", clock)
    monkeypatch.setenv("RANK", "0")
    assert "did you mean 'gpt'" in refused("train", "model=gptt")
    assert waited == []
    monkeypatch.setenv("RANK", "1")
    assert "did you mean 'gpt'" in refused("train", "model=gptt")
    assert waited == [FIRST_RANK_S]


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config can name the classes of this file."""
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(**globals()))


class Breaking:
    """A trainer with a mistake of its own."""

    def prepare(self) -> None:
        raise KeyError("oops")

    def run(self) -> None:
        raise AssertionError("never run")


class Terminated(Breaking):
    """A trainer that a scheduler ends while it prepares."""

    def prepare(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("trainers")
def test_a_run_that_is_ended_while_it_prepares_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(["train", "-q", f"trainer._target_={__name__}.Terminated"])
    assert caught.value.code == 128 + signal.SIGTERM
    assert [*(tmp_path / "runs").iterdir()] == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("trainers")
def test_the_traceback_of_a_mistake_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [_self_]\ntrainer:\n  _target_: {__name__}.Breaking\n"
        "run_directory: out\n"
    )
    told = refused("train", "--config", "mine.yaml")
    assert told.startswith("ssdtrain: KeyError: 'oops' (the traceback is in out/error")
    assert "in prepare" in (tmp_path / "out" / "error.txt").read_text()


class CountingTrainer:
    """A trainer that no package knows, as a graph trainer is to this one."""

    def __init__(self, *, epochs: int) -> None:
        self.epochs = epochs

    def run(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "ok": self.epochs > 1}


@pytest.mark.usefixtures("trainers")
@pytest.mark.parametrize(("epochs", "status"), [(1, 1), (2, 0)])
def test_a_group_can_bring_another_trainer(
    epochs: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As `gnn=...` does: a choice in package `trainer` replaces `_target_`."""
    monkeypatch.chdir(tmp_path)
    group = tmp_path / "gnn"
    group.mkdir()
    target = f"{__name__}.CountingTrainer"
    (group / "count.yaml").write_text(
        f"# @package trainer\n_target_: {target}\nepochs: {epochs}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - gnn: count\n  - _self_\nrun_directory: out\n"
    )
    assert main(["train", "--config", "mine.yaml"]) == status
    values = json.loads((tmp_path / "out" / "result.json").read_text())
    assert values == {"epochs": epochs, "ok": epochs > 1}
    assert "written to out" in capsys.readouterr().out


def test_a_plain_run_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *TINY, "train.steps=2", "offload=ssd", "offload.min_bytes=0",
        "offload.trace=true", f"data.cache_directory={tmp_path / 'cache'}",
    ]  # fmt: skip
    assert main(["train", *words]) == 0
    written = {p.name for p in (tmp_path / "runs" / "latest").iterdir()}
    assert written >= {
        "metrics.jsonl",
        "result.json",
        "memory.json",
        "memory.png",
        "trace.json",
    }
    assert "verified: losses equal, weights equal" in capsys.readouterr().out
    # A picture that cannot be drawn costs a line, and not the run.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["train", *words]) == 0
    told = capsys.readouterr().err
    assert "ssdtrain: no memory.png: this needs matplotlib, which is not" in told


class Logging(Breaking):
    """A trainer that has something to say."""

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        logging.getLogger("ssdtrain.test").warning("ssdtrain: kept")


@pytest.mark.usefixtures("trainers")
@pytest.mark.parametrize(("rank", "name"), [("0", "log.txt"), ("1", "log-rank1.txt")])
def test_every_rank_logs_to_a_file(
    rank: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second rank's went to the terminal, into the first one's live line."""
    for key, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(key, value)
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-q", f"trainer._target_={__name__}.Logging"]) == 0
    assert "ssdtrain: kept" in (tmp_path / name).read_text()
    assert "kept" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "words", "advice"),
    [
        (
            "torch.utils.tensorboard",
            (*TINY, "train.tensorboard=true"),
            "install 'ssdtrain[train]', or set train.tensorboard=false",
        ),
        (
            "torch_geometric",
            ("gnn=graphsage",),
            "needs torch_geometric, which is not installed: pip install 'ssdtrain[gnn]",
        ),
    ],
)
def test_what_is_not_installed_is_told(
    package: str,
    words: tuple[str, ...],
    advice: str,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with monkeypatch.context() as missing:
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            missing.delitem(sys.modules, name)
        missing.setitem(sys.modules, package, None)
        told = refused("train", *words)
    assert advice in told
    assert [*(tmp_path / "runs").iterdir()] == []


class Interrupted:
    """A graph trainer that is interrupted behind its first checkpoint."""

    def __init__(self, *, run_directory: str) -> None:
        self.checkpoint = Path(run_directory) / "checkpoint.pt"

    def run(self) -> None:
        self.checkpoint.touch()
        raise KeyboardInterrupt


@pytest.mark.usefixtures("trainers")
def test_an_interrupted_graph_trainer_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [_self_]\ntrainer:\n  _target_: {__name__}.Interrupted\n"
        "  run_directory: ${run_directory}\nrun_directory: out\n"
    )
    assert main(["train", "--config", "mine.yaml"]) == 130
    assert "go on with: ssdtrain train resume=out" in capsys.readouterr().err
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "stopped"


class EndedAtOnce(Interrupted):
    """One that has saved nothing."""

    def __init__(self, *, run_directory: str, run: dict[str, Any]) -> None:
        pass

    def run(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.usefixtures("trainers")
@pytest.mark.parametrize(
    ("every", "told"),
    [
        (0, "without trainer.run.checkpoint_epochs=N nothing is saved; it starts anew"),
        (9, "it ended before its first checkpoint (trainer.run.checkpoint_epochs=9)"),
    ],
)
def test_an_interrupted_run_without_a_checkpoint_says_why(
    every: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`gnn=rgcn` said that it was interrupted, and no more."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [_self_]\ntrainer:\n  _target_: {__name__}.EndedAtOnce\n"
        f"  run: {{checkpoint_epochs: {every}}}\n"
        "  run_directory: ${run_directory}\nrun_directory: out\n"
    )
    assert main(["train", "--config", "mine.yaml"]) == 130
    assert told in capsys.readouterr().err
