"""The generated pages are those of the recorded results."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recipes.bench.common import merged, report, seeds
from recipes.bench.common.cells import RESULTS, ROOT, Cells, environment
from recipes.bench.common.pictures import PICTURES
from recipes.bench.common.results import find, public, read, write
from recipes.bench.safety.tables import searches
from ssdtrain.tools.cli import build_parser


def test_readme_and_pages_are_up_to_date() -> None:
    assert report.stale() == []


def test_a_changed_page_and_one_that_nobody_generates_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs, readme = tmp_path / "docs/results", tmp_path / "README.md"
    readme.write_text(report.README.read_text())
    for name, value in (("ROOT", tmp_path), ("DOCS", docs), ("README", readme)):
        monkeypatch.setattr(report, name, value)
    assert "docs/results/gather.md" in report.stale()
    report.main(["--write"])
    assert report.stale() == []
    (docs / "other.md").write_text("typed")
    readme.write_text(readme.read_text().replace("GraphSAGE", "GraphSage"))
    assert report.stale() == ["README.md", "docs/results/other.md"]
    with pytest.raises(SystemExit, match="--write"):
        report.main(["--check"])


def test_every_row_of_the_dissertations_says_what_was_done() -> None:
    """Commands that there are, pages that there are, and a reason where nothing is."""
    for _, rows in seeds.PARTS:
        for row in rows:
            assert row.what and row.shows and row.ours and row.theirs, row
            if row.command.startswith("python -m "):
                module = row.command.split()[2]
                assert find_spec(module) is not None, row.command
            elif row.command:
                main_parser = build_parser(row.command.split()[1])
                args = main_parser.parse_known_args(row.command.split()[1:])[0]
                assert args.command == row.command.split()[1]
            for name in re.findall(r"\]\(([\w./-]+)", row.ours):
                assert (report.DOCS / name).exists(), name
    named = " ".join(row.what for _, rows in seeds.PARTS for row in rows)
    for part, last in (("Fig. 3.11", "Table 5.6"), ("Fig. 2.14", "Fig. 4.12")):
        assert part in named and last.split()[1] in named


def test_the_headline_has_a_date_and_a_device_in_every_row() -> None:
    rows = report.headline(RESULTS).splitlines()[2:]
    assert len(rows) >= 5
    for row in rows:
        assert re.search(r"\S+, 20\d\d-\d\d-\d\d \|$", row), row


AREAS = sorted({area for page in report.PAGES.values() for area, _ in page.tables})
FILES = [path for area in AREAS for path in sorted((RESULTS / area).glob("*.json"))]


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
    command = f"python -m recipes.bench.rgnn.batches --out {tmp_path}/batches.json"
    data = {
        "environment": {"command": command},
        "settings": {"directory": str(tmp_path / "ssd")},
        "cells": {"a/b/c": {"traceback": where, "text": "12 GB/s, /dev/vda/x, 1 / 2"}},
    }
    write(tmp_path / "batches.json", data)
    found = read(tmp_path / "batches.json")
    module = found["environment"]["command"]
    assert module == "python -m recipes.bench.rgnn.batches --out batches.json"
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


def test_a_search_that_found_something_says_so(tmp_path: Path) -> None:
    assert searches(tmp_path) == ""
    env = {"device": "2 CPU cores", "num_devices": 0, "versions": {"torch": "2"}}
    found = {"graphs": 500, "equal": 499, "different": [{"seed": 3}], "features": {}}
    damaged = {"total": 70, "files": {"plan": 30, "wear log": 40}, "bad": ["plan 7"]}
    for name, cell in (("relational_cpu", found), ("damaged_files", damaged)):
        data = {"environment": env, "settings": {}, "cells": {"campaign": cell}}
        write(tmp_path / f"{name}.json", data)
    lines = searches(tmp_path).splitlines()[2:]
    assert "499 alike, **1 different**" in lines[0]
    assert "70 of 2 kinds" in lines[1] and "but for **1**" in lines[1]


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert find(path) is None
    path.write_text('{"environment": {}, "cells": []}')
    with pytest.raises(ValueError, match=r"no \['settings', 'cells'\]"):
        read(path)
    whole = {"environment": environment(), "settings": {}, "cells": {"a": {"b": 1}}}
    write(path, whole)
    assert read(path) == whole and list(tmp_path.iterdir()) == [path]


def test_cells_without_a_name_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    cells = Cells(path, 60)
    cells.add(what="write", gb=1.23456789)
    cells.add(what="read", gb=2)
    cells.attempt("broken", lambda: [][0])
    cells.attempt("long", lambda: None, need_s=1e9)
    cells.fact("left_behind", [])
    data = read(path)
    assert data["left_behind"] == []
    assert data["cells"]["write 0"] == {"what": "write", "gb": 1.234568}
    assert [next(iter(cell)) for cell in data["cells"].values()] == [
        *("what", "what", "failed", "skipped")
    ]
    assert len(Cells(path, 60, {}).data["cells"]) == 4
    assert not Cells(path, 60, {}, anew=True).data["cells"]


def test_every_picture_can_be_drawn_and_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for picture in PICTURES:
        picture.write(RESULTS, tmp_path)
        recorded = (RESULTS / f"{picture.record}.json").exists()
        assert (tmp_path / picture.file).exists() == recorded
        if recorded:
            page = ROOT / "docs" / "results" / f"{picture.page}.md"
            assert f"../img/{picture.file}" in page.read_text()


def test_results_of_processes_beside_one_another_become_one_file(
    tmp_path: Path,
) -> None:
    environment = {"device": "H100", "num_devices": 1, "date": "2026-11-26"}

    def part(name: str, cells: dict[str, Any], **others: Any) -> Path:
        path = tmp_path / f"{name}.json"
        own = {**environment, "command": f"run {name}", **others.pop("also", {})}
        write(path, {"environment": own, "settings": {"steps": 4}, "cells": cells})
        return path

    failed, good = {"error": "took too long"}, {"step_ms": 1.0}
    one = part("one", {"a": good, "b": failed, "c": failed})
    two = part("two", {"b": good, "a": failed, "d": good}, also={"date": "2026-11-27"})
    into = tmp_path / "all.json"
    assert merged.main(["--into", str(into), str(one), str(two)]) == 0
    found = read(into)
    assert found["cells"] == {"a": good, "b": good, "c": failed, "d": good}
    assert found["environment"]["command"] == "run one; run two"
    assert found["environment"]["date"] == "2026-11-27"
    other = part("other", {}, also={"device": "H200"})
    with pytest.raises(SystemExit):
        merged.main(["--into", str(into), str(one), str(other)])
    with pytest.raises(ValueError, match="settings"):
        merged.merged([read(one), {**read(two), "settings": {"steps": 5}}])
