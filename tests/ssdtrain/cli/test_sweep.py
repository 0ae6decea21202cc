"""The table that compares the runs of a sweep."""

import io
from typing import Any

from rich.console import Console

from ssdtrain.cli.sweep import table_of


def printed(found: list[dict[str, Any]], width: int) -> list[list[str]]:
    """The cells of the table's body on a terminal of `width` columns."""
    out = io.StringIO()
    Console(file=out, width=width).print(table_of(found))
    rows = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows]


def test_runs_are_told_apart_on_a_narrow_terminal() -> None:
    words = "offload=host,data.files=[/gpt]"
    found = [{"overrides": words, "status": 0, "last_loss": 4.4, "step_ms": 3837.9}]
    assert "".join(row[0] for row in printed(found, 40)) == words


def test_no_setting_is_broken_where_it_fits() -> None:
    figures = {"last_loss": 4.398783, "step_ms": 2884.19, "step_ratio": None}
    more = {"peak_bytes": 35_650_000, "bytes_offloaded": 1_760_000_000}
    found = [{"overrides": "offload=host", "status": 0, **figures, **more}]
    first, *_, last = printed(found, 80)[0]
    assert (first, last) == ("offload=host", "1.76 GB")
