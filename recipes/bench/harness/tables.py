"""Markdown tables of recorded cells."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from recipes.bench.harness.records import Data

Column = str | Callable[[Any], Any]
"""A format of a cell's values, such as `{step_ms:.1f}`, or a function of the cell; "-"
where the cell has no such value."""


def shown(column: Column, cell: Any) -> str:
    """One entry of a table."""
    try:
        found = column.format_map(cell) if isinstance(column, str) else column(cell)
    except (KeyError, TypeError, ZeroDivisionError):
        return "-"
    return "-" if found is None else str(found)


def table(
    cells: Mapping[str, Any] | Iterable[Any],
    columns: Mapping[str, Column],
    *,
    needs: str = "",
    line: str = "--:",
) -> str:
    """A row a cell; empty without rows.

    Args:
        cells: by name, which is `{name}` in a format; or without names.
        columns: by head.
        needs: cells without this value are left out.
        line: below every head but the first.
    """
    if isinstance(cells, Mapping):
        cells = [{"name": name, **cell} for name, cell in cells.items()]
    rows = [
        [shown(column, cell) for column in columns.values()]
        for cell in cells
        if not needs or needs in cell
    ]
    return markdown(list(columns), rows, line) if rows else ""


def markdown(head: list[str], rows: list[list[str]], line: str = "--:") -> str:
    """A table; `line` is drawn under every head but the first."""
    lines = ["| " + " | ".join(head) + " |", "|--|" + f"{line}|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def paragraphs(*parts: str | Literal[False] | None) -> str:
    """All that are not empty, with a blank line between them."""
    return "\n\n".join(part for part in parts if part)


def where(data: Data) -> str:
    """Device, torch and date in one line; the file says the rest."""
    env = data["environment"]
    torch = env["versions"].get("torch", "")
    devices = f"{env['num_devices']} x " if env["num_devices"] > 1 else ""
    cpus = "" if "CPU" in env["device"] else f", {env['num_cpus']} CPU cores"
    return f"{devices}{env['device']}{cpus}; torch {torch}; {env.get('date', '')}"


def grouped(cells: Mapping[str, Any], needs: str = "") -> dict[str, dict[str, Any]]:
    """Cells by what stands before the last `/` of their names, then by what follows."""
    found: dict[str, dict[str, Any]] = {}
    for name, cell in cells.items():
        if "/" in name and needs in (cell if needs else ""):
            row, column = name.rsplit("/", 1)
            found.setdefault(row, {})[column] = cell
    return found
