"""The table that compares the runs of a sweep."""

import io
import re
from typing import Any

from rich.console import Console

from ssdtrain.tools.cli.sweep import table_of


def printed(found: list[dict[str, Any]], width: int) -> list[list[str]]:
    """The cells of the table's body on a terminal of `width` columns."""
    out = io.StringIO()
    Console(file=out, width=width).print(table_of(found))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    return [re.split(r" {2,}", line) for line in lines if line]


RUN = {
    "last_loss": 4.39878316,
    "step_ms": 12884.19,
    "step_ratio": 1.3459,
    "peak_bytes": 135_650_000,
    "last_peak_bytes": 113_630_000,
    "bytes_offloaded": 121_760_000,
}


def test_headings_and_figures_are_whole_on_eighty_columns() -> None:
    """A heading was split within a word, a status was a 0, and the peak was another
    one than that of the run's own table."""
    words = ["offload=host", "offload=ssd"]
    title, *head, first, second = printed(
        [{"overrides": word, "status": 0, **RUN} for word in words], 80
    )
    assert title == ["2 runs, all ok"]
    assert head == [
        ["last", "step,", "x", "peak,", "peak,"],
        ["setting", "loss", "median", "without", "all steps", "last step", "offloaded"],
    ]
    values = ["4.39878", "12884.2 ms", "x 1.346", "135.65 MB", "113.63 MB"]
    assert first == ["offload=host", *values, "121.76 MB"]
    assert second[0] == "offload=ssd"


def test_runs_that_fail_are_told_in_words() -> None:
    found = [{"overrides": "a=1", "status": 0, **RUN}]
    found += [
        {"overrides": "a=2", "status": 1, **RUN},
        {"overrides": "a=3", "status": 2},
    ]
    title, *_, good, bad, refused = printed(found, 100)
    assert title == ["3 runs"]
    assert (good[1], bad[1], refused[1]) == ("ok", "FAILED", "refused")
