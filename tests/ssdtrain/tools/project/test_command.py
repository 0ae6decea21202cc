"""`ssdtrain project` end to end."""

import json
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.tools.cli import main


def run(*arguments: str) -> int:
    return main(["project", *arguments])


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_figure_5_10_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    plain = printed(capsys)
    assert len(plain["rows"]) == 12
    assert plain["assumptions"]["rated_write_amplification"] == 2.5
    first = plain["rows"][0]
    assert first["found"]["case"]["sharding"] == "zero3"
    assert first["drives"]["lifespan_years"] > 3
    assert first["cost"] is None


def test_a_system_of_your_own_with_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "gpt-175b", "--gpu", "h200-sxm", "--gpus", "384"]
    arguments += ["--tensor", "8", "--pipeline", "12", "--batch", "1536"]
    arguments += ["--cost", "--gpu-price", "32000", "--ssd", "d7-p5810"]
    (row,) = printed(capsys, *arguments)["rows"]
    assert row["found"]["case"]["gpu"]["price_usd"] == 32000
    assert row["bubble_fraction"] == pytest.approx(11 / (384 + 11))
    assert row["cost"]["share"] < 1
    assert {need["ssd"]["name"] for need in row["needs"]} >= {"fl6", "980-pro"}
    sizes = ["--hidden", "8192", "--layers", "64", "--gpus", "64", "--batch", "512"]
    (own,) = printed(capsys, *sizes, "--tensor", "8", "--zero3")["rows"]
    assert own["found"]["case"]["model"]["heads"] == 64
    assert own["found"]["case"]["sharding"] == "zero3"


def test_tables_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "figure.png"
    assert run("--cost", "--plot", str(plot)) == 0
    text = capsys.readouterr().out
    assert "lifespan" in text and "Cost for each GPU over 3 years" in text
    assert run("--ssd", "980-pro") == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    lives = [row[7].strip() for row in rows if len(row) > 7]
    assert len(lives) == 12 and not any(float(life) == 0 for life in lives)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert run("--list") == 0
    text = capsys.readouterr().out
    assert "d7-p5620" in text and "retention_factor" in text
    assert {"gpus", "ssds"} <= printed(capsys, "--list").keys()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--cases", "figure-9"], "known: figure-5.10"),
        (["--gpu", "k80"], "known: a100-pcie"),
        (["--ssd", "floppy"], "known: fl6"),
        (["--assume", "luck=1"], "names:"),
        (["--cases", "table-5.4", "--hidden", "8"], "exclude"),
        (["--model", "gpt-175b", "--hidden", "8"], "exclude"),
        (["--hidden", "8"], "--layers"),
        (["--gpus", "16"], "--gpus describe a system of your own, which expects"),
        (["--zero3", "--tflops", "9", "--gpu", "h100-sxm"], "--zero3, --tflops"),
    ],
)
def test_settings_that_cannot_work(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert word in capsys.readouterr().err
