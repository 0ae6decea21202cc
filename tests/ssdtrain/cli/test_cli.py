"""The command line: frozen options, exit statuses, trainers by `_target_`."""

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import ssdtrain
from ssdtrain.cli import COMMANDS, build_parser, main
from ssdtrain.cli.sweep import table_of

ROOT = Path(__file__).resolve().parents[3]

SUBJECT = {
    "--device",
    "--links",
    "--max-overhead",
    "--memory-gb-per-s",
    "--micro-batch",
    "--min-bytes",
    "--model",
    "--no-gpu",
    "--sequence",
    "--target",
    "--tflops",
}

# Adding an option is a decision: it is written down here.
OPTIONS = {
    "train": {
        "--cfg",
        "--config",
        "--json",
        "--multirun",
        "--quiet",
        "-m",
        "-q",
        "overrides",
    },
    "paths": {"which"},
    "report": {"--out", "runs"},
    "foresight": {
        "action",
        "--calibrated",
        "--chunks",
        "--device",
        "--fabric",
        "--family",
        "--json",
        "--micro-batch",
        "--micro-batches",
        "--model",
        "--on",
        "--optimizer",
        "--ranks",
        "--save",
        "--seconds",
        "--seed",
        "--sequence",
        "--slower",
        "--spread",
        "--tables",
        "--times",
    },
    "plan": SUBJECT
    | {
        "--batch",
        "--json",
        "--device-memory",
        "--memory-budget",
        "--profile",
        "--save",
        "--save-profile",
        "--stages",
        "--sweep",
    },
    "rok": SUBJECT | {"--batches", "--json", "--plot", "--results"},
    "doctor": {
        "--directory",
        "--json",
        "--max-seconds",
        "--max-write-bytes",
        "--no-measure",
        "--plot",
        "--save",
    },
    "project": {
        "--assume",
        "--batch",
        "--cases",
        "--chunks",
        "--cost",
        "--end-to-end",
        "--gpu",
        "--gpu-price",
        "--gpus",
        "--heads",
        "--hidden",
        "--json",
        "--kernels",
        "--layers",
        "--list",
        "--micro-batch",
        "--model",
        "--pipeline",
        "--plot",
        "--sequence",
        "--sequence-parallel",
        "--ssd",
        "--ssds",
        "--tensor",
        "--tflops",
        "--years",
        "--zero3",
    },
}


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [action] = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            yield from action.option_strings or [action.dest]


def test_options_are_frozen() -> None:
    parser = build_parser()
    assert set(options(parser)) == {"--local_rank", "--version"}
    found = commands(parser)
    assert set(found) == set(COMMANDS) == set(OPTIONS)
    for name, expected in OPTIONS.items():
        assert set(options(found[name])) == expected


def test_help_and_version_need_no_torch() -> None:
    """Torch takes seconds to load; the first words come before it."""
    code = (
        "import sys\n"
        "from ssdtrain.cli import main, parse\n"
        "assert main(['--version']) == 0\n"
        "assert parse(['train', '-q', 'a=1', '--json', 'b=2']).overrides == "
        "['a=1', 'b=2']\n"
        "assert 'torch' not in sys.modules\n"
        "main(['train', '--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert f"ssdtrain {ssdtrain.__version__}" in done.stdout
    assert "--config" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "offload=sdd"], "did you mean 'ssd'?\nchoices: host, none"),
        (["train", "gnn=foo"], "Could not find 'gnn/foo'"),
        (["train", "data=text"], "set data.files=[book.txt]"),
        (["train", "train.resume=true"], "resume=latest goes on with"),
        (["train", "resume=nothing"], "resume=nothing: no such run"),
        (["train", "train.steps=many"], "could not be converted to Integer"),
        (["train", "--config", "none.yaml"], "--config expects a YAML file"),
        (
            ["train", "engine=plain", "offload=host", "offload.io_threads=0"],
            "io_threads",
        ),
        (["train", "engine.zero_stage=3"], "set engine.num_stages=0"),
        (["--local_rank=1", "train", "nonsense=1"], "Could not override 'nonsense'"),
    ],
)
def test_impossible_input_is_status_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("words", [[], ["fly"], ["train", "--steps", "3"]])
def test_unknown_words_are_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


class CountingTrainer:
    """A trainer that no package knows, as a graph trainer is to this one."""

    def __init__(self, *, epochs: int) -> None:
        self.epochs = epochs

    def run(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "ok": self.epochs > 1}


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
    here = SimpleNamespace(CountingTrainer=CountingTrainer)
    monkeypatch.setitem(sys.modules, __name__, here)
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
        "engine=plain", "offload.min_bytes=0", "offload.trace=true", "train.steps=2",
        "size.hidden_size=32", "size.num_layers=2", "size.num_heads=2",
        "size.sequence_length=16", "data.max_bytes=50000", "train.tensorboard=false",
        f"data.cache_directory={tmp_path / 'cache'}",
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


def test_a_sweeps_table_tells_its_runs_apart_on_a_narrow_terminal() -> None:
    words = "offload=host,model=gpt"
    found = [{"overrides": words, "status": 0, "last_loss": 4.4, "step_ms": 3837.9}]
    out = io.StringIO()
    Console(file=out, width=40).print(table_of(found))
    rows = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    cells = [line.split("│")[1].strip() for line in rows]
    assert "".join(cells) == words
