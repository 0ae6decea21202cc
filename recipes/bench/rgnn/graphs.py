"""Statistics of real relational graphs: sizes, degrees, entity compaction ratio.

    python -m recipes.bench.rgnn.graphs --data /data

Wu (section 3.4.3) gives 26 % for FB15k with inverses; generated graphs stand in for
what is not at hand, and these figures say how far they can be trusted.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from hector.datasets.knowledge import load_fb15k_237, load_ogbn_mag_small
from hector.datasets.rdf import load_rdf
from hector.graph import HeteroGraph
from hector.statistics import statistics
from recipes.bench.common import results
from recipes.bench.common.cells import environment

SETS: dict[str, Callable[[Path], HeteroGraph]] = {
    "fb15k-237": load_fb15k_237,
    "aifb": lambda d: load_rdf("aifb", d).graph,
    "mutag": lambda d: load_rdf("mutag", d).graph,
    "ogbn-mag-0.1": load_ogbn_mag_small,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help=f"holds {', '.join(SETS)}")
    add("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    add("--out", type=Path, default=Path("recipes/bench/results/rgnn/rgnn_graphs.json"))
    args = parser.parse_args(argv)
    found = {}
    for name in args.sets:
        found[name] = vars(statistics(SETS[name](args.data / name)))
        print(f"{name}: compaction ratio {found[name]['entity_compaction_ratio']:.3f}")
    about = {"environment": environment(), "settings": {"inverses": True}}
    results.write(args.out, {**about, "cells": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
