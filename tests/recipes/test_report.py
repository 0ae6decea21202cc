"""The generated pages are those of the recorded results."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipes.bench.harness import report
from recipes.bench.harness.cases import CASES
from recipes.bench.harness.cells import Cells, environment
from recipes.bench.harness.cli import run
from recipes.bench.harness.records import RESULTS, ROOT, public, read, write
from recipes.bench.safety.tables import searches
from ssdtrain.tools.cli import build_parser


def test_readme_and_pages_are_up_to_date() -> None:
    assert report.stale() == []


def test_a_changed_table_is_seen_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [tmp_path / f"{n} {page.name}" for n, page in enumerate(report.pages())]
    for page, copy in zip(report.pages(), pages, strict=True):
        copy.write_text(page.read_text())
    monkeypatch.setattr(report, "pages", lambda: pages)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    readme = pages[0]
    text = readme.read_text()
    readme.write_text(text.replace("GraphSAGE epoch", "GraphSage epoch"))
    assert report.stale() == [readme.name]
    assert run(["report"]) == 1
    assert run(["report", "--write"]) == 0
    assert readme.read_text() == text


TABLE = re.compile(r"<!-- (?:table|lines): (\S+)((?: \S+)*) -->")


def test_every_table_of_a_page_has_records() -> None:
    """And every case what `--list` and `--help` say of it."""
    found = [
        (name, record)
        for page in report.pages()
        for name, records in TABLE.findall(page.read_text())
        for record in records.split()
    ]
    assert len(found) > 40
    for name, record in found:
        assert list(RESULTS.glob(f"{record}.json")), (name, record)
    for case in CASES:
        assert find_spec(f"recipes.bench.{case.name}") and case.what, case


def test_every_row_of_the_dissertations_says_what_was_done() -> None:
    """Commands that there are, and a reason where nothing is."""
    text = (ROOT / "docs" / "results" / "seeds.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| Fig", "| Tab"))]
    assert len(rows) > 40
    for row in rows:
        assert all(part.strip() for part in row.strip("|").split(" | ")), row
    for name in re.findall(r"`python -m recipes.bench ([\w.]+)", text):
        assert find_spec(f"recipes.bench.{name}") is not None, name
    for words in re.findall(r"`ssdtrain ([^`]+)`", text):
        command = words.split()[0]
        assert build_parser(command).parse_known_args(words.split())[0].command
    for part in ("Fig. 3.11", "5.6", "Fig. 2.14", "4.12"):
        assert part in text


README = (ROOT / "README.md").read_text()
HEADLINE = next(m[0] for m in report.BLOCK.finditer(README) if "headline" in m[3])


def test_the_headline_has_a_date_and_a_device_in_every_row() -> None:
    rows = report.rendered(HEADLINE).splitlines()[4:-2]
    assert len(rows) >= 5
    for row in rows:
        assert re.search(r"\S+, 20\d\d-\d\d-\d\d \|$", row), row


USED = {
    path
    for page in report.pages()
    for _, records in TABLE.findall(page.read_text())
    for record in records.split()
    for path in RESULTS.glob(f"{record}.json")
}
FILES = sorted(USED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_pages_are_made_of_is_of_the_one_format(path: Path) -> None:
    assert read(path)["environment"]["device"]


PRIVATE = re.compile(r"(?<![\w.~-])/(?:work|root|tmp|home|check|opt|scratch)/\S*")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize(
    "path",
    [*sorted(RESULTS.rglob("*.json")), *sorted((ROOT / "docs").rglob("*.md")), *PAGES],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_no_path_of_a_machine_is_published(path: Path) -> None:
    text = path.read_text()
    assert PRIVATE.findall(text.replace("\\n", "\n")) == []
    if path.suffix == ".json":
        data = json.loads(text)
        assert public(data) == data


def test_results_hold_no_path_of_this_machine(tmp_path: Path) -> None:
    there = "/usr/lib/python3/site-packages/torch/nn/modules/module.py"
    where = [f'File "{ROOT}/recipes/bench/rgnn/batches.py", line 3', f'File "{there}"']
    command = f"python -m recipes.bench rgnn.batches --out {tmp_path}/batches.json"
    data = {
        "environment": {"command": command},
        "settings": {"directory": str(tmp_path / "ssd")},
        "cells": {"a/b/c": {"traceback": where, "text": "12 GB/s, /dev/vda/x, 1 / 2"}},
    }
    write(tmp_path / "batches.json", data)
    found = read(tmp_path / "batches.json")
    module = found["environment"]["command"]
    assert module == "python -m recipes.bench rgnn.batches --out batches.json"
    assert found["settings"] == {"directory": "ssd"}
    cell = found["cells"]["a/b/c"]
    assert cell["text"] == data["cells"]["a/b/c"]["text"]
    assert cell["traceback"] == [
        'File "recipes/bench/rgnn/batches.py", line 3',
        'File "site-packages/torch/nn/modules/module.py"',
    ]
    # A rerun with the same settings goes on.
    again = Cells(tmp_path / "batches.json", 1.0, data["settings"])
    assert "a/b/c" in again


def test_a_search_that_found_something_says_so() -> None:
    env = {"device": "2 CPU cores", "num_devices": 0, "versions": {"torch": "2"}}
    found = {"graphs": 500, "equal": 499, "different": [{"seed": 3}], "features": {}}
    stopped = {"signals": 70, "blocks": 3, "lost": 0, "bad": ["block 7"]}
    records = [
        {"environment": env, "settings": {}, "cells": {"campaign": cell}, "file": name}
        for name, cell in (("graph_programs_cpu", found), ("interrupts", stopped))
    ]
    text = searches(*records)
    assert "499 equal, **1 different**" in text
    assert "70 in 3 processes" in text and "**1** times" in text


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"environment": {}, "cells": []}')
    with pytest.raises(ValueError, match=r"no \['settings', 'cells'\]"):
        read(path)
    whole = {"environment": environment(), "settings": {}, "cells": {"a": {"b": 1}}}
    write(path, whole)
    assert read(path) == whole and list(tmp_path.iterdir()) == [path]


def test_facts_are_kept_and_cells_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    cells = Cells(path, 60)
    cells.record("write", {"gb": 1.5})
    cells.fact("left_behind", [])
    assert read(path)["left_behind"] == []
    assert len(Cells(path, 60, {}).data["cells"]) == 1


def test_every_picture_can_be_drawn_and_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = "".join(page.read_text() for page in report.pages())
    for record in report.PICTURES:
        report.draw(record, tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["results-placement.svg", "results-real-models.svg"]
    assert all(f"../img/{file}" in shown for file in drawn)
