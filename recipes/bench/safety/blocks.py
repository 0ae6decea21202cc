"""Campaigns of random programs, in blocks that several processes share out.

A campaign is one cell of sums: numbers are added, lists joined, counts added by name.
It also says which blocks it has (`ranges`: how many from each first block on), under
which torch they ran, and which were never ended (`unended`: their process died, which
is a finding like any other). It is written before and after every block, so a rerun
goes on where the last one was, and every difference can be made again from its seed.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recipes.bench.common.cells import Cells, arguments

CELL = "campaign"
Sums = dict[str, Any]


def campaign_arguments(
    text: str | None, name: str | None = None
) -> argparse.ArgumentParser:
    """What a campaign in blocks may be told."""
    parser = arguments(text, 36_000, name)
    parser.add_argument("--first-block", type=int, default=0)
    parser.add_argument(
        "--add", type=Path, nargs="*", default=[], help="results of other processes"
    )
    return parser


def merge(sums: Sums, found: Sums) -> None:
    """Add to the sums."""
    for name, value in found.items():
        if isinstance(value, dict):
            both = Counter(sums.get(name, {})) + Counter(value)
            sums[name] = dict(sorted(both.items()))
        elif isinstance(value, list):
            sums[name] = sums.get(name, []) + value
        else:
            sums[name] = round(sums.get(name, 0) + value, 1)


def add_up(sums: Sums, path: Path) -> None:
    """Add another process's campaign.

    Raises:
        ValueError: both have the same block.
    """
    theirs = json.loads(path.read_text())["cells"][CELL]
    running = theirs.pop("running", None)
    mine = [_range(item) for item in sums.get("ranges", {}).items()]
    for item in theirs.get("ranges", {}).items():
        first, end = _range(item)
        if any(first < other_end and other < end for other, other_end in mine):
            raise ValueError(
                f"{path} has blocks {first} to {end - 1}, which are counted already"
            )
    merge(sums, theirs)
    if running is not None:
        merge(sums, {"unended": [running]})
    ranges = [_range(item) for item in sums.get("ranges", {}).items()]
    unended = [  # by now: others may have run it
        block
        for block in sums.pop("unended", [])
        if not any(first <= block < end for first, end in ranges)
    ]
    if unended:
        sums["unended"] = unended


def _range(item: tuple[str, int]) -> tuple[int, int]:
    first, num = int(item[0]), item[1]
    return first, first + num


def run_campaign(
    cells: Cells,
    options: argparse.Namespace,
    run_block: Callable[[int], Sums],
    num_graphs: int,
) -> Sums:
    """Add the other results, then run blocks until the graphs are done or the time is
    over.

    run_block: sums of one block, by its number; `graphs` and `different` among them.
    """
    sums: Sums = cells.data["cells"].setdefault(
        CELL, {"blocks": 0, "graphs": 0, "different": []}
    )
    for path in options.add:
        add_up(sums, path)
        cells.save()
    first = options.first_block
    while sums["graphs"] < num_graphs and cells.left_s() > 0:
        block = first + sums.get("ranges", {}).get(str(first), 0)
        start = time.monotonic()
        sums["running"] = block
        cells.save()
        found = run_block(block)
        del sums["running"]
        about = {
            "blocks": 1,
            "seconds": time.monotonic() - start,
            "ranges": {str(first): 1},
            "torch": {torch.__version__: 1},
        }
        merge(sums, {**found, **about})
        cells.save()
        print(
            f"{sums['graphs']} graphs, {len(sums['different'])} different, "
            f"{sums['seconds']:.0f} s",
            flush=True,
        )
    return sums


def verdict(sums: Sums, path: Path) -> str | None:
    """What is wrong; None if nothing is."""
    wrong = {name: len(sums.get(name, [])) for name in ("different", "unended")}
    return f"{wrong}: see {path}" if any(wrong.values()) else None
