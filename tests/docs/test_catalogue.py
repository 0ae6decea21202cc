"""The catalogue of docs/safety.md says what the code does."""

import ast
import re
from collections import Counter
from pathlib import Path

from ssdtrain.counters import Fallback
from ssdtrain.rebuild.recipes import rules_of
from ssdtrain.regions.watch import FOREIGN
from tests.arch.test_layers import nodes_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "safety.md"
CLASSES = {"equal", "kept", "refused", "outside"}
LINES = 60
"""At most so many in its tables."""


def rows() -> list[list[str]]:
    """Cells of all tables of the catalogue, without the heads."""
    text = PAGE.read_text().partition("\n## Catalogue\n")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [cells for cells in found if cells[1] != "class"]


def strings() -> str:
    """All texts in the code, one line each; a value that is put in is a space."""
    found = []
    for path in sorted((ROOT / "ssdtrain").rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else " "
                    for part in node.values
                )
                found.append("".join(parts))
    return "\n".join(" ".join(text.split()) for text in found)


def test_it_is_short_and_every_row_has_a_class() -> None:
    assert 30 < len(rows()) <= LINES
    for cells in rows():
        assert len(cells) == 3, cells
        assert cells[1] in CLASSES, cells


def test_every_recipe_stands_in_one_row_and_no_other_node_does() -> None:
    named = Counter(
        name for cells in rows() for name in re.findall(r"`(\w+Backward0)`", cells[0])
    )
    operators = rules_of(weighed=True).items()
    assert set(named) == {name for name, row in operators if row.recipe is not None}
    assert set(named.values()) == {1}


def test_what_is_quoted_is_what_the_code_says() -> None:
    said = strings()
    quotes = [q for cells in rows() for q in re.findall(r'"([^"]+)"', cells[2])]
    quotes = [quote for quote in quotes if quote != "full"]
    assert len(quotes) > 10
    for quote in quotes:
        assert quote in said, quote


def test_every_reason_to_keep_is_named() -> None:
    """But for those that say how fast a target is, or what pinning failed for."""
    text = "\n".join(cells[2] for cells in rows())
    others = {Fallback.KEPT_BACK_PRESSURE, Fallback.KEPT_PIN_FAILED}
    for reason in set(Fallback) - others:
        if reason.value.startswith("kept: "):
            assert reason.value in text, reason
    for reason in FOREIGN.values():
        assert reason in text
