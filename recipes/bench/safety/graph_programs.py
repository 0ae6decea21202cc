"""Random graph programs: what hector keeps, against fresh objects and plain loops.

The programs are those of the tests (`tests/hector/graphs/programs.py`).

    OMP_NUM_THREADS=1 python -m recipes.bench safety.graph_programs --graphs 20000
"""

from collections import Counter
from typing import Any

from recipes.bench.harness.cli import Bench
from recipes.bench.safety.blocks import Sums, run_campaign
from tests.hector.graphs.programs import CALLS, run_program

BLOCK = 100


def run_block(block: int) -> Sums:
    """One block of programs."""
    different: list[Any] = []
    features: Counter[str] = Counter()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        wrong, met = run_program(seed)
        different += wrong
        features += met
    counts = {"graphs": BLOCK, "equal": BLOCK - len(different)}
    return {**counts, "different": different, "features": dict(features)}


def main(bench: Bench, *, graphs: int = 20_000, workers: int = 1) -> None:
    """Blocks until the programs are done or the time is over.

    Args:
        graphs: programs
        workers: processes
    """
    cells = bench.cells({"calls": CALLS, "block": BLOCK})
    run_campaign(cells, run_block, graphs, workers=workers)
