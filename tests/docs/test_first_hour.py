"""The table of the first hour's page has the rows that the program prints."""

import io
import re

import pytest
from rich.console import Console

from ssdtrain.tools.report.table import render, result_rows
from ssdtrain.train.trainer import READING
from tests.docs.pages import ROOT, blocks
from tests.ssdtrain.tools.report.test_table import a_result

PAGE = ROOT / "docs" / "first-hour.md"
WIDTH = 80


def cells(text: str) -> list[list[str]]:
    """The rows of a printed table, each cell's lines joined."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith("│"):
            continue
        parts = [part.strip() for part in line.strip("│").split("│")]
        if parts[1]:
            found.append(parts)
        else:  # goes on with the row above
            found[-1] = [
                f"{a} {b}".strip() for a, b in zip(found[-1], parts, strict=True)
            ]
    return found


@pytest.fixture
def shown() -> list[list[str]]:
    [text] = [b.text for b in blocks(PAGE) if "activation peak" in b.text]
    return cells(text)


def test_no_row_is_left_out(shown: list[list[str]]) -> None:
    """Of a run that moved, kept, rebuilt and forwarded, as `make train` does."""
    result = a_result(peak_of="saved tensors of 1.05 MB or more")
    names = [row.name for row in result_rows(result) if row.note != "fallbacks"]
    assert [row[0] for row in shown][: len(names)] == names
    rest = shown[len(names) :]
    assert rest and all(row[3] == "fallbacks" for row in rest)


def test_the_page_is_as_the_program_prints(shown: list[list[str]]) -> None:
    """The same columns, on a terminal of the same width."""
    out = io.StringIO()
    Console(file=out, width=WIDTH).print(render(a_result()))
    heads = [line for line in out.getvalue().splitlines() if line.startswith("┃")]
    names = [re.sub(r"\s+", " ", line) for line in heads]
    assert [name for name in names if name in re.sub(r" +", " ", PAGE.read_text())]


def test_the_page_says_what_is_prepared() -> None:
    assert f"\nssdtrain: {READING} ...\n" in PAGE.read_text()


def test_its_figures_agree_with_one_another(shown: list[list[str]]) -> None:
    """Ratios, and what became of what autograd saved."""
    values = {row[0]: row for row in shown}
    for name in ("step, median", "activation peak, last step"):
        _, without, with_, note = values[name]
        ratio = size(with_) / size(without)
        assert note == f"x {ratio:.3f}"
    parts = sum(size(values[n][2]) for n in ("kept", "recomputed", "offloaded"))
    assert parts == pytest.approx(size(values["saved by autograd"][2]), rel=0.01)


def size(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"ms": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
