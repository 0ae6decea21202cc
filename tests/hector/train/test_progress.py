"""A run says what it is doing before its first epoch, terminal or not."""

import io

import pytest
from rich.console import Console

from hector.runtime.progress import listener
from hector.train import progress as progress_module
from hector.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from hector.train.progress import INTERVAL_S, Progress
from hector.train.trainer import NodeClassificationTrainer


def test_elsewhere_a_line_a_stage_and_one_every_ten_seconds() -> None:
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=False)
    with Progress(2, shown=True, console=console, clock=lambda: now[0]) as progress:
        progress.stage("reading mutag")
        progress.tell("compiling 24 kernels")
        now[0] += INTERVAL_S
        progress.tell("compiled 7 of 24 kernels")
        progress.epoch({"seed": 0, "epoch": 0, "loss": 1.5})
        now[0] += INTERVAL_S
        progress.epoch({"seed": 0, "epoch": 1, "loss": 0.5})
    assert out.getvalue().splitlines() == [
        "hector: reading mutag ...",
        "hector: compiled 7 of 24 kernels ...",
        "hector: seed 0 epoch 1 loss 0.5000 ...",
    ]


def test_on_a_terminal_the_bar_says_it() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Progress(2, shown=True, console=console) as progress:
        progress.stage("reading mutag")
        progress.tell("compiled 7 of 24 kernels")
    assert "compiled 7 of 24 kernels" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_is_quiet(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal)
    with Progress(2, shown=False, console=console) as progress:
        progress.stage("reading mutag")
        progress.epoch({"seed": 0, "epoch": 0, "loss": 1.5})
    assert not out.getvalue().strip()


def test_a_run_tells_what_it_prepares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[object] = []
    step = progress_module.Progress.epoch

    def epoch(self: Progress, row: dict[str, float]) -> None:
        heard.append(listener())
        step(self, row)  # type: ignore[arg-type]

    monkeypatch.setattr(progress_module.Progress, "epoch", epoch)
    nobody = listener()
    NodeClassificationTrainer(
        model=ModelConfig(layer="rgcn", hidden_channels=4),
        data=DataConfig(name="mutag", scale=0.01),
        optimizer=OptimizerConfig(),
        epochs=1,
        run=RunConfig(device="cpu", num_seeds=1),
    ).train()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "hector: reading the graph ...",
        "hector: preparing seed 0 ...",
    ]
    assert heard != [nobody] and listener() is nobody
