"""Random models that train and then change their ways: gradients byte-equal to plain's.

The generators are `surprises.py`, `layered.py`, `operands.py`, `between.py` and
`stateful.py` in `tests/ssdtrain/graphs`: chains of operators, repeated layers whose
forwards run again, chains of which most is made again, chains of modules between which
the program writes, and layers that read state of many kinds. Every seed gives a model
of each. It runs under several plans, of which some are drawn and change under way.
Written down: how many graphs (steps of models) there were, how many runs of a model
under a plan were equal, in how many plain autograd raised as well, in how many ssdtrain
raised alone (it may, and says so), how often each operator and surprise occurred, and
every difference with its seed.

    OMP_NUM_THREADS=1 python -m recipes.bench safety.surprises --workers 2
"""

import traceback
import warnings
from collections import Counter
from typing import Any

from recipes.bench.harness.cli import Bench
from recipes.bench.safety.blocks import Sums, one_thread, run_campaign
from tests.ssdtrain.graphs import between, layered, operands, stateful, surprises
from tests.ssdtrain.graphs.surprises import difference, may_raise, raised_alone

BLOCK = 10
"""Seeds."""
GENERATORS: dict[str, Any] = {
    "chain": surprises,
    "layered": layered,
    "operands": operands,
    "between": between,
    "stateful": stateful,
}
COUNTED = "planned", "reruns"
"""Features of the runs under plans, not of the models."""


def run_block(block: int) -> Sums:
    """One block of models, plain and under every plan."""
    features: Counter[str] = Counter()
    counts: Counter[str] = Counter(models=0, graphs=0, equal=0)
    different = []
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        for name, generator in GENERATORS.items():
            theirs = generator.train(seed, None, features)
            counts["models"] += 1
            counts["graphs"] += len(theirs)
            for settings in generator.PLANS:
                met: Counter[str] = Counter()
                ending, what = ending_of(generator, seed, settings, theirs, met)
                features.update({each: met[each] for each in COUNTED})
                counts[ending] += 1
                if what:
                    found = {"seed": seed, "what": what, "settings": settings}
                    different.append({"generator": name, **found})
    del counts["different"]  # they are listed
    return {**counts, "different": different, "features": dict(features)}


def ending_of(
    generator: Any,
    seed: int,
    settings: dict[str, Any],
    theirs: list[Any],
    met: Counter[str],
) -> tuple[str, str]:
    """How the run under a plan compares; what is different, or nothing."""
    try:
        ours = generator.train(seed, settings, met)
    except Exception:  # plain has not raised it
        return "different", traceback.format_exc()[-1500:]
    what = difference(ours, theirs)
    if what is not None:
        return "different", what
    if raised_alone(ours, theirs):
        if not may_raise(generator, seed):
            return "different", "raised where everything can be made again"
        return "raised_alone", ""
    return ("raised_by_both" if isinstance(theirs[-1], str) else "equal"), ""


def start() -> None:
    """Let this process run blocks."""
    one_thread()
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript


def main(bench: Bench, *, graphs: int = 200_000, workers: int = 1) -> None:
    """Blocks until the graphs are done or the time is over.

    Args:
        workers: processes
    """
    cells = bench.cells({"device": "cpu", "block": BLOCK})
    run_campaign(cells, run_block, graphs, workers=workers, start=start)
