"""Tables that commands print."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

WIDE_COLUMNS = 200
"""A pipe has no width; 80 columns would cut the cells."""


def figures_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    words: int = 1,
    caption: str | None = None,
) -> "Table":
    """Build a table whose first `words` columns hold words, the others numbers."""
    from rich.table import Table

    table = Table(title=title, caption=caption)
    for at, head in enumerate(heads):
        is_word = at < words
        table.add_column(head, justify="left" if is_word else "right", no_wrap=at == 0)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def show_tables(*tables: "Table") -> None:
    """Print them as wide as the terminal, or as they need to be in a pipe."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDE_COLUMNS)
    for table in tables:
        console.print(table)
