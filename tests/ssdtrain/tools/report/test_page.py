"""The HTML page of a run: its figures are result.json's, and a browser shows them."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.counters import Span
from ssdtrain.errors import ConfigError
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import PLAN_FILE
from ssdtrain.plan.profile import PROFILE_FILE
from ssdtrain.tools.cli import main
from ssdtrain.tools.report.page import page, read_run
from ssdtrain.tools.report.table import result_rows
from ssdtrain.tools.report.trace import write_trace
from tests.ssdtrain.tools.report.test_table import a_result


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at where labels stand, which takes half the time of a picture."""
    engine = "matplotlib.layout_engine.ConstrainedLayoutEngine.execute"
    monkeypatch.setattr(engine, lambda *figure: None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory as `ssdtrain train` leaves it."""
    return a_run(tmp_path / "runs" / "one")


def a_run(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    peaks = {"without ssdtrain": 8000.0, "with ssdtrain": 1600.0}
    picture = {"rank": 1, "step": 2, "peak_bytes": peaks}
    result = a_result(picture=picture, ok=True, **changes)
    result["legs"]["with ssdtrain"]["explained"] = "Plan: <moved> & kept."
    (path / "result.json").write_text(json.dumps(result))
    record = {"words": [], "command": ["ssdtrain", "train"], "status": "finished"}
    (path / "run.json").write_text(json.dumps(record))
    (path / "config.yaml").write_text(f"seed: 0\nname: {path.name}\n")
    courses = {name: [(0.0, 0), (5.0, peak)] for name, peak in peaks.items()}
    (path / "memory.json").write_text(json.dumps(courses))
    lines = [
        {"leg": leg, "step": step, "loss": 2.0 - step, "step_ms": 10.0, "stall_ms": 1.0}
        for leg in peaks
        for step in range(2)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text)
    return path


class Cells(HTMLParser):
    """The cells of the table of figures, and everything that is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.fetched: list[str] = []
        self._table = self._cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.fetched += [v or "" for k, v in attrs if k in ("src", "href")]
        self.fetched += [tag] if tag in ("script", "link", "iframe") else []
        self._table = found.get("id") == "figures" if tag == "table" else self._table
        if tag == "tr" and self._table:
            self.rows.append([])
        self._cell = tag in ("td", "th") and self._table
        if self._cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = False if tag in ("td", "th") else self._cell

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


def test_figures_are_those_of_the_result(run: Path) -> None:
    text = page([read_run(run)])
    cells = Cells()
    cells.feed(text)
    assert not cells.fetched  # nothing is asked of a network
    expected = [
        list(row) for row in result_rows(json.loads((run / "result.json").read_text()))
    ]
    assert cells.rows[1:] == expected
    for part in (
        "verified: losses equal, weights equal",
        "Memory over step 2 (the last), rank 1: saved tensors",
        "with ssdtrain, peak 1.60 kB",
        "Loss by step",
        "Time of each step",
        "Plan: &lt;moved&gt; &amp; kept.",
        "time since the step began (ms)",
    ):
        assert part in text


def test_measured_waits_stand_beside_the_predicted_ones(run: Path) -> None:
    """The page said "Nowhere, by the plan." and no more, beside a curve of waits."""
    profile = PROFILE_FILE.read(RECORDED)
    PROFILE_FILE.write(run / "profile.json", profile)
    PLAN_FILE.write(run / "plan.json", choose(profile, Goal(max_overhead=0.05), 1))
    assert "No step under the plan was measured." in page([read_run(run)])
    waits = [("observing", 90.0), *(("following", ms) for ms in (25.0, 7.5, 9.25))]
    lines = [
        {"leg": "with ssdtrain", "step": n, "loss": 1.0, "phase": phase, "stall_ms": ms}
        for n, (phase, ms) in enumerate(waits)
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    told = "Measured in the 3 steps that followed a plan: 7.50 to 25.00 ms, 9.25 ms in"
    assert told in page([read_run(run)])


@pytest.fixture
def graph_run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "graph"
    path.mkdir(parents=True)
    result = {"model.layer": "rgcn", "device": "cpu", "mean_accuracy": 0.51429}
    result |= {"epoch_ms": 49.6934, "losses": [1.5] * 9, "peak_device_bytes": 2_500_000}
    (path / "result.json").write_text(json.dumps(result))
    rows = [{"seed": 0, "epoch": n, "loss": 1.0, "epoch_ms": 9.0} for n in range(3)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_graph_run_has_figures_with_units(graph_run: Path) -> None:
    text = page([read_run(graph_run)])
    cells = Cells()
    cells.feed(text)
    assert cells.rows == [
        ["device", "cpu"],
        ["mean accuracy", "51.43 %"],
        ["epoch time", "49.69 ms"],
        ["losses", "1.5 to 1.5 (9 values)"],
        ["peak device memory", "2.50 MB"],
    ]
    assert "<h3>Loss by epoch</h3>" in text and "seed 0" in text
    assert "<h3>Time of each epoch</h3>" in text and "<th>ranks</th>" not in text


def test_two_runs_are_compared(tmp_path: Path) -> None:
    failed = {"losses_equal": False, "weights_equal": True}
    paths = [a_run(tmp_path / "one"), a_run(tmp_path / "two", verdict=failed)]
    text = page([read_run(path) for path in paths])
    assert "id='compared'" in text
    assert text.count("class='bad'>FAILED: losses equal") == 1
    assert "one:\nname: one\ntwo:\nname: two" in text  # what differs, and no more
    assert "one, with ssdtrain" in text and "two, with ssdtrain" in text


def test_long_courses_are_thinned_without_losing_the_peak(run: Path) -> None:
    course = [(i / 9, 10 + i % 7 if i != 77_777 else 8000) for i in range(100_000)]
    (run / "memory.json").write_text(json.dumps({"with ssdtrain": course}))
    text = page([read_run(run)])
    [picture] = re.findall(r"<svg[^>]*Memory over.*?</svg>", text, re.S)
    assert len(picture) < 500_000
    paths = re.findall(r'<path d="([^"]*)"', picture)
    drawn = re.findall(r"[ML] \S+ (\S+)", max(paths, key=len))
    heights = [float(height) for height in drawn]
    assert max(heights) - min(heights) > 100  # the one high sample is drawn


def test_the_command(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parents[1])
    (run.parent / "latest").symlink_to("one")
    assert main(["report", "latest"]) == 0
    assert "<h1>one</h1>" in (own := (run / "report.html").read_text())
    a_run(run.parent / "two")
    capsys.readouterr()
    assert main(["report", "one", "two"]) == 0
    assert capsys.readouterr().out.endswith("one/compared-with-two.html\n")
    assert "<h1>one and two</h1>" in (run / "compared-with-two.html").read_text()
    assert (run / "report.html").read_text() == own
    assert main(["report", "nothing"]) == 2
    told = "report nothing: no such run; there are below runs: two, one"
    assert told in capsys.readouterr().err
    (run / "result.json").unlink()
    assert main(["report", "latest"]) == 2
    newest = r"has not finished, or was stopped\. The newest that ended: .*/two\.$"
    with pytest.raises(ConfigError, match=newest):
        read_run(run)
    (run.parent / "two" / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"or was stopped\.$"):
        read_run(run)
    with pytest.raises(ConfigError, match="this is no run's directory"):
        read_run(run.parent)


def test_a_sweep_is_its_runs(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order in which they ran; one that failed is left out."""
    monkeypatch.chdir(run.parents[1])
    for number in (10, 9, 2):
        a_run(run.parent / "some-sweep" / str(number))
    (run.parent / "some-sweep" / "3").mkdir()
    assert main(["report", "some-sweep"]) == 0
    assert capsys.readouterr().out.endswith("runs/some-sweep/report.html\n")
    text = (run.parent / "some-sweep" / "report.html").read_text()
    names = " and ".join(f"some-sweep/{number}" for number in (2, 9, 10))
    assert f"<h1>{names}</h1>" in text


RECORDED = Path(__file__).parents[2] / "plan/recorded/h200_16384x2.json"


def test_a_planned_run_shows_its_frontier_and_its_time_line(run: Path) -> None:
    profile = PROFILE_FILE.read(RECORDED)
    plan = choose(profile, Goal(max_overhead=0.05), search_marks=1)
    PROFILE_FILE.write(run / "profile.json", profile)
    PLAN_FILE.write(run / "plan.json", plan)
    spans = [
        Span("compute", "step 2", 0, 9_000_000, 0),
        Span("write", "block", 1_000_000, 2_000_000, 512),
        Span("write", "of another step", 20_000_000, 21_000_000, 512),
    ]
    write_trace([spans], run / "trace.json")
    text = page([read_run(run)])
    assert "What ran when in step 2, rank 0" in text
    assert "<title>block, 1.00 ms</title>" in text
    assert "of another step" not in text
    assert f"this run's plan ({plan.policy})" in text
    assert plan.prediction is not None
    worst = plan.prediction.stalls[0] if plan.prediction.stalls else None
    assert (f"{worst.ms:.2f} ms" if worst else "Nowhere, by the plan.") in text


def test_a_damaged_plan_is_named(run: Path) -> None:
    (run / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"plan\.json"):
        read_run(run)
