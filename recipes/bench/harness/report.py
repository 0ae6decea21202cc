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
from pathlib import Path

from recipes.bench.harness.records import ROOT, named
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


PICTURES = {"models/real_models": 14, "offload/placement": 12}
"""How wide the picture of a record is, which its room's tables draw."""


def draw(record: str, directory: Path) -> None:
    """Draw a record, if it is there, as `results-NAME.svg`."""
    room, _, name = record.partition("/")
    tables = importlib.import_module(f"recipes.bench.{room}.tables")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    for data in named(record):
        # Text as text: small files, the reader's own font.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ssdtrain"}):
            figure = Figure(figsize=(PICTURES[record], 4), layout="constrained")
            tables.frontier(figure, data)
            file = f"results-{name.replace('_', '-')}.svg"
            figure.savefig(directory / file, metadata={"Date": None})


def main(
    *, write: bool = False, pictures: bool = False, table: tuple[str, ...] = ()
) -> int:
    """Name what is out of date, write it, draw, or print one table."""
    if pictures:
        for record in PICTURES:
            draw(record, ROOT / "docs" / "img")
    if table:
        print(table_of(table[0], list(table[1:])))
    if write:
        for page in pages():
            page.write_text(rendered(page.read_text(encoding="utf-8")))
    if (old := stale()) and not pictures and not table:
        print(f"{old} are out of date; run it with --write", file=sys.stderr)
        return 1
    return 0
