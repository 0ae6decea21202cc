"""Campaigns of random programs, in blocks that several processes share out.

A campaign is one cell of sums: numbers are added, lists joined, counts added by name.
It is written after every block, so a rerun goes on where the last one was, and every
difference can be made again from its seed. A process that dies is a finding.
"""

import itertools
import logging
import multiprocessing
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any

import torch

from recipes.bench.harness.cells import Cells

CELL = "campaign"
Sums = dict[str, Any]
RunBlock = Callable[[int], Sums]
"""Sums of one block, by its number."""


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


def one_thread() -> None:
    """Let this process run blocks: refusals are counted, and not logged."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


def _found(
    run_block: RunBlock, first: int, workers: int, start: Callable[[], None]
) -> Iterator[Sums]:
    """Sums of blocks in their order, so that a rerun knows which are done."""
    if workers == 1:
        start()
        yield from map(run_block, itertools.count(first))
    # Forks of a process that has imported torch, and has touched no GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(workers, context, start) as pool:
        waiting = deque(pool.submit(run_block, first + n) for n in range(workers))
        for number in itertools.count(first + workers):
            yield waiting.popleft().result()
            waiting.append(pool.submit(run_block, number))


def run_campaign(
    cells: Cells,
    run_block: RunBlock,
    num: int,
    *,
    counted: str = "graphs",
    wrong: str = "different",
    workers: int = 1,
    start: Callable[[], None] = one_thread,
) -> None:
    """Run blocks until `num` are counted or the time is over; exit with an error if
    something is wrong.

    Args:
        counted: the sum that is to reach `num`.
        wrong: the list that should stay empty.
        workers: processes; one: this one.
        start: in each process, before its first block.
    """
    sums: Sums = cells.data["cells"].setdefault(CELL, {counted: 0, wrong: []})
    blocks = _found(run_block, sums.get("blocks", 0), workers, start)
    while sums[counted] < num and cells.left_s() > 0:
        begun = time.monotonic()
        try:
            found = next(blocks)
        except BrokenExecutor as error:
            merge(sums, {wrong: [f"block {sums.get('blocks', 0)} or later: {error}"]})
            break
        about = {"blocks": 1, "seconds": time.monotonic() - begun}
        merge(sums, {**found, **about, "torch": {torch.__version__: 1}})
        cells.save()
        told = f"{len(sums[wrong])} {wrong}, {sums['seconds']:.0f} s"
        print(f"{sums[counted]} {counted}, {told}", flush=True)
    cells.save()
    blocks.close()  # type: ignore[attr-defined]
    if sums[wrong]:
        sys.exit(f"{len(sums[wrong])} {wrong}: see {cells.path}")
