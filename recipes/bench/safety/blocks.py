"""Campaigns of random programs, in blocks that several processes share out.

A campaign is one cell of sums: numbers are added, lists joined, counts added by name.
It also says which blocks it has (`ranges`: how many from each first block on), under
which torch they ran, and which were never ended (`unended`: their process died, which
is a finding like any other). It is written before and after every block, so a rerun
goes on where the last one was, and every difference can be made again from its seed.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from recipes.bench.harness.cells import Cells

CELL = "campaign"
Sums = dict[str, Any]


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
    run_block: Callable[[int], Sums],
    num: int,
    *,
    counted: str = "graphs",
    wrong: tuple[str, ...] = ("different",),
    first_block: int = 0,
    add: Sequence[Path] = (),
) -> Sums:
    """Add the other results, then run blocks until `num` are counted or the time is
    over.

    Args:
        run_block: sums of one block, by its number.
        counted: the sum that is to reach `num`.
        wrong: lists and sums that should stay empty.
        first_block: others have those before it.
        add: results of other processes.
    """
    start = {"blocks": 0, counted: 0, **{name: [] for name in wrong}}
    sums: Sums = cells.data["cells"].setdefault(CELL, start)
    for path in add:
        add_up(sums, path)
        cells.save()
    while sums[counted] < num and cells.left_s() > 0:
        block = first_block + sums.get("ranges", {}).get(str(first_block), 0)
        begun = time.monotonic()
        sums["running"] = block
        cells.save()
        found = run_block(block)
        del sums["running"]
        about = {
            "blocks": 1,
            "seconds": time.monotonic() - begun,
            "ranges": {str(first_block): 1},
            "torch": {torch.__version__: 1},
        }
        merge(sums, {**found, **about})
        cells.save()
        told = ", ".join(f"{len(sums[name])} {name}" for name in wrong)
        print(f"{sums[counted]} {counted}, {told}, {sums['seconds']:.0f} s", flush=True)
    return sums


def seeds_of(
    block: int,
    size: int,
    run: Callable[[int], tuple[list[Any], Counter[str]]],
    num: int,
) -> Sums:
    """Sums of a block of so many seeds, of `num` graphs each: `run` gives what is
    different and the features of a seed."""
    different: list[Any] = []
    features: Counter[str] = Counter()
    for seed in range(block * size, (block + 1) * size):
        wrong, met = run(seed)
        different += wrong
        features += met
    graphs = size * num
    counts = {"graphs": graphs, "equal": graphs - len(different)}
    return {**counts, "different": different, "features": dict(features)}


def judge(sums: Sums, path: Path, wrong: tuple[str, ...] = ("different",)) -> None:
    """End with an error if something is wrong."""
    if (what := verdict(sums, path, wrong)) is not None:
        sys.exit(what)


def verdict(
    sums: Sums, path: Path, wrong: tuple[str, ...] = ("different",)
) -> str | None:
    """What is wrong; None if nothing is."""
    found = {name: len(sums.get(name, [])) for name in (*wrong, "unended")}
    return f"{found}: see {path}" if any(found.values()) else None
