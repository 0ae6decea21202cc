"""`ssdtrain doctor` end to end, on whatever machine this is."""

import json
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from ssdtrain.tools.arguments import size_argument
from ssdtrain.tools.cli import main
from ssdtrain.tools.machine.doctor import judge_links
from ssdtrain.tools.machine.links import LINK_FILE, LinkKind
from tests.ssdtrain.tools.machine.made import link


def doctor(*arguments: str) -> int:
    return main(["doctor", *arguments])


def test_measures_saves_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "drive").mkdir()
    saved, plot = tmp_path / "links.json", tmp_path / "links.png"
    arguments = ["--directory", str(tmp_path / "drive"), "--json"]
    arguments += ["--max-write-bytes", "64M", "--max-seconds", "60"]
    assert doctor(*arguments, "--save", str(saved), "--plot", str(plot)) == 0
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert f"2 of 3: measuring {tmp_path / 'drive'}: about 60 s, 0.1 GB" in said.err
    links = LINK_FILE.read(saved)
    assert printed["links"] == json.loads(saved.read_text())
    kinds = {link.kind for link in links.links}
    copies = LinkKind.D2H if torch.cuda.is_available() else LinkKind.HOST_COPY
    assert {copies, LinkKind.SSD_WRITE, LinkKind.SSD_READ} <= kinds
    assert 0 < printed["bytes_written"] <= 64 << 20
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert list((tmp_path / "drive").iterdir()) == []
    for finding in printed["findings"]:
        assert finding["advice"], finding


def test_what_takes_long_is_said_as_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipe, too: half a minute without a word looks like a command that hangs."""

    def ends(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("ssdtrain.tools.machine.doctor.measure_ssd", ends)
    assert doctor("--directory", str(tmp_path)) == 130
    said = capsys.readouterr()
    assert said.out == ""  # which may be JSON
    assert said.err.splitlines() == [
        "ssdtrain: 1 of 3: looking at GPUs, limits and versions ...",
        f"ssdtrain: 2 of 3: measuring {tmp_path}: about 20 s, 4.3 GB written at most "
        "...",
        "ssdtrain doctor: interrupted",
    ]


def test_tables_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--no-measure") == 0
    text = capsys.readouterr().out
    assert "Findings" in text and "torch" in text and "Links" not in text


def test_a_missing_directory_is_a_problem_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "gone")
    assert doctor("--no-measure", "--json", "--directory", gone) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [f for f in findings if f["level"] == "problem"]
    assert gone in found["text"] and "existing directory" in found["advice"]


def test_settings_that_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--no-measure", "--save", "x.json") == 2
    assert "leave one out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        doctor("--max-seconds", "-1")
    assert stopped.value.code == 2
    assert "--max-seconds: expects a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("2KiB", 2048), ("1.5mib", 3 << 19), ("1G", 10**9)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size_argument(text) == expected


SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)


def test_findings_about_links() -> None:
    kinds = (LinkKind.D2H, LinkKind.H2D, LinkKind.BOTH)
    fast = tuple(link(kind, 55.0, SIZES) for kind in kinds)
    assert "hides 55 GB" in next(iter(judge_links(fast))).advice
    shared = (*fast[:2], link(LinkKind.BOTH, 30.0, SIZES))
    assert any("disturb" in f.advice for f in judge_links(shared))
    slow = tuple(link(kind, 6.0, SIZES) for kind in kinds)
    assert "below PCIe 4" in next(iter(judge_links(slow))).advice
    tiers = (
        *fast,
        link(LinkKind.SSD_WRITE, 2.5, SIZES),
        link(LinkKind.SSD_READ, 2.7, SIZES),
    )
    assert any("tiered" in f.advice for f in judge_links(tiers))
    assert list(judge_links(())) == []
