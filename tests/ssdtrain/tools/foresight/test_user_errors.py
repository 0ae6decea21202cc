"""What the command says of users' models: errors teach, predictions say what is not in
them."""

import json
from pathlib import Path

import pytest

from ssdtrain.tools.cli import main

MODULE = """
import torch
from torch import nn

def step(forward):
    def build(batch):
        model, x = nn.Linear(8, 8), torch.randn(batch, 8)
        return model, lambda: forward(model, x)
    return build

fine = step(lambda model, x: model(x).sum())
branch = step(lambda model, x: model(x).sum() if x.sum() > 0 else model(x).mean())
looks = step(lambda model, x: (model(x) / x.max().item()).sum())
masks = step(lambda model, x: model(x)[x > 0].sum())
other_size = step(lambda model, x: model(x[:, :7]).sum())
elsewhere = step(lambda model, x: model(torch.zeros(2, 8, device="cpu")).sum())
fails = step(lambda model, x: {}["hidden"])

def module(batch):
    return nn.Linear(8, 8)

def three(batch):
    return 1, 2, 3

def raises(batch):
    raise KeyError("hidden")

def on_gpu(batch):
    raise AssertionError("Torch not compiled with CUDA enabled")

def bag(batch):
    model = nn.Embedding(9, 8, sparse=True)
    ids = torch.zeros(batch, dtype=torch.long)
    return model, lambda: model(ids).sum()
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "my.py"
    path.write_text(MODULE)
    return path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("looks", ["RuntimeError", "my.py, line 13", "constants", "capture --step"]),
        ("masks", ["my.py, line 14", "boolean masks", "capture --step"]),
        ("other_size", ["sizes differ", "my.py, line 15"]),
        ("elsewhere", ["device=", "my.py, line 16"]),
        ("fails", ["KeyError: 'hidden'", "my.py, line 17"]),
        ("module", ["expects to give (module, forward)", "got Linear"]),
        ("three", ["got int, int, int"]),
        ("raises", ["my.py:raises failed: KeyError: 'hidden'"]),
        ("on_gpu", ["leave out .cuda()"]),
        ("bag", ["sparse=False"]),
    ],
)
def test_errors_of_a_users_model_teach(
    module: Path, capsys: pytest.CaptureFixture[str], name: str, words: list[str]
) -> None:
    assert main(["foresight", "predict", "--model", f"{module}:{name}"]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    # Advice that is not about this error is none.
    assert ("constants" in said) is (name in ("looks", "masks"))


def test_a_prediction_says_what_it_leaves_out(
    module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predict = ["foresight", "predict", "--model"]
    assert main([*predict, f"{module}:branch"]) == 0
    said = capsys.readouterr().out
    assert "Left out: 1 x an answer of the data" in said
    assert "--optimizer adds them" in said
    whole = [*predict, f"{module}:fine", "--optimizer", "adamw"]
    assert main(whole) == 0
    assert "Left out" not in capsys.readouterr().out
    assert main([*predict, f"{module}:branch", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert len(values["left_out"]) == 1 and values["has_update"] is False
    graph = tmp_path / "graph.json"
    capture_it = ["foresight", "capture", "--model", f"{module}:branch"]
    assert main([*capture_it, "--save", str(graph)]) == 0
    assert main(["foresight", "predict", "--graph", str(graph)]) == 0
    assert "an answer of the data" in capsys.readouterr().out


def test_options_that_do_not_go_together_or_name_nothing(
    module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, model = str(tmp_path / "graph.json"), ["--model", f"{module}:fine"]
    assert main(["foresight", "capture", *model, "--save", graph]) == 0
    for given, words in (
        (["predict", *model, "--graph", graph], "give one of them"),
        (["predict", *model, "--ranks", "2", "--fabric", "no"], "--fabric expects"),
        (
            ["capture", "--step", f"{module}:fine", "--save", graph],
            "my.py:fine failed: TypeError",
        ),
        (
            ["capture", "--step", f"{module}:step", "--save", graph],
            "my.py:step failed: TypeError",
        ),
    ):
        assert main(["foresight", *given]) == 2
        assert words in capsys.readouterr().err
