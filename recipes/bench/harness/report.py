"""The measured tables of docs/results and of the README, and the pictures: never typed.

A page holds its own text. `<!-- table: MODULE.FUNCTION RECORDS -->` in it is followed
by what that function says of these records, and by device and date; after
`<!-- lines: ... -->` these two are left out. `<!-- end -->` ends both.

    python -m recipes.bench report                # names what is out of date
    python -m recipes.bench report --write        # docs/results/ and the README's rows
    python -m recipes.bench report --pictures     # draws docs/img/results-*.svg
    python -m recipes.bench report --table rgnn.tables.details rgnn/rgnn   # prints one
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from recipes.bench.harness.records import ROOT, Data, named
from recipes.bench.harness.tables import where

BLOCK = re.compile(
    r"(<!-- (table|lines): (\S+)((?: \S+)*) -->\n).*?(<!-- end -->)", re.S
)


def table_of(name: str, records: list[str], *, with_where: bool = True) -> str:
    """What a room's table says of records; empty where none is there."""
    module, _, function = name.rpartition(".")
    tables = importlib.import_module(f"recipes.bench.{module}")
    found = [data for pattern in records for data in named(pattern)]
    text = getattr(tables, function)(*found) if found or not records else ""
    return f"{text}\n\n{where(found[0])}" if text and with_where else text


def rendered(text: str) -> str:
    """The page with its tables as the records have them now."""

    def block(found: re.Match[str]) -> str:
        begin, kind, name, records, end = found.groups()
        table = table_of(name, records.split(), with_where=kind == "table")
        return f"{begin}\n{table}\n\n{end}" if table else f"{begin}{end}"

    return BLOCK.sub(block, text)


def pages() -> list[Path]:
    """Those that hold tables."""
    docs = ROOT / "docs"
    results = sorted((docs / "results").glob("*.md"))
    return [ROOT / "README.md", docs / "benchmarks.md", *results]


def stale() -> list[str]:
    """Pages that are not what the results say."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    return [
        str(page.relative_to(ROOT))
        for page, text in texts.items()
        if rendered(text) != text
    ]


class Picture(NamedTuple):
    """A picture of one record."""

    file: str
    """In docs/img."""
    record: str
    room: str
    draw: str
    """A function of the room's tables."""
    width: float = 8.0

    def write(self, directory: Path) -> None:
        """Draw it, if its record is there."""
        tables = importlib.import_module(f"recipes.bench.{self.room}.tables")
        draw: Callable[[Any, Data], None] = getattr(tables, self.draw)
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        for data in named(self.record):
            # Text as text: small files, the reader's own font.
            with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ssdtrain"}):
                figure = Figure(figsize=(self.width, 4), layout="constrained")
                draw(figure, data)
                figure.savefig(directory / self.file, metadata={"Date": None})


PICTURES = (
    Picture("results-real-models.svg", "models/real_models", "models", "frontier", 14),
    Picture("results-placement.svg", "offload/placement", "offload", "frontier", 12),
    Picture("results-gather.svg", "gather/gather", "gather", "chart"),
    Picture("results-relational-speedup.svg", "rgnn/rgnn", "rgnn", "speedup_chart"),
    Picture(
        "results-relational-ablation.svg", "rgnn/rgnn", "rgnn", "ablation_chart", 12
    ),
)


def main(
    *, write: bool = False, pictures: bool = False, table: tuple[str, ...] = ()
) -> int:
    """Name what is out of date, write it, draw, or print one table."""
    if pictures:
        for picture in PICTURES:
            picture.write(ROOT / "docs" / "img")
    if table:
        print(table_of(table[0], list(table[1:])))
    if write:
        for page in pages():
            page.write_text(rendered(page.read_text(encoding="utf-8")))
    if (old := stale()) and not pictures and not table:
        print(f"{old} are out of date; run it with --write", file=sys.stderr)
        return 1
    return 0
