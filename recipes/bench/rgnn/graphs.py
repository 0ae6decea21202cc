"""Statistics of real relational graphs: sizes, degrees, entity compaction ratio.

    python -m recipes.bench rgnn.graphs --data /data

Wu (section 3.4.3) gives 26 % for FB15k with inverses; generated graphs stand in for
what is not at hand, and these figures say how far they can be trusted.
"""

from collections.abc import Callable
from pathlib import Path

from hector.datasets.knowledge import load_fb15k_237, load_ogbn_mag_small
from hector.datasets.rdf import load_rdf
from hector.graph import HeteroGraph
from hector.statistics import statistics
from recipes.bench.harness.cli import Bench

SETS: dict[str, Callable[[Path], HeteroGraph]] = {
    "fb15k-237": load_fb15k_237,
    "aifb": lambda d: load_rdf("aifb", d).graph,
    "mutag": lambda d: load_rdf("mutag", d).graph,
    "ogbn-mag-0.1": load_ogbn_mag_small,
}


def main(bench: Bench, *, data: Path, sets: tuple[str, ...] = tuple(SETS)) -> None:
    """Read each data set once.

    Args:
        data: holds a directory for each set
    """
    cells = bench.cells({"inverses": True})
    for name in sets:
        cells.run(name, lambda n=name: vars(statistics(SETS[n](data / n))))
