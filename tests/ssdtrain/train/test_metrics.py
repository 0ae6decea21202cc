"""The live line: what it says, and how seldom it says it to a file."""

import io
import json
from pathlib import Path

from rich.console import Console

from ssdtrain.train.metrics import JsonLines, Terminal

VALUES = {"loss": 2.5, "step_ms": 500.0, "peak_bytes": 3e6, "phase": "observing"}


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(steps: int, seconds: float) -> list[str]:
    """The lines of `steps` steps of so many seconds, written to a file."""
    out, clock = io.StringIO(), Clock()
    terminal = Terminal(Console(file=out, width=200), steps, 1000, clock)
    terminal.stage("reading the text")
    for step in range(steps):
        clock.now += seconds
        terminal.write("with ssdtrain", step, VALUES)
    terminal.close()
    return out.getvalue().splitlines()


def test_a_line_says_how_it_goes() -> None:
    first, line, *_ = shown(3, 10.0)
    assert first == "ssdtrain: reading the text ..."
    for part in (
        "with ssdtrain",
        "step 1/3",
        "loss 2.500000",
        "500 ms",
        "2,000 tokens/s",
        "peak 3.0 MB",
        "observing",
        "ETA 0:00:01",
    ):
        assert part in line


def test_a_file_gets_a_line_every_ten_seconds_and_the_last() -> None:
    lines = shown(101, 1.0)
    assert 10 <= len(lines) <= 13
    assert "step 101/101" in lines[-1] and "ETA 0:00:00" in lines[-1]


def test_a_terminal_keeps_no_line() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    terminal = Terminal(console, 2, 1000)
    terminal.stage("reading the text")
    terminal.write("with ssdtrain", 0, VALUES)
    terminal.close()
    assert "step 1/2" in out.getvalue()
    assert out.getvalue().count("\n") <= 1  # one line, redrawn and removed


def test_lines_of_a_resumed_run_come_behind(tmp_path: Path) -> None:
    for step in range(2):
        sink = JsonLines(tmp_path / "metrics.jsonl")
        sink.write("with ssdtrain", step, {"loss": 1.0})
        sink.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
