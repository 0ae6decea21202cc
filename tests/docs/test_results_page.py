"""A page of results begins with its answer: one table, then pictures, then the rest."""

import re
import subprocess

from tests.docs.pages import ROOT

PAGE = ROOT / "docs/results/real-models.md"
MOST_WORDS = 120
"""Before the table."""


def test_the_answer_is_a_table_of_ten_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    answer, _, rest = text.partition("<details")
    before, head, _ = answer.partition("| model |")
    assert head and len(before.split()) <= MOST_WORDS
    rows = re.findall(r"^\|(?!--)(.*)\|$", answer, re.M)
    assert len(rows) == 11, "one heading and ten rows"
    width = len(rows[0].split("|"))
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")]
        assert len(cells) == width and all(cells), row
        assert not row.rstrip().endswith(("...", "…")), "a cell that is cut"
    assert "budget=1gc" not in answer, "a word of the benchmark"
    captions = re.findall(r"^!\[(.*?)\]", answer, re.M)
    assert len(captions) == len(set(captions)) >= 1
    assert rest.index("</details>") < rest.index("## How it was measured")


def test_no_profile_of_a_program_is_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.pstats", "*.prof"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert listed.stdout == ""
